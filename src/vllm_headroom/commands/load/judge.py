"""Was what a load came to good, and did its memory grow?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any, Final

from vllm_headroom.commands.conclusion import Conclusion
from vllm_headroom.commands.load.stream import Outcome
from vllm_headroom.derive.leak.shape import GROWING_SECONDS, LEAKING_SECONDS
from vllm_headroom.model import called
from vllm_headroom.trace.course import Course
from vllm_headroom.units import duration
from vllm_headroom.vocabulary import LeakState

TOLERATED_RATIO: Final = 0.01
"""Of the requests that may fail: one connection that breaks among hundreds says nothing of the server."""


class LeakVerdict(StrEnum):
    """What the detector says of the whole run."""

    LEAKING = "leaking"
    GROWING = "growing"
    NO_LEAK = "no_leak"
    CANNOT_TELL = "cannot_tell"


def growth(course: Course, span_seconds: float) -> tuple[LeakVerdict, str]:
    """Return what a course over so many seconds amounts to, and why: a short one that saw nothing is no proof."""
    if course.leaking:
        return LeakVerdict.LEAKING, "even growth that load does not explain"
    if course.growing:
        return LeakVerdict.GROWING, "growth that load does not explain, not yet for long enough to call it a leak"
    if span_seconds < LEAKING_SECONDS:
        return LeakVerdict.CANNOT_TELL, (
            f"{duration(span_seconds)} is too short, an early warning takes {GROWING_SECONDS / 60:.0f} minutes of"
            f" growth or more and an alarm about {LEAKING_SECONDS / 60:.0f}"
        )
    if course.state is LeakState.STABLE:
        return LeakVerdict.NO_LEAK, "no growth that load does not explain"
    return LeakVerdict.CANNOT_TELL, f"the detector ended in state {course.state}"


def verdict(outcomes: Counter[Outcome], *, is_faulty: bool, stopped: bool) -> Conclusion:
    """Return whether it is good; a load that was cut short cannot be."""
    if is_faulty:
        return Conclusion.NOT_GOOD
    unsure = stopped or outcomes[Outcome.NOT_SENT] or not outcomes[Outcome.SUCCEEDED]
    return Conclusion.CANNOT_TELL if unsure else Conclusion.GOOD


def faults(
    outcomes: Counter[Outcome], ended: str | None, memory: Iterable[Mapping[str, Any]], *, stopped: bool
) -> Iterator[str]:
    """Yield what is not good: of the requests, of how the engine ended meanwhile, and of the series of memory."""
    if count := outcomes[Outcome.OUT_OF_MEMORY]:
        yield f"{count} answers were out of memory"
    if ended is not None:
        yield ended
    had_time = outcomes.total() - outcomes[Outcome.NOT_SENT] - (outcomes[Outcome.UNFINISHED] if stopped else 0)
    unserved = had_time - outcomes[Outcome.SUCCEEDED] - outcomes[Outcome.OUT_OF_MEMORY]
    if had_time and not outcomes[Outcome.SUCCEEDED]:
        yield "no request succeeded"
    elif unserved > TOLERATED_RATIO * had_time:
        yield f"{unserved} of {had_time} requests were not served"
    for series in memory:
        if series["verdict"] is LeakVerdict.LEAKING:
            on_gpu = "gpu" in series
            whose = called(series["gpu"], series["uuid"]) if on_gpu else f"host memory of {series['process']}"
            yield f"{whose} leaks"
