"""What was found, in words for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_headroom.trace.course import Course, Interval, Moment
from vllm_headroom.trace.entries import unnamed
from vllm_headroom.trace.replay import Watch
from vllm_headroom.units import duration, instant, size

MOST_INTERVALS: Final = 5
"""What a person reads; --json has them all."""


def verdict(watch: Watch) -> Iterator[str]:
    """Yield the lines to show: the span, then each GPU, then each host role."""
    if not watch.samples:
        yield "The trace has no samples."
        return
    begin, end = watch.span
    yield f"{watch.samples} samples over {duration(end - begin)}, {instant(begin)} to {instant(end)}."
    for index, uuid, course in watch.gpus:
        name = f"GPU {index}" if uuid == unnamed(index) else f"GPU {index} ({uuid})"
        yield from _series(name, course, begin)
    for role, course in watch.host:
        yield from _series(f"Host memory of {role}", course, begin)
    if not watch.gpus:
        yield "No GPU of the engine's was seen."


def _series(name: str, course: Course, begin: float) -> Iterator[str]:
    if course.growing or course.leaking:
        yield ""
    if course.first is None:
        told = "only early warnings, no alarm" if course.growing else "no leak"
        yield f"{name}: {told}; {course.state} at the end."
    else:
        yield f"{name}: LEAKING; {course.state} at the end."
    yield from _intervals("early warning", course.growing)
    yield from _intervals("alarm", course.leaking)
    if course.first is not None:
        yield f"  at the first alarm, {duration(course.first.seconds - begin)} after the trace begins:"
        yield from _moment(course.first)
    if course.last is not None and course.last is not course.first:
        yield f"  at the last, {instant(course.last.seconds)}:"
        yield from _moment(course.last)


def _intervals(name: str, intervals: tuple[Interval, ...]) -> Iterator[str]:
    for begin, end in intervals[:MOST_INTERVALS]:
        until = "to the end" if end is None else f"to {instant(end)}, {duration(end - begin)}"
        yield f"  {name:<14} {instant(begin)} {until}"
    if len(intervals) > MOST_INTERVALS:
        yield f"  {name:<14} and {len(intervals) - MOST_INTERVALS} times more"


def _moment(moment: Moment) -> Iterator[str]:
    if moment.bytes_per_second is not None:
        yield f"    how fast     {_rate(moment)}"
    if moment.by_requests is not None:
        yield f"    driven by    {'requests' if moment.by_requests else 'time'}"
    if moment.leaked_bytes is not None:
        yield f"    how much     {size(moment.leaked_bytes)} since it began"
    if moment.time_to_oom_seconds is not None:
        least = moment.time_to_oom_seconds_lower
        bound = "" if least is None else f", {duration(least)} at the least"
        yield f"    time to OOM  {duration(moment.time_to_oom_seconds)}{bound}"


def _rate(moment: Moment) -> str:
    text = f"{size(moment.bytes_per_second or 0.0)}/s"
    if moment.bytes_per_second_lower is not None and moment.bytes_per_second_upper is not None:
        text += f" (95 %: {size(moment.bytes_per_second_lower)}/s to {size(moment.bytes_per_second_upper)}/s)"
    if moment.bytes_per_request is not None:
        text += f", {size(1000 * moment.bytes_per_request)} per thousand requests"
    return text
