"""Drawings of memory and load over a trace, as SVG and for a terminal."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final

from vllm_headroom.expose import drawing
from vllm_headroom.expose.drawing import (
    MARGIN,
    STYLE,
    Forecast,
    Frame,
    Point,
    escape_text,
    find_top,
)
from vllm_headroom.model import name_device
from vllm_headroom.units import DAY_SECONDS, GIB, format_instant, format_size
from vllm_headroom.vocabulary import LeakState
from vllm_headroom_tools.history import Curves, LeakCourse, LeakReplay
from vllm_headroom_tools.terminal import Pick, draw_bars

WIDTH: Final = 1000.0
HEIGHT: Final = 200.0
ABOVE: Final = 30.0
BELOW: Final = 30.0
COLUMNS: Final = 500
HOST: Final = "host memory: free, down to zero"
AHEAD: Final = 0.5
"""A forecast is at most half as long as the trace."""


def draw_picture(watch: LeakReplay, curves: Curves) -> str:
    """Draw a box for each GPU, of free memory or else of the engine's memory, one for the host and one for the load."""
    begin, end = watch.span
    forecasts = [_build_forecast(course, curves.of("free", uuid)) for _, uuid, course in watch.gpus]
    ahead = max((MARGIN * each.seconds for each in forecasts if each is not None), default=0.0)
    span = begin, end + min(ahead, AHEAD * (end - begin))
    boxes = []
    for (index, uuid, course), forecast in zip(watch.gpus, forecasts, strict=True):
        points = curves.of("free", uuid)
        to_zero = bool(points)
        what = "free memory, down to zero" if to_zero else "memory held by the engine"
        full = (
            ""
            if forecast is None
            else f", out of memory {format_instant(forecast.begin + forecast.seconds)}"
        )
        title = f"{name_device(index, uuid)}: {what}; {course.state} at the end{full}"
        marks = [seconds for seconds, _ in course.leaking]
        points = points if to_zero else curves.of("held", uuid)
        boxes.append(_draw_box(title, points, span, marks, forecast, sized=True, to_zero=to_zero))
    if host := curves.of("host"):
        boxes.append(_draw_box(HOST, host, span, sized=True, to_zero=True))
    boxes.append(_draw_box("running requests", curves.of("running"), span))
    height = len(boxes) * (ABOVE + HEIGHT + BELOW)
    placed = "".join(
        f'<g transform="translate(0 {place * (ABOVE + HEIGHT + BELOW) + ABOVE:.0f})">{box}</g>'
        for place, box in enumerate(boxes)
    )
    ground = '<rect width="100%" height="100%" fill="var(--ground)"/>'
    frame = Frame(begin=begin, end=end, top=1.0, width=WIDTH, height=height)
    title = f"{len(watch.gpus)} GPUs from {format_instant(begin)} to {format_instant(end)}"
    style = f"<style>{escape(STYLE, quote=False)}</style>"
    return drawing.draw_picture(frame, (style, ground, placed), title=title, stretch=False)


def _build_forecast(course: LeakCourse, points: list[Point]) -> Forecast | None:
    last, free = (
        course.last_alarm,
        next((value for _, value in reversed(points) if value is not None), None),
    )
    if (
        course.state is not LeakState.LEAKING
        or last is None
        or last.time_to_oom_seconds is None
        or free is None
    ):
        return None
    left, least = last.time_to_oom_seconds, last.time_to_oom_seconds_lower
    return Forecast(begin=last.seconds, value=free, seconds=left, earliest_seconds=least)


def _draw_box(
    title: str,
    points: list[Point],
    span: tuple[float, float],
    marks: Sequence[float] = (),
    forecast: Forecast | None = None,
    *,
    sized: bool = False,
    to_zero: bool = False,
) -> str:
    begin, end = span
    known = [value for _, value in points if value is not None]
    top = drawing.find_top(known) if to_zero else max(known, default=1.0)
    frame = Frame(begin=begin, end=end, top=top, width=WIDTH, height=HEIGHT)
    stretches = drawing.thin_curve(drawing.build_curve(points), COLUMNS)
    shapes = [
        drawing.draw_curve(frame, stretches),
        *(drawing.draw_mark(frame, seconds) for seconds in marks),
        "" if forecast is None else drawing.draw_forecast(frame, forecast),
        drawing.draw_zero(frame) if to_zero else "",
    ]
    return "".join(
        (
            f'<text x="4" y="-8">{escape_text(title)}</text>',
            f'<text x="{WIDTH - 4:.0f}" y="-8" text-anchor="end">{format_size(top) if sized else f"{top:.0f}"}</text>',
            *shapes,
            f'<text x="4" y="{HEIGHT + 18:.0f}">{format_instant(begin)}</text>',
            f'<text x="{WIDTH - 4:.0f}" y="{HEIGHT + 18:.0f}" text-anchor="end">{format_instant(end)}</text>',
        )
    )


MEMORY_LINES: Final = 10
LOAD_LINES: Final = 5
AXIS: Final = 11
"""Columns of the axis labels."""


def draw_charts(watch: LeakReplay, curves: Curves, *, columns: int) -> Iterator[str]:
    """Yield the lines of a chart for each GPU, one for the host and one for the load."""
    width = columns - AXIS
    for index, uuid, course in watch.gpus:
        alarm = None if course.first_alarm is None else course.first_alarm.seconds
        name, unit = (
            name_device(index, uuid),
            "GiB" if alarm is None else "GiB; ▲ is the first alarm",
        )
        free = _convert_to_gib(curves.of("free", uuid))
        if free:
            title = f"{name}: free memory, down to zero, {unit}"
            yield from _draw_chart(title, free, width, MEMORY_LINES, alarm=alarm)
            continue
        held, title = (
            _convert_to_gib(curves.of("held", uuid)),
            f"{name}: memory held by the engine, {unit}",
        )
        values = [value for _, value in held if value is not None] or [0.0]
        # on the scale of the whole GPU, growth would not show
        floor = max(0.0, min(values) - (0.05 * (max(values) - min(values)) or 0.01 * max(values)))
        yield from _draw_chart(title, held, width, MEMORY_LINES, alarm=alarm, pick=max, floor=floor)
    yield from _draw_chart(f"{HOST}, GiB", _convert_to_gib(curves.of("host")), width, MEMORY_LINES)
    yield from _draw_chart("running requests", curves.of("running"), width, LOAD_LINES, pick=max)


def _convert_to_gib(points: list[Point]) -> list[Point]:
    return [(seconds, None if value is None else value / GIB) for seconds, value in points]


def _draw_chart(
    title: str,
    points: list[Point],
    width: int,
    lines: int,
    *,
    alarm: float | None = None,
    pick: Pick = min,
    floor: float = 0.0,
) -> Iterator[str]:
    values = [value for _, value in points if value is not None]
    if not values:
        return
    top = find_top(values) if pick is min else max(values)
    decimals = next(
        (digits for digits, least in ((0, 20.0), (1, 2.0), (2, 0.2)) if top - floor >= least), 3
    )
    levels = [f"{level:9.{decimals}f}" for level in (top, floor)]
    begin, end = (pick_time(seconds for seconds, _ in points) for pick_time in (min, max))
    yield from ("", title)
    for place, line in enumerate(draw_bars(points, width, lines, ends=(floor, top), pick=pick)):
        yield f"{'' if place else levels[0]:>9} │{line}"
    axis = "─" * width
    if alarm is not None:
        place = min(width - 1, int(width * (alarm - begin) / (end - begin or 1.0)))
        axis = f"{axis[:place]}▲{axis[place + 1 :]}"
    yield f"{levels[1]} └{axis}"
    form = "%H:%M" if end - begin <= DAY_SECONDS else "%m-%d %H:%M"
    first, last = (datetime.fromtimestamp(seconds, UTC).strftime(form) for seconds in (begin, end))
    yield f"{'':{AXIS}}{first:<{width // 2}}{last:>{width - width // 2}}"
