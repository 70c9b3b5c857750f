"""Rules on leaks: a restart gives the memory back and another version mends them; no option does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from vllm_headroom.commands.advise.facts import Facts, Leak
from vllm_headroom.commands.advise.finding import Advice, Cause, Change, Evidence
from vllm_headroom.commands.advise.flags import Version
from vllm_headroom.derive.leak.inside import PLACES
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A leak of host memory whose cause was found."""

    role: Role
    first: Version
    last: Version
    text: str


KNOWN: Final = (
    Known(
        role=Role.ENGINE_CORE,
        first=(0, 18, 0),
        last=(0, 25, 0),
        text="Upgrade to vLLM 0.26 or newer: from 0.18 to 0.25 a list of block ids is never emptied"
        " (vllm-project/vllm#44490)",
    ),
    Known(
        role=Role.WORKER,
        first=(0, 24, 0),
        last=(0, 27, 1),
        text="If CUDA graphs are turned off, turn them on: without them workers of 0.24 to 0.27.1 leak"
        " (vllm-project/vllm#50150)",
    ),
)
"""Those of the runbook HeadroomHostMemoryLeak that a role and a version tell."""


def gpu_leak(facts: Facts) -> Advice | None:
    """Fit where the leak detector gave its alarm on a GPU; its thresholds are its own (docs/leaks.md)."""
    leaks = [(f"GPU {gpu.index}", gpu.leak) for gpu in facts.gpus if gpu.leak.leaked]
    if not leaks:
        return None
    name, leak = _worst(leaks)
    soon = leak.time_to_oom_seconds if leak.time_to_oom_seconds_lower is None else leak.time_to_oom_seconds_lower
    when = "in a quiet hour" if soon is None else f"within {duration(soon)}, the least that is left"
    return Advice(
        cause=Cause.GPU_LEAK,
        summary=f"The engine leaks GPU memory on {', '.join(name for name, _ in leaks)}{_until(leak)}.",
        evidence=tuple(_figures(name, leak)),
        changes=_mended(leak, when, *_cures(leak.location)),
        remark=FRAGMENTS if leak.location is LeakLocation.FRAGMENTATION else NO_FLAG,
    )


def _cures(location: LeakLocation | None) -> tuple[str, ...]:
    """Return what mends it: three places, three cures."""
    match location:
        case LeakLocation.FRAGMENTATION:
            return (EXPANDABLE, VERSION)
        case LeakLocation.OUTSIDE_TORCH:
            return (OUTSIDE,)
        case LeakLocation.TENSORS:
            return (f"{VERSION}; it is tensors that nobody frees: report it to vLLM with the trace",)
        case None:
            return (VERSION,)


def host_leak(facts: Facts) -> Advice | None:
    """Fit where the detector gave its alarm on the resident memory of a role of processes."""
    leaks = [(host.process, host.leak) for host in facts.hosts if host.leak.leaked]
    if not leaks:
        return None
    name, leak = _worst(leaks)
    held = next((host.held_bytes for host in facts.hosts if host.process == name), None)
    evidence = list(_figures(name, leak))
    if held is not None:
        evidence.append(Evidence("held_bytes", held, f"{name} holds {size(held)} of host memory"))
    known = [one.text for one in KNOWN if one.role == name and _is_of(one, facts.settings.version)]
    return Advice(
        cause=Cause.HOST_LEAK,
        summary=f"The engine's processes leak host memory: {', '.join(name for name, _ in leaks)}{_until(leak)}.",
        evidence=tuple(evidence),
        changes=_mended(leak, _before_the_kill(leak), *(known or ["Upgrade vLLM"])),
        remark="No option that sizes GPU memory has a part in it.",
    )


def _before_the_kill(leak: Leak) -> str:
    soon = leak.time_to_oom_seconds if leak.time_to_oom_seconds_lower is None else leak.time_to_oom_seconds_lower
    if soon is None:
        return "before the container's memory limit is reached"
    return f"within {duration(soon)}, the least that is left before the kernel kills it"


def _mended(leak: Leak, when: str, *texts: str) -> tuple[Change, ...]:
    restart = Change(text=f"Restart the engine {when}. {EVIDENCE_FIRST}", cost=RESTART)
    upgrades = tuple(Change(text=text, cost="another version to be tried out; a restart") for text in texts)
    return (restart, *upgrades) if _goes_on(leak) else upgrades


def _worst(leaks: list[tuple[str, Leak]]) -> tuple[str, Leak]:
    """Return a leak that goes on before one that ended, and the fastest of them."""
    return max(leaks, key=lambda each: (_goes_on(each[1]), each[1].bytes_per_second or 0.0))


def _goes_on(leak: Leak) -> bool:
    return leak.ended_seconds is None


def _until(leak: Leak) -> str:
    return "" if leak.ended_seconds is None else f"; it ended at {instant(leak.ended_seconds)}, as with a restart"


def _figures(name: str, leak: Leak) -> Iterator[Evidence]:
    yield Evidence("series", name, f"the leak detector's alarm on {name}; {leak.state} now")
    if leak.location is not None:
        yield Evidence(
            "location", leak.location, f"it grows in {PLACES[leak.location]}, by the probe inside the engine"
        )
    if leak.bytes_per_second is not None:
        rate = size(leak.bytes_per_second)
        yield Evidence("bytes_per_second", leak.bytes_per_second, f"{rate} per second")
    if leak.bytes_per_request is not None:
        rate = size(1000 * leak.bytes_per_request)
        yield Evidence("bytes_per_request", leak.bytes_per_request, f"{rate} per thousand requests")
    if leak.leaked_bytes is not None:
        yield Evidence("leaked_bytes", leak.leaked_bytes, f"{size(leak.leaked_bytes)} since it began")
    if leak.time_to_oom_seconds is not None and leak.state is LeakState.LEAKING:
        left = leak.time_to_oom_seconds
        yield Evidence("time_to_oom_seconds", left, f"out of memory in about {duration(left)}")


def _is_of(known: Known, version: Version | None) -> bool:
    return version is not None and known.first <= version <= known.last
