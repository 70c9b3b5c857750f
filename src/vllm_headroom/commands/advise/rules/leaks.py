"""Rules on leaks, of memory or of cache blocks: restarts give it back, another version mends it, and no option does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_headroom.commands.advise.engine_facts import EngineFacts
from vllm_headroom.commands.advise.facts import Facts, Leak
from vllm_headroom.commands.advise.finding import Advice, Cause, Change, Evidence, called, percent
from vllm_headroom.commands.advise.limits import LOST_RATIO, LOST_RISES
from vllm_headroom.derive.leak.location import PLACES
from vllm_headroom.derive.verdicts import STRANDED
from vllm_headroom.trace.course import Moment
from vllm_headroom.units import duration, instant, size
from vllm_headroom.vocabulary import LeakLocation, LeakState, Role

NO_FLAG: Final = "No option mends a leak: less for vLLM only makes the time until the next restart longer."
RESTART: Final = "a restart: drain the engine first, while another replica serves"
EVIDENCE_FIRST: Final = "Keep the trace and the engine's log first: a report needs them, and a restart wipes them out"


VERSION: Final = "Upgrade vLLM, or go back to the version before it began"
OUTSIDE: Final = (
    "Look for it in the release notes of NCCL and of the driver, by the versions in the engine's log, and try newer"
    " ones: it grows outside torch, in what neither vLLM nor torch frees"
)
EXPANDABLE: Final = (
    "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the engine's environment, unless sleep mode is on, which"
    " refuses it: what leaks is memory that torch has and cannot use, in fragments"
)
FRAGMENTS: Final = "No option of vLLM mends fragments: less for vLLM only makes the time until the next restart longer."


LIMIT: Final = "before the container's memory limit is reached"

Found = tuple[str, Leak, Moment]
"""A series, what the detector says of it, and its alarm."""


BLOCK_IDS: Final = (
    "Upgrade to vLLM 0.26 or newer: from 0.18 to 0.25 a list of block ids is never emptied (vllm-project/vllm#44490)"
)
NO_GRAPHS: Final = (
    "If CUDA graphs are turned off, turn them on: without them workers of 0.24 to 0.27.1 leak (vllm-project/vllm#50150)"
)
KNOWN: Final = (
    (Role.ENGINE_CORE, (0, 18, 0), (0, 25, 0), BLOCK_IDS),
    (Role.WORKER, (0, 24, 0), (0, 27, 1), NO_GRAPHS),
)
"""Leaks of host memory whose cause was found: the role, the first and the last version, and what mends it; those of the
runbook HeadroomHostMemoryLeak that a role and a version tell."""

CURES: Final[dict[LeakLocation | None, tuple[str, ...]]] = {
    LeakLocation.FRAGMENTATION: (EXPANDABLE, VERSION),
    LeakLocation.OUTSIDE_TORCH: (OUTSIDE,),
    LeakLocation.TENSORS: (f"{VERSION}; it is tensors that nobody frees: report it to vLLM with the trace",),
    None: (VERSION,),
}
"""Three places, three cures; and one where the place is not known."""


def gpu_leak(facts: Facts) -> Advice | None:
    """Fit where the leak detector gave its alarm on a GPU; its thresholds are its own (docs/leaks.md)."""
    leaks = [(gpu.called, gpu.leak, gpu.leak.alarm) for gpu in facts.gpus if gpu.leak.alarm is not None]
    if not leaks:
        return None
    name, leak, alarm = _worst(leaks)
    soon = _soon(alarm)
    when = "in a quiet hour" if soon is None else f"within {duration(soon)}, the least that is left"
    return Advice(
        cause=Cause.GPU_LEAK,
        summary=f"The engine leaks GPU memory on {', '.join(name for name, *_ in leaks)}{_until(leak)}.",
        evidence=tuple(_figures(name, leak.state, alarm)),
        changes=_mended(leak, when, *CURES[alarm.location]),
        remark=FRAGMENTS if alarm.location is LeakLocation.FRAGMENTATION else NO_FLAG,
    )


def host_leak(facts: Facts) -> Advice | None:
    """Fit where the detector gave its alarm on the resident memory of a role of processes."""
    leaks = [(host.process, host.leak, host.leak.alarm) for host in facts.hosts if host.leak.alarm is not None]
    if not leaks:
        return None
    name, leak, alarm = _worst(leaks)
    held = next((host.held_bytes for host in facts.hosts if host.process == name), None)
    evidence = list(_figures(name, leak.state, alarm))
    if held is not None:
        evidence.append(Evidence("held_bytes", held, f"{name} holds {size(held)} of host memory"))
    version = facts.settings.version
    known = [cure for role, first, last, cure in KNOWN if role == name and version and first <= version <= last]
    soon = _soon(alarm)
    when = f"within {duration(soon)}, the least that is left before the kernel kills it" if soon is not None else LIMIT
    return Advice(
        cause=Cause.HOST_LEAK,
        summary=f"The engine's processes leak host memory: {', '.join(name for name, *_ in leaks)}{_until(leak)}.",
        evidence=tuple(evidence),
        changes=_mended(leak, when, *(known or ["Upgrade vLLM"])),
        remark="No option that sizes GPU memory has a part in it.",
    )


def _soon(alarm: Moment) -> float | None:
    """Return the least time that is left, as far as it is known."""
    lower = alarm.time_to_oom_seconds_lower
    return alarm.time_to_oom_seconds if lower is None else lower


def _mended(leak: Leak, when: str, *texts: str) -> tuple[Change, ...]:
    restart = Change(text=f"Restart the engine {when}. {EVIDENCE_FIRST}", cost=RESTART)
    upgrades = tuple(Change(text=text, cost="another version to be tried out; a restart") for text in texts)
    return (restart, *upgrades) if leak.ended_seconds is None else upgrades


def _worst(leaks: list[Found]) -> Found:
    """Return a leak that goes on before one that ended, and the fastest of them."""
    return max(leaks, key=lambda each: (each[1].ended_seconds is None, each[2].bytes_per_second or 0.0))


def _until(leak: Leak) -> str:
    return "" if leak.ended_seconds is None else f"; it ended at {instant(leak.ended_seconds)}, as with a restart"


def _figures(name: str, state: LeakState, alarm: Moment) -> Iterator[Evidence]:
    yield Evidence("series", name, f"the leak detector's alarm on {name}; {state} now")
    if alarm.location is not None:
        where = f"it grows in {PLACES[alarm.location]}, by the probe inside the engine"
        yield Evidence("location", alarm.location, where)
    if alarm.bytes_per_second is not None:
        yield Evidence("bytes_per_second", alarm.bytes_per_second, f"{size(alarm.bytes_per_second)} per second")
    if alarm.bytes_per_request is not None:
        rate = size(1000 * alarm.bytes_per_request)
        yield Evidence("bytes_per_request", alarm.bytes_per_request, f"{rate} per thousand requests")
    if alarm.leaked_bytes is not None:
        yield Evidence("leaked_bytes", alarm.leaked_bytes, f"{size(alarm.leaked_bytes)} since it began")
    if alarm.time_to_oom_seconds is not None and state is LeakState.LEAKING:
        left = alarm.time_to_oom_seconds
        yield Evidence("time_to_oom_seconds", left, f"out of memory in about {duration(left)}")


def kv_block_leak(facts: Facts) -> Advice | None:
    """Fit where an idle engine holds more of its KV cache each time, or a twentieth of it at all."""
    lost = [engine for engine in facts.engines if _loses(engine)]
    if not lost:
        return None
    return Advice(
        cause=Cause.KV_BLOCK_LEAK,
        summary=f"Blocks of the KV cache are lost: {', '.join(called(facts, engine) for engine in lost)}.",
        evidence=tuple(each for engine in lost for each in _evidence(engine)),
        changes=(
            Change(text=f"Restart the engine in a quiet hour. {EVIDENCE_FIRST}", cost=RESTART),
            Change(
                text="Upgrade vLLM; where a KV connector transfers blocks, look in the log for transfers that failed,"
                " and try without it",
                cost="another version or another setting to be tried out; a restart",
            ),
        ),
        remark="GPU memory is not in danger: the cache only holds fewer requests, in the end none.",
    )


def _loses(engine: EngineFacts) -> bool:
    lost = engine.stranded
    if lost is None:
        return False
    return lost.ratio > STRANDED or (lost.rises >= LOST_RISES and lost.ratio > LOST_RATIO)


def _evidence(engine: EngineFacts) -> tuple[Evidence, ...]:
    lost = engine.stranded
    if lost is None:
        return ()
    held = f"{percent(lost.ratio)} of the KV cache stayed in use a minute after the last request"
    rose = f"it was more at {lost.rises} idle times, after {percent(lost.first_ratio)} at the first"
    return (
        Evidence("stranded_ratio", lost.ratio, held),
        *((Evidence("rises", lost.rises, rose),) if lost.rises else ()),
    )
