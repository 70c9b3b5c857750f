"""Does memory grow: the recorded trace, fed through the daemon's detector as replay does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from vllm_headroom.derive.leak.shape import GROWING_SECONDS, LEAKING_SECONDS
from vllm_headroom.trace.course import Course
from vllm_headroom.trace.read import recorded
from vllm_headroom.trace.replay import Watch
from vllm_headroom.units import duration
from vllm_headroom.vocabulary import LeakState


class LeakVerdict(StrEnum):
    """What the detector says of the whole run."""

    LEAKING = "leaking"
    GROWING = "growing"
    NO_LEAK = "no_leak"
    CANNOT_TELL = "cannot_tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The verdict on one series, why it is that, and what the detector says it grew by per request; None if nothing."""

    verdict: LeakVerdict
    state: LeakState
    reason: str
    bytes_per_request: float | None = None


def watched(trace: Path) -> Watch:
    """Return what the detector says of a trace; raises BadInput where it cannot be read."""
    watch = Watch()
    for snapshot in recorded(str(trace)):
        watch.step(snapshot)
    return watch


def growth(course: Course, span_seconds: float) -> Growth:
    """Return what a course over so many seconds amounts to; a short one that saw nothing is no proof of anything."""
    if course.leaking:
        moment = course.last
        per_request = None if moment is None else moment.bytes_per_request
        reason = "even growth that load does not explain"
        return Growth(verdict=LeakVerdict.LEAKING, state=course.state, reason=reason, bytes_per_request=per_request)
    if course.growing:
        reason = "growth that load does not explain, not yet for long enough to call it a leak"
        return Growth(verdict=LeakVerdict.GROWING, state=course.state, reason=reason)
    if course.state is LeakState.STABLE and span_seconds >= LEAKING_SECONDS:
        return Growth(verdict=LeakVerdict.NO_LEAK, state=course.state, reason="no growth that load does not explain")
    return Growth(verdict=LeakVerdict.CANNOT_TELL, state=course.state, reason=_unknown(course.state, span_seconds))


def _unknown(state: LeakState, span_seconds: float) -> str:
    if span_seconds < LEAKING_SECONDS:
        return (
            f"{duration(span_seconds)} is too short, an early warning takes {GROWING_SECONDS / 60:.0f} minutes of"
            f" growth or more and an alarm about {LEAKING_SECONDS / 60:.0f}"
        )
    return f"the detector ended in state {state}"
