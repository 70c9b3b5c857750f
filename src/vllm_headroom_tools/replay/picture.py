"""Memory and load over a trace as a picture, in a file or in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape
from typing import Final

from vllm_headroom.expose import drawing
from vllm_headroom.expose.drawing import MARGIN, STYLE, Forecast, Frame, Point, escaped, scale
from vllm_headroom.model import called
from vllm_headroom.units import GIB, instant, size
from vllm_headroom.vocabulary import LeakState
from vllm_headroom_tools.history.course import Course
from vllm_headroom_tools.history.curves import Curves
from vllm_headroom_tools.history.replay import Watch
from vllm_headroom_tools.terminal import Pick, bars

WIDTH: Final = 1000.0
HEIGHT: Final = 200.0
ABOVE: Final = 30.0
BELOW: Final = 30.0
COLUMNS: Final = 500
AHEAD: Final = 0.5
"""The future that is drawn is at most half as long as the past."""


def picture(watch: Watch, curves: Curves) -> str:
    """Return one box above the other: each GPU's free memory, or what the engine holds of it where that is not told."""
    begin, end = watch.span
    forecasts = [_forecast(course, curves.free(uuid)) for _, uuid, course in watch.gpus]
    ahead = max((MARGIN * each.seconds for each in forecasts if each is not None), default=0.0)
    span = begin, end + min(ahead, AHEAD * (end - begin))
    rooms = [_room(gpu, curves, span, forecast) for gpu, forecast in zip(watch.gpus, forecasts, strict=True)]
    boxes = [*rooms, _box("running requests", curves.running, span)]
    height = len(boxes) * (ABOVE + HEIGHT + BELOW)
    placed = "".join(
        f'<g transform="translate(0 {place * (ABOVE + HEIGHT + BELOW) + ABOVE:.0f})">{box}</g>'
        for place, box in enumerate(boxes)
    )
    ground = '<rect width="100%" height="100%" fill="var(--ground)"/>'
    frame = Frame(begin=begin, end=end, top=1.0, width=WIDTH, height=height)
    title = f"{len(rooms)} GPUs from {instant(begin)} to {instant(end)}"
    return drawing.picture(
        frame, (f"<style>{escape(STYLE, quote=False)}</style>", ground, placed), title=title, stretch=False
    )


def _room(gpu: tuple[int, str, Course], curves: Curves, span: tuple[float, float], forecast: Forecast | None) -> str:
    index, uuid, course = gpu
    free = curves.free(uuid)
    known = any(value is not None for _, value in free)
    what = "free memory, down to zero" if known else "memory held by the engine"
    full = "" if forecast is None else f", out of memory {instant(forecast.begin + forecast.seconds)}"
    marks = tuple(interval[0] for interval in course.leaking)
    title = f"{called(index, uuid)}: {what}; {course.state} at the end{full}"
    return _box(title, free if known else curves.held(uuid), span, marks, forecast, sized=True, to_zero=known)


def _forecast(course: Course, points: list[Point]) -> Forecast | None:
    last, free = course.last, next((value for _, value in reversed(points) if value is not None), None)
    if course.state is not LeakState.LEAKING or last is None or last.time_to_oom_seconds is None or free is None:
        return None
    left, least = last.time_to_oom_seconds, last.time_to_oom_seconds_lower
    return Forecast(begin=last.seconds, value=free, seconds=left, least_seconds=least)


def _box(
    title: str,
    points: list[Point],
    span: tuple[float, float],
    marks: tuple[float, ...] = (),
    forecast: Forecast | None = None,
    *,
    sized: bool = False,
    to_zero: bool = False,
) -> str:
    begin, end = span
    known = [value for _, value in points if value is not None]
    top = drawing.scale(known) if to_zero else max(known, default=1.0)
    frame = Frame(begin=begin, end=end, top=top, width=WIDTH, height=HEIGHT)
    stretches = drawing.thinned(drawing.through(points), COLUMNS)
    shapes = [
        drawing.curve(frame, stretches),
        *(drawing.upright(frame, seconds) for seconds in marks),
        "" if forecast is None else drawing.ahead(frame, forecast),
        drawing.zero(frame) if to_zero else "",
    ]
    return "".join(
        (
            f'<text x="4" y="-8">{escaped(title)}</text>',
            f'<text x="{WIDTH - 4:.0f}" y="-8" text-anchor="end">{size(top) if sized else f"{top:.0f}"}</text>',
            *shapes,
            f'<text x="4" y="{HEIGHT + 18:.0f}">{instant(begin)}</text>',
            f'<text x="{WIDTH - 4:.0f}" y="{HEIGHT + 18:.0f}" text-anchor="end">{instant(end)}</text>',
        )
    )


MEMORY_LINES: Final = 10
LOAD_LINES: Final = 5
DAY_SECONDS: Final = 86400.0
AXIS: Final = 11
"""Columns before the drawing: the labels of its axis."""


def charts(watch: Watch, curves: Curves, *, columns: int) -> Iterator[str]:
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
