"""Rules on leaks of memory or cache blocks, and on shortages: a restart frees leaks, an upgrade fixes them."""

from collections.abc import Iterable
from math import floor
from typing import Final

from vllm_headroom.derive.leak.inside import PLACES
from vllm_headroom.derive.verdicts import LOW_BYTES, STRANDED_RATIO
from vllm_headroom.units import format_duration, format_instant, format_size
from vllm_headroom.vocabulary import LeakLocation, LeakState
from vllm_headroom_tools.advise.facts import (
    AIM_BYTES,
    Facts,
    GpuFacts,
    Leak,
    Origin,
    Shortage,
    Spell,
)
from vllm_headroom_tools.advise.finding import (
    Advice,
    Cause,
    Change,
    Evidence,
    drop_none,
    format_percent,
    list_evidence,
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

RESTART: Final = "a restart: drain the engine first, while another replica serves"
EVIDENCE_FIRST: Final = (
    "Save the trace and the engine's log first: a report needs them, and a restart deletes them"
)
VERSION: Final = "Upgrade vLLM, or go back to the version before the leak"

CURES: Final[dict[LeakLocation | None, tuple[str, ...]]] = {
    LeakLocation.FRAGMENTATION: (
        (
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the engine's environment, unless sleep mode is on,"
            " which refuses it: what grows is fragmented memory that torch has reserved and cannot use"
        ),
        VERSION,
    ),
    LeakLocation.OUTSIDE_TORCH: (
        (
            "Look for it in the release notes of NCCL and of the driver, by the versions in the engine's log, and try"
            " newer ones: it grows outside torch, where neither vLLM nor torch can free it"
        ),
    ),
    LeakLocation.TENSORS: (
        f"{VERSION}; the growth is tensors that nobody frees: report it to vLLM with the trace",
    ),
    None: (VERSION,),
}
"""The fixes by location, and one for an unknown location."""


def find_gpu_leak(facts: Facts) -> Advice | None:
    """Fit where the leak detector raised its alarm on a GPU (docs/leaks.md)."""
    found = _pick_worst_leak((gpu.display_name, gpu.leak) for gpu in facts.gpus)
    if found is None:
        return None
    names, name, leak, alarm = found
    what = (
        "of vLLM fixes fragmentation"
        if alarm.location is LeakLocation.FRAGMENTATION
        else "fixes a leak"
    )
    return Advice(
        cause=Cause.GPU_LEAK,
        summary=f"The engine leaks GPU memory on {names}.",
        evidence=_list_leak_evidence(name, leak, alarm),
        changes=_list_remedies(
            leak, alarm, "in a quiet hour", "out of memory", CURES[alarm.location]
        ),
        remark=f"No option {what}: a smaller share for vLLM only delays the next restart.",
    )


def find_host_leak(facts: Facts) -> Advice | None:
    """Fit where the detector raised its alarm on the host memory of a role of processes."""
    found = _pick_worst_leak((host.process, host.leak) for host in facts.hosts)
    if found is None:
        return None
    names, name, leak, alarm = found
    held = next((host.held_bytes for host in facts.hosts if host.process == name), None)
    version, holds = facts.settings.version, f"{name} holds {{}} of host memory"
    quiet = "before the container's memory limit is reached"
    known = [
        fault.advice for fault in FAULTS if fault.role == name and version and fault.is_in(version)
    ]
    return Advice(
        cause=Cause.HOST_LEAK,
        summary=f"The engine's processes leak host memory: {names}.",
        evidence=(
            *_list_leak_evidence(name, leak, alarm),
            *list_evidence(("held_bytes", held, holds)),
        ),
        changes=_list_remedies(
            leak, alarm, quiet, "a kill by the kernel", known or ["Upgrade vLLM"]
        ),
        remark="No option that sizes GPU memory affects it.",
    )


def _pick_worst_leak(leaks: Iterable[tuple[str, Leak]]) -> tuple[str, str, Leak, Moment] | None:
    """Return the names of all that leaked, and the fastest leak, one that goes on before one that ended."""
    alarms = [(name, leak, leak.alarm) for name, leak in leaks if leak.alarm is not None]
    if not alarms:
        return None
    names = ", ".join(name for name, *_ in alarms)
    worst = max(
        alarms, key=lambda each: (each[1].ended_seconds is None, each[2].bytes_per_second or 0.0)
    )
    end = worst[1].ended_seconds
    return (
        names if end is None else f"{names}; it ended at {format_instant(end)}, as with a restart",
        *worst,
    )


def _list_remedies(
    leak: Leak, alarm: Moment, quiet: str, end: str, cures: Iterable[str]
) -> tuple[Change, ...]:
    upgrades = tuple(
        Change(text=text, cost="a test of another version; a restart") for text in cures
    )
    if leak.ended_seconds is not None:
        return upgrades
    lower = alarm.time_to_oom_seconds_lower
    soon = alarm.time_to_oom_seconds if lower is None else lower
    when = (
        quiet
        if soon is None
        else f"within {format_duration(soon)}, the lower bound of the time to {end}"
    )
    return (Change(text=f"Restart the engine {when}. {EVIDENCE_FIRST}", cost=RESTART), *upgrades)


def _list_leak_evidence(name: str, leak: Leak, alarm: Moment) -> tuple[Evidence, ...]:
    thousand = format_size(1000 * (alarm.bytes_per_request or 0.0))
    where = "" if alarm.location is None else PLACES[alarm.location]
    left = alarm.time_to_oom_seconds if leak.state is LeakState.LEAKING else None
    return list_evidence(
        ("series", name, f"the leak detector's alarm on {name}; {leak.state} now"),
        ("location", alarm.location, f"it grows in {where}, by the probe inside the engine"),
        ("bytes_per_second", alarm.bytes_per_second, "{} per second"),
        ("bytes_per_request", alarm.bytes_per_request, f"{thousand} per thousand requests"),
        ("leaked_bytes", alarm.leaked_bytes, "{} since it began"),
        ("time_to_oom_seconds", left, "out of memory in about {}"),
    )


def find_kv_block_leak(facts: Facts) -> Advice | None:
    """Fit where an idle engine holds more of its KV cache each time, or more than a twentieth of it."""
    lost = [
        (engine, held)
        for engine in facts.engines
        if (held := engine.stranded) is not None
        and (held.ratio > STRANDED_RATIO or (held.rises >= LOST_RISES and held.ratio > LOST_RATIO))
    ]
    if not lost:
        return None
    evidence: list[Evidence] = []
    for _, held in lost:
        rose = f"it was more at {held.rises} idle times, after {format_percent(held.first_ratio)} at the first"
        stayed = "{} of the KV cache stayed in use a minute after the last request"
        evidence += list_evidence(
            ("stranded_ratio", held.ratio, stayed), ("rises", held.rises or None, rose)
        )
    return Advice(
        cause=Cause.KV_BLOCK_LEAK,
        summary=f"Blocks of the KV cache are lost: {', '.join(name_engine(facts, engine) for engine, _ in lost)}.",
        evidence=tuple(evidence),
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


SHORTAGES: Final = {
    Shortage.LEVEL: (Cause.CONFIGURATION_OVERSHOOT, "vLLM takes more of {} than it can spare"),
    Shortage.RISEN: (Cause.CHRONIC, "Memory of {} filled up after the start"),
    Shortage.PEAK: (Cause.BURST, "Bursts nearly fill {}"),
}
"""The cause and the summary of each kind, not counting the memory of others.

From the start on, vLLM's share leaves too little for what is outside of it: CUDA context, NCCL, late kernels
(DESIGN.md, 7). After a rise, these are high-water marks of the allocator, which keeps what a request once needed
(DESIGN.md, 20).
"""


def find_shortage(facts: Facts, kind: Shortage) -> Advice | None:
    """Fit where a time of this kind left too little room, without a leak.

    The changes for bursts are those of the runbook HeadroomGpuMemoryPeak, in its order.
    """
    found = [(gpu, spell) for gpu in facts.gpus for spell in gpu.spells if spell.kind is kind]
    if not found:
        return None
    gpu, spell = min(found, key=lambda each: each[1].least_bytes)
    cause, text = SHORTAGES[kind]
    ended = sum(each.ended_engine for _, each in found)
    summary = text.format(gpu.display_name) + (" now" if facts.origin is Origin.PAGE else "")
    changes = drop_none(take_less(facts, gpu, AIM_BYTES - spell.least_bytes))
    remark = "The share in use means little, since vLLM takes most of the GPU at its start; what is left counts."
    if kind is Shortage.PEAK:
        summary = (
            f"Bursts fill {gpu.display_name}, and the engine exits"
            if ended
            else text.format(gpu.display_name)
        )
        changes = (*drop_none(_halve_steps(facts), _run_fewer(facts, gpu, spell)), *changes)
        remark = "A lower share for vLLM makes room for bursts and shrinks the KV cache; a full KV cache is no shortage."
    seconds = "" if spell.seconds is None else f", for {format_duration(spell.seconds)}"
    at = "" if spell.began_seconds is None else f" from {format_instant(spell.began_seconds)}"
    roomy = (
        ""
        if gpu.roomy_running is None
        else f", at most {gpu.roomy_running:,.0f} while more was left"
    )
    now, times = facts.settings.gpu_memory_utilization, len(found) if len(found) > 1 else None
    evidence = list_evidence(
        (
            "least_room_bytes",
            spell.least_bytes,
            f"{{}} were left on {gpu.display_name}{at}{seconds}",
        ),
        ("times", times, f"{{}} times less than {format_size(LOW_BYTES)}"),
        ("leak_state", gpu.leak.state, f"the leak detector's state is {gpu.leak.state}"),
        ("engine_ended", ended or None, "the engine released its memory after {} of them"),
        ("running", spell.running, f"{{}} requests ran then{roomy}"),
        ("gpu_memory_utilization", now, f"vLLM may take {now or 0.0:.3g} of the GPU"),
    )
    return Advice(
        cause=cause, summary=f"{summary}.", evidence=evidence, changes=changes, remark=remark
    )


def _halve_steps(facts: Facts) -> Change | None:
    """Halve the tokens of a step, and so its activations; only where the current value is known."""
    now = facts.settings.max_num_batched_tokens
    if now is None or now < 1024:  # noqa: PLR2004 - below, prompts take more steps than that saves
        return None
    text = "halves what one step computes, and with it the memory of its peak"
    return lower_option(
        facts,
        Flag.MAX_NUM_BATCHED_TOKENS,
        now // 2,
        text,
        "long prompts take more steps; a restart",
    )


def _run_fewer(facts: Facts, gpu: GpuFacts, spell: Spell) -> Change | None:
    """Limit the requests to as many as ran with room, where more ran in the burst."""
    engines = len(facts.engines)
    if (
        not engines
        or not gpu.roomy_running
        or spell.running is None
        or gpu.roomy_running >= spell.running
    ):
        return None
    text = f"as many as ran with {format_size(LOW_BYTES)} and more left"
    cost = "in a burst requests wait in the queue; a restart"
    return lower_option(facts, Flag.MAX_NUM_SEQS, floor(gpu.roomy_running / engines), text, cost)
