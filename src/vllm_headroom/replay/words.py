"""What was found, in words for people."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from vllm_headroom.parse.trace import unnamed
from vllm_headroom.replay.course import Course, Interval, Moment
from vllm_headroom.replay.watch import Watch

PREFIXES: Final = ("", "k", "M", "G", "T", "P")
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


def size(n_bytes: float) -> str:
    """Return bytes with a decimal prefix and three digits."""
    value, power = abs(n_bytes), 0
    while value >= 999.5 and power < len(PREFIXES) - 1:  # noqa: PLR2004 - what three digits round to a thousand
        value, power = value / 1000, power + 1
    sign = "-" if n_bytes < 0 else ""
    return f"{sign}{value:.3g} {PREFIXES[power]}B"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    whole = round(abs(seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next((place for place, (count, _) in enumerate(parts) if count), len(parts) - 1)
    sign = "-" if seconds < 0 else ""
    return sign + " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2])


def instant(seconds: float) -> str:
    """Return a time of the trace as a date in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
