"""Free memory over a trace as a picture in a file."""

from __future__ import annotations

from html import escape
from typing import Final

from vllm_headroom.expose import drawing
from vllm_headroom.expose.drawing import MARGIN, STYLE, Forecast, Frame, Point
from vllm_headroom.model import called
from vllm_headroom.trace.course import Course
from vllm_headroom.trace.curves import Curves
from vllm_headroom.trace.replay import Watch
from vllm_headroom.units import instant, size
from vllm_headroom.vocabulary import LeakState

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
            f'<text x="4" y="-8">{escape(title)}</text>',
            f'<text x="{WIDTH - 4:.0f}" y="-8" text-anchor="end">{size(top) if sized else f"{top:.0f}"}</text>',
            *shapes,
            f'<text x="4" y="{HEIGHT + 18:.0f}">{instant(begin)}</text>',
            f'<text x="{WIDTH - 4:.0f}" y="{HEIGHT + 18:.0f}" text-anchor="end">{instant(end)}</text>',
        )
    )
