"""Memory and load as a picture in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from vllm_headroom.commands.bars import Pick, bars
from vllm_headroom.expose.drawing import Point, scale
from vllm_headroom.model import called
from vllm_headroom.trace.course import Course
from vllm_headroom.trace.curves import Curves
from vllm_headroom.trace.replay import Watch
from vllm_headroom.units import GIB

MEMORY_LINES: Final = 10
LOAD_LINES: Final = 5
DAY_SECONDS: Final = 86400.0
AXIS: Final = 11
"""Columns before the drawing: the labels of its axis."""


def drawing(watch: Watch, curves: Curves, *, columns: int) -> Iterator[str]:
    """Yield the lines of a chart for each GPU and of one of the load, where anything could be read."""
    width = columns - AXIS
    for index, uuid, course in watch.gpus:
        yield from _gpu(called(index, uuid), course, curves.free(uuid), curves.held(uuid), width)
    yield from _chart("running requests", curves.running, width, LOAD_LINES, pick=max)


def _gpu(name: str, course: Course, free: list[Point], held: list[Point], width: int) -> Iterator[str]:
    alarm = None if course.first is None else course.first.seconds
    mark = "" if alarm is None else "; ▲ is the first alarm"
    title = f"{name}: {{}}, GiB{mark}"
    if any(value is not None for _, value in free):
        yield from _chart(title.format("free memory, down to zero"), _in_gib(free), width, MEMORY_LINES, alarm=alarm)
    else:
        held, what = _in_gib(held), title.format("memory held by the engine")
        yield from _chart(what, held, width, MEMORY_LINES, alarm=alarm, pick=max, floor=_floor(held))


def _in_gib(points: list[Point]) -> list[Point]:
    return [(seconds, None if value is None else value / GIB) for seconds, value in points]


def _floor(points: list[Point]) -> float:
    """Return where the axis of what is held begins: of a whole card, growth would be a line on the top."""
    values = [value for _, value in points if value is not None] or [0.0]
    return max(0.0, min(values) - (0.05 * (max(values) - min(values)) or 0.01 * max(values)))


def _chart(
    title: str,
    points: list[Point],
    width: int,
    lines: int,
    *,
    alarm: float | None = None,
    pick: Pick = min,
    floor: float = 0.0,
) -> Iterator[str]:
    """Yield one chart; nothing where nothing could be read."""
    values = [value for _, value in points if value is not None]
    if not values:
        return
    top = scale(values) if pick is min else max(values)
    levels = [f"{level:9.{_decimals(top - floor)}f}" for level in (top, floor)]
    times = [seconds for seconds, _ in points]
    yield from ("", title)
    for place, line in enumerate(bars(points, width, lines, ends=(floor, top), pick=pick)):
        yield f"{'' if place else levels[0]:>9} │{line}"
    yield f"{levels[1]} └{_axis(times, alarm, width)}"
    yield f"{'':{AXIS}}{_clock(min(times), times):<{width // 2}}{_clock(max(times), times):>{width - width // 2}}"


def _axis(times: list[float], alarm: float | None, width: int) -> str:
    line = "─" * width
    if alarm is None:
        return line
    place = min(width - 1, int(width * (alarm - min(times)) / (max(times) - min(times) or 1.0)))
    return f"{line[:place]}▲{line[place + 1 :]}"


def _clock(seconds: float, times: list[float]) -> str:
    form = "%H:%M" if max(times) - min(times) <= DAY_SECONDS else "%m-%d %H:%M"
    return datetime.fromtimestamp(seconds, UTC).strftime(form)


def _decimals(span: float) -> int:
    """Return how many digits after the point tell the levels of an axis apart."""
    return next((digits for digits, least in ((0, 20.0), (1, 2.0), (2, 0.2)) if span >= least), 3)
