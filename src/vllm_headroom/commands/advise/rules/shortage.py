"""Rules on memory that runs short outside of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor

from vllm_headroom.commands.advise.facts import Facts, GpuFacts, Origin, Shortage, Spell
from vllm_headroom.commands.advise.finding import Advice, Cause, Change, Evidence, count, lowered, several
from vllm_headroom.commands.advise.limits import AIM_BYTES
from vllm_headroom.commands.advise.rules.room import take_less
from vllm_headroom.commands.advise.settings import Flag
from vllm_headroom.derive.verdicts import LOW_BYTES
from vllm_headroom.units import duration, instant, size

Found = tuple[GpuFacts, Spell]


def configuration_overshoot(facts: Facts) -> Advice | None:
    """Fit where less than LOW_BYTES were left ever since the engine held its memory, without what others took.

    vLLM's share leaves too little for what lies outside of it: CUDA context, NCCL, late kernels (DESIGN.md, 7).
    """
    return _too_much_taken(
        facts, Shortage.LEVEL, Cause.CONFIGURATION_OVERSHOOT, "vLLM takes more of {gpu} than it can spare"
    )


def chronic(facts: Facts) -> Advice | None:
    """Fit where the room fell below LOW_BYTES after the start and stayed there, and the leak detector says no leak.

    High-water marks of the allocator: what a request needed once is not given back (DESIGN.md, 20).
    """
    return _too_much_taken(facts, Shortage.RISEN, Cause.CHRONIC, "Memory of {gpu} filled up after the start")


def burst(facts: Facts) -> Advice | None:
    """Fit where less than PEAK_BYTES were left for a moment, or the engine ended in a moment with less than LOW_BYTES.

    The changes are those of the runbook HeadroomGpuMemoryPeak, in its order.
    """
    found = _spells(facts, Shortage.PEAK)
    if not found:
        return None
    gpu, spell = _worst(found)
    ended = sum(spell.ended_engine for _, spell in found)
    summary = f"Bursts nearly fill {gpu.called}" if not ended else f"Bursts fill {gpu.called}, and the engine ends"
    return Advice(
        cause=Cause.BURST,
        summary=f"{summary}.",
        evidence=tuple(_evidence(facts, found)),
        changes=several(_smaller_steps(facts), _fewer(facts, gpu, spell), _less(facts, gpu, spell)),
        remark="A lower share for vLLM makes room for bursts and a smaller KV cache; a full KV cache is no shortage.",
    )


def _too_much_taken(facts: Facts, kind: Shortage, cause: Cause, summary: str) -> Advice | None:
    found = _spells(facts, kind)
    if not found:
        return None
    gpu, spell = _worst(found)
    return Advice(
        cause=cause,
        summary=f"{summary.format(gpu=gpu.called)}{' now' if facts.origin is Origin.PAGE else ''}.",
        evidence=tuple(_evidence(facts, found)),
        changes=several(_less(facts, gpu, spell)),
        remark="The share of the card in use says nothing, vLLM takes most of it at its start; what is left counts.",
    )


def _spells(facts: Facts, kind: Shortage) -> list[Found]:
    return [(gpu, spell) for gpu in facts.gpus for spell in gpu.spells if spell.kind is kind]


def _worst(found: list[Found]) -> Found:
    return min(found, key=lambda each: each[1].least_bytes)


def _evidence(facts: Facts, found: list[Found]) -> Iterator[Evidence]:
    gpu, spell = _worst(found)
    left = size(spell.least_bytes)
    seconds = "" if spell.seconds is None else f", for {duration(spell.seconds)}"
    at = "" if spell.began_seconds is None else f" from {instant(spell.began_seconds)}"
    yield Evidence("least_room_bytes", spell.least_bytes, f"{left} were left on {gpu.called}{at}{seconds}")
    if len(found) > 1:
        yield Evidence("times", len(found), f"{len(found)} times less than {size(LOW_BYTES)}")
    yield Evidence("leak_state", gpu.leak.state, f"the leak detector says {gpu.leak.state}")
    ended = sum(spell.ended_engine for _, spell in found)
    if ended:
        yield Evidence("engine_ended", ended, f"the engine let go of its memory after {ended} of them")
    if spell.running is not None:
        ran = f"{count(spell.running)} requests ran then"
        roomy = "" if gpu.roomy_running is None else f", {count(gpu.roomy_running)} at the most while more was left"
        yield Evidence("running", spell.running, ran + roomy)
    if facts.settings.gpu_memory_utilization is not None:
        now = facts.settings.gpu_memory_utilization
        yield Evidence("gpu_memory_utilization", now, f"vLLM may take {now:.3g} of the GPU")


def _less(facts: Facts, gpu: GpuFacts, spell: Spell) -> Change | None:
    return take_less(facts, gpu, AIM_BYTES - spell.least_bytes)


def _smaller_steps(facts: Facts) -> Change | None:
    """Halve the tokens of a step, with which its activations shrink; only where it is known what they are."""
    now = facts.settings.max_num_batched_tokens
    if now is None or now < 1024:  # noqa: PLR2004 - below, prompts take more steps than that saves
        return None
    return lowered(
        facts,
        Flag.MAX_NUM_BATCHED_TOKENS,
        now // 2,
        text="halves what one step computes, and with it the most it needs for a moment",
        cost="long prompts take more steps; a restart",
    )


def _fewer(facts: Facts, gpu: GpuFacts, spell: Spell) -> Change | None:
    """Return as many requests as ran with room, where more ran in the burst; the rest waits in the queue."""
    engines = len(facts.engines)
    if not engines or not gpu.roomy_running or spell.running is None or gpu.roomy_running >= spell.running:
        return None
    return lowered(
        facts,
        Flag.MAX_NUM_SEQS,
        floor(gpu.roomy_running / engines),
        text=f"as many as ran with {size(LOW_BYTES)} and more left",
        cost="in a burst requests wait in the queue; a restart",
    )
