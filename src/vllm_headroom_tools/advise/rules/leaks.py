"""Rules on leaks of memory or cache blocks, and on shortages: a restart frees leaks, an upgrade fixes them."""

from collections.abc import Iterator
from math import floor
from typing import Final

from vllm_headroom.derive.leak.inside import PLACES
from vllm_headroom.derive.verdicts import LOW_BYTES, STRANDED
from vllm_headroom.units import format_duration, format_instant, format_size
from vllm_headroom.vocabulary import LeakLocation, LeakState
from vllm_headroom_tools.advise.facts import AIM_BYTES, EngineFacts, Facts, GpuFacts, Leak, Origin, Shortage, Spell
from vllm_headroom_tools.advise.finding import (
    Advice,
    Cause,
    Change,
    Evidence,
    drop_none,
    format_percent,
    lower_option,
    name_engine,
)
from vllm_headroom_tools.advise.rules.capacity import take_less
from vllm_headroom_tools.advise.settings import Flag
from vllm_headroom_tools.history import Moment
from vllm_headroom_tools.versions import FAULTS

LOST_RATIO: Final = 0.01
LOST_RISES: Final = 3
"""The share of the KV cache that no request holds, and its rises (alert HeadroomKvBlocksLeak)."""

NO_FLAG: Final = "No option fixes a leak: a smaller share for vLLM only delays the next restart."
RESTART: Final = "a restart: drain the engine first, while another replica serves"
EVIDENCE_FIRST: Final = "Save the trace and the engine's log first: a report needs them, and a restart deletes them"


VERSION: Final = "Upgrade vLLM, or go back to the version before the leak"
OUTSIDE: Final = (
    "Look for it in the release notes of NCCL and of the driver, by the versions in the engine's log, and try newer"
    " ones: it grows outside torch, where neither vLLM nor torch can free it"
)
EXPANDABLE: Final = (
    "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the engine's environment, unless sleep mode is on, which"
    " refuses it: what grows is fragmented memory that torch has reserved and cannot use"
)
FRAGMENTS: Final = "No option of vLLM fixes fragmentation: a smaller share for vLLM only delays the next restart."


LIMIT: Final = "before the container's memory limit is reached"

LeakFound = tuple[str, Leak, Moment]
"""A series, its leak verdict, and its alarm."""

CURES: Final[dict[LeakLocation | None, tuple[str, ...]]] = {
    LeakLocation.FRAGMENTATION: (EXPANDABLE, VERSION),
    LeakLocation.OUTSIDE_TORCH: (OUTSIDE,),
    LeakLocation.TENSORS: (f"{VERSION}; the growth is tensors that nobody frees: report it to vLLM with the trace",),
    None: (VERSION,),
}
"""The fixes by location, and one for an unknown location."""


def find_gpu_leak(facts: Facts) -> Advice | None:
    """Fit where the leak detector raised its alarm on a GPU (docs/leaks.md)."""
    leaks = [(gpu.called, gpu.leak, gpu.leak.alarm) for gpu in facts.gpus if gpu.leak.alarm is not None]
    if not leaks:
        return None
    name, leak, alarm = _pick_worst_leak(leaks)
    soon = _find_time_left(alarm)
    when = (
        "in a quiet hour"
        if soon is None
        else f"within {format_duration(soon)}, the lower bound of the time to out of memory"
    )
    return Advice(
        cause=Cause.GPU_LEAK,
        summary=f"The engine leaks GPU memory on {', '.join(name for name, *_ in leaks)}{_describe_end(leak)}.",
        evidence=tuple(_list_leak_evidence(name, leak.state, alarm)),
        changes=_list_remedies(leak, when, *CURES[alarm.location]),
        remark=FRAGMENTS if alarm.location is LeakLocation.FRAGMENTATION else NO_FLAG,
    )


def find_host_leak(facts: Facts) -> Advice | None:
    """Fit where the detector raised its alarm on the host memory of a role of processes."""
    leaks = [(host.process, host.leak, host.leak.alarm) for host in facts.hosts if host.leak.alarm is not None]
    if not leaks:
        return None
    name, leak, alarm = _pick_worst_leak(leaks)
    held = next((host.held_bytes for host in facts.hosts if host.process == name), None)
    evidence = list(_list_leak_evidence(name, leak.state, alarm))
    if held is not None:
        evidence.append(Evidence("held_bytes", held, f"{name} holds {format_size(held)} of host memory"))
    version = facts.settings.version
    known = [fault.cure for fault in FAULTS if fault.role == name and version and fault.is_in(version)]
    soon = _find_time_left(alarm)
    when = (
        LIMIT
        if soon is None
        else f"within {format_duration(soon)}, the lower bound of the time to a kill by the kernel"
    )
    return Advice(
        cause=Cause.HOST_LEAK,
        summary=f"The engine's processes leak host memory:"
        f" {', '.join(name for name, *_ in leaks)}{_describe_end(leak)}.",
        evidence=tuple(evidence),
        changes=_list_remedies(leak, when, *(known or ["Upgrade vLLM"])),
        remark="No option that sizes GPU memory affects it.",
    )


def _find_time_left(alarm: Moment) -> float | None:
    lower = alarm.time_to_oom_seconds_lower
    return alarm.time_to_oom_seconds if lower is None else lower


def _list_remedies(leak: Leak, when: str, *texts: str) -> tuple[Change, ...]:
    restart = Change(text=f"Restart the engine {when}. {EVIDENCE_FIRST}", cost=RESTART)
    upgrades = tuple(Change(text=text, cost="a test of another version; a restart") for text in texts)
    return (restart, *upgrades) if leak.ended_seconds is None else upgrades


def _pick_worst_leak(leaks: list[LeakFound]) -> LeakFound:
    """Return the fastest leak, one that goes on before one that ended."""
    return max(leaks, key=lambda each: (each[1].ended_seconds is None, each[2].bytes_per_second or 0.0))


def _describe_end(leak: Leak) -> str:
    return (
        "" if leak.ended_seconds is None else f"; it ended at {format_instant(leak.ended_seconds)}, as with a restart"
    )


def _list_leak_evidence(name: str, state: LeakState, alarm: Moment) -> Iterator[Evidence]:
    yield Evidence("series", name, f"the leak detector's alarm on {name}; {state} now")
    if alarm.location is not None:
        where = f"it grows in {PLACES[alarm.location]}, by the probe inside the engine"
        yield Evidence("location", alarm.location, where)
    if alarm.bytes_per_second is not None:
        yield Evidence("bytes_per_second", alarm.bytes_per_second, f"{format_size(alarm.bytes_per_second)} per second")
    if alarm.bytes_per_request is not None:
        rate = format_size(1000 * alarm.bytes_per_request)
        yield Evidence("bytes_per_request", alarm.bytes_per_request, f"{rate} per thousand requests")
    if alarm.leaked_bytes is not None:
        yield Evidence("leaked_bytes", alarm.leaked_bytes, f"{format_size(alarm.leaked_bytes)} since it began")
    if alarm.time_to_oom_seconds is not None and state is LeakState.LEAKING:
        left = alarm.time_to_oom_seconds
        yield Evidence("time_to_oom_seconds", left, f"out of memory in about {format_duration(left)}")


def find_kv_block_leak(facts: Facts) -> Advice | None:
    """Fit where an idle engine holds more of its KV cache each time, or more than a twentieth of it."""
    lost = [engine for engine in facts.engines if _has_lost_blocks(engine)]
    if not lost:
        return None
    return Advice(
        cause=Cause.KV_BLOCK_LEAK,
        summary=f"Blocks of the KV cache are lost: {', '.join(name_engine(facts, engine) for engine in lost)}.",
        evidence=tuple(each for engine in lost for each in _list_block_evidence(engine)),
        changes=(
            Change(text=f"Restart the engine in a quiet hour. {EVIDENCE_FIRST}", cost=RESTART),
            Change(
                text="Upgrade vLLM; where a KV connector transfers blocks, look in the log for transfers that failed,"
                " and try without it",
                cost="a test of another version or setting; a restart",
            ),
        ),
        remark="GPU memory does not run out: the cache only holds fewer requests, in the end none.",
    )


def _has_lost_blocks(engine: EngineFacts) -> bool:
    lost = engine.stranded
    if lost is None:
        return False
    return lost.ratio > STRANDED or (lost.rises >= LOST_RISES and lost.ratio > LOST_RATIO)


def _list_block_evidence(engine: EngineFacts) -> tuple[Evidence, ...]:
    lost = engine.stranded
    if lost is None:
        return ()
    held = f"{format_percent(lost.ratio)} of the KV cache stayed in use a minute after the last request"
    rose = f"it was more at {lost.rises} idle times, after {format_percent(lost.first_ratio)} at the first"
    return (
        Evidence("stranded_ratio", lost.ratio, held),
        *((Evidence("rises", lost.rises, rose),) if lost.rises else ()),
    )


ShortageFound = tuple[GpuFacts, Spell]


def find_configuration_overshoot(facts: Facts) -> Advice | None:
    """Fit where less than LOW_BYTES were left since the start, not counting the memory of others.

    vLLM's share leaves too little for what is outside of it: CUDA context, NCCL, late kernels (DESIGN.md, 7).
    """
    return _find_shortage(
        facts, Shortage.LEVEL, Cause.CONFIGURATION_OVERSHOOT, "vLLM takes more of {gpu} than it can spare"
    )


def find_chronic_shortage(facts: Facts) -> Advice | None:
    """Fit where the room fell below LOW_BYTES after the start and stayed there without a leak.

    These are high-water marks of the allocator, which keeps what a request once needed (DESIGN.md, 20).
    """
    return _find_shortage(facts, Shortage.RISEN, Cause.CHRONIC, "Memory of {gpu} filled up after the start")


def find_burst(facts: Facts) -> Advice | None:
    """Fit where a moment left less than PEAK_BYTES, or the engine exited in a moment with less than LOW_BYTES.

    The changes are those of the runbook HeadroomGpuMemoryPeak, in its order.
    """
    found = _find_spells(facts, Shortage.PEAK)
    if not found:
        return None
    gpu, spell = _pick_worst_shortage(found)
    ended = sum(spell.ended_engine for _, spell in found)
    summary = f"Bursts nearly fill {gpu.called}" if not ended else f"Bursts fill {gpu.called}, and the engine exits"
    return Advice(
        cause=Cause.BURST,
        summary=f"{summary}.",
        evidence=tuple(_list_shortage_evidence(facts, found)),
        changes=drop_none(_halve_steps(facts), _run_fewer(facts, gpu, spell), _take_less(facts, gpu, spell)),
        remark="A lower share for vLLM makes room for bursts and shrinks the KV cache; a full KV cache is no shortage.",
    )


def _find_shortage(facts: Facts, kind: Shortage, cause: Cause, summary: str) -> Advice | None:
    found = _find_spells(facts, kind)
    if not found:
        return None
    gpu, spell = _pick_worst_shortage(found)
    return Advice(
        cause=cause,
        summary=f"{summary.format(gpu=gpu.called)}{' now' if facts.origin is Origin.PAGE else ''}.",
        evidence=tuple(_list_shortage_evidence(facts, found)),
        changes=drop_none(_take_less(facts, gpu, spell)),
        remark="The share in use means little, since vLLM takes most of the GPU at its start; what is left counts.",
    )


def _find_spells(facts: Facts, kind: Shortage) -> list[ShortageFound]:
    return [(gpu, spell) for gpu in facts.gpus for spell in gpu.spells if spell.kind is kind]


def _pick_worst_shortage(found: list[ShortageFound]) -> ShortageFound:
    return min(found, key=lambda each: each[1].least_bytes)


def _list_shortage_evidence(facts: Facts, found: list[ShortageFound]) -> Iterator[Evidence]:
    gpu, spell = _pick_worst_shortage(found)
    left = format_size(spell.least_bytes)
    seconds = "" if spell.seconds is None else f", for {format_duration(spell.seconds)}"
    at = "" if spell.began_seconds is None else f" from {format_instant(spell.began_seconds)}"
    yield Evidence("least_room_bytes", spell.least_bytes, f"{left} were left on {gpu.called}{at}{seconds}")
    if len(found) > 1:
        yield Evidence("times", len(found), f"{len(found)} times less than {format_size(LOW_BYTES)}")
    yield Evidence("leak_state", gpu.leak.state, f"the leak detector's state is {gpu.leak.state}")
    ended = sum(spell.ended_engine for _, spell in found)
    if ended:
        yield Evidence("engine_ended", ended, f"the engine released its memory after {ended} of them")
    if spell.running is not None:
        ran = f"{spell.running:,.0f} requests ran then"
        roomy = "" if gpu.roomy_running is None else f", at most {gpu.roomy_running:,.0f} while more was left"
        yield Evidence("running", spell.running, ran + roomy)
    if facts.settings.gpu_memory_utilization is not None:
        now = facts.settings.gpu_memory_utilization
        yield Evidence("gpu_memory_utilization", now, f"vLLM may take {now:.3g} of the GPU")


def _take_less(facts: Facts, gpu: GpuFacts, spell: Spell) -> Change | None:
    return take_less(facts, gpu, AIM_BYTES - spell.least_bytes)


def _halve_steps(facts: Facts) -> Change | None:
    """Halve the tokens of a step, and so its activations; only where the current value is known."""
    now = facts.settings.max_num_batched_tokens
    if now is None or now < 1024:  # noqa: PLR2004 - below, prompts take more steps than that saves
        return None
    return lower_option(
        facts,
        Flag.MAX_NUM_BATCHED_TOKENS,
        now // 2,
        text="halves what one step computes, and with it the memory of its peak",
        cost="long prompts take more steps; a restart",
    )


def _run_fewer(facts: Facts, gpu: GpuFacts, spell: Spell) -> Change | None:
    """Limit the requests to as many as ran with room, where more ran in the burst."""
    engines = len(facts.engines)
    if not engines or not gpu.roomy_running or spell.running is None or gpu.roomy_running >= spell.running:
        return None
    return lower_option(
        facts,
        Flag.MAX_NUM_SEQS,
        floor(gpu.roomy_running / engines),
        text=f"as many as ran with {format_size(LOW_BYTES)} and more left",
        cost="in a burst requests wait in the queue; a restart",
    )
