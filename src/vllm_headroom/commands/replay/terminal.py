"""Memory and load as a picture in the terminal."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import plotext

from vllm_headroom.expose.drawing import Point, thinned
from vllm_headroom.trace.curves import Curves, limits
from vllm_headroom.trace.replay import Watch
from vllm_headroom.units import GIB

DOTS: Final = 2
"""Of a braille character, side by side."""

MEMORY_LINES: Final = 13
LOAD_LINES: Final = 8
TICKS: Final = 5
DAY_SECONDS: Final = 86400.0
FRAME: Final = 12
"""Columns beside the drawing: the labels of its axis and the frame."""


def drawing(watch: Watch, curves: Curves, *, columns: int) -> list[list[str]]:
    """Return the lines of a chart for each GPU and one of the load, where anything could be read."""
    charts: list[str] = []
    for index, uuid, course in watch.gpus:
        alarms = () if course.first is None else (course.first.seconds,)
        mark = "; the upright line is the first alarm" if alarms else ""
        free = [point for point in curves.free[uuid] if point[1] is not None]
        what = "free memory, down to zero" if free else "memory held by the engine"
        points = curves.free[uuid] if free else curves.held[uuid]
        title = f"GPU {index}: {what}, GiB{mark}"
        charts += _chart(title, points, alarms, unit=GIB, columns=columns, lines=MEMORY_LINES, to_zero=bool(free))
    charts += _chart("running requests", curves.running, (), unit=1.0, columns=columns, lines=LOAD_LINES)
    return [[line.rstrip() for line in str(plotext.uncolorize(chart)).splitlines()] for chart in charts]


def _chart(
    title: str,
    points: list[Point],
    marks: tuple[float, ...],
    *,
    unit: float,
    columns: int,
    lines: int,
    to_zero: bool = False,
) -> list[str]:
    """Return one chart; none where nothing could be read."""
    stretches = thinned(points, DOTS * (columns - FRAME))
    if not stretches:
        return []
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(columns, lines)
    for stretch in stretches:
        times, values = zip(*stretch, strict=True)
        plotext.plot(times, [value / unit for value in values], marker="braille")
    for seconds in marks:
        plotext.vline(seconds)
    low, high = limits(stretches)
    _axes(points, (0.0 if to_zero else low / unit, high / unit), lines)
    return [f"{title}\n{plotext.build()}"]


def _axes(points: list[Point], ends: tuple[float, float], lines: int) -> None:
    low, high = ends
    plotext.ylim(low, high)
    levels = [low + (high - low) * step / (lines // 3) for step in range(lines // 3 + 1)]
    plotext.yticks(levels, [f"{level:9.{_decimals(high - low)}f}" for level in levels])
    begin, end = min(seconds for seconds, _ in points), max(seconds for seconds, _ in points)
    times = [begin + (end - begin) * step / (TICKS - 1) for step in range(TICKS)]
    form = "%H:%M" if end - begin <= DAY_SECONDS else "%m-%d %H:%M"
    plotext.xticks(times, [datetime.fromtimestamp(time, UTC).strftime(form) for time in times])


def _decimals(span: float) -> int:
    """Return how many digits after the point tell the levels of an axis apart."""
    return next((digits for digits, least in ((0, 20.0), (1, 2.0), (2, 0.2)) if span >= least), 3)
