"""Memory and load as a PNG file."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure

from vllm_headroom.commands.replay.curves import Curves, Point, limits, thinned
from vllm_headroom.trace.course import Course
from vllm_headroom.trace.replay import Watch

COLUMNS: Final = 1600
DOTS_PER_INCH: Final = 150
WIDTH_INCHES: Final = 11.0
CHART_INCHES: Final = 3.0
GB: Final = 1e9
GROWING: Final = "#f2c14e"
LEAKING: Final = "#d1495b"
LINE: Final = "#1f4e79"


def save(watch: Watch, curves: Curves, file: Path) -> None:
    """Write a chart of the memory of each GPU and one of the load; raises OSError."""
    charts = len(watch.gpus) + 1
    figure = Figure(figsize=(WIDTH_INCHES, CHART_INCHES * charts), layout="constrained")
    axes = figure.subplots(charts, 1, sharex=True, squeeze=False)[:, 0]
    for chart, (index, uuid, course) in zip(axes, watch.gpus, strict=False):
        chart.set_title(f"GPU {index}: memory held by the engine (yellow: growing, red: leaking)", loc="left")
        chart.set_ylabel("GB")
        _draw(chart, curves.gpus[uuid], GB)
        _shade(chart, course, watch.span[1])
    axes[-1].set_title("running requests", loc="left")
    _draw(axes[-1], curves.running, 1.0)
    locator = AutoDateLocator(tz=UTC)  # type: ignore[no-untyped-call]
    axes[-1].xaxis.set_major_locator(locator)
    axes[-1].xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=UTC))  # type: ignore[no-untyped-call]
    axes[-1].set_xlabel("UTC")
    figure.savefig(file, dpi=DOTS_PER_INCH, format="png")


def _draw(chart: Axes, points: list[Point], unit: float) -> None:
    stretches = thinned(points, COLUMNS)
    for stretch in stretches:
        times = [_date(seconds) for seconds, _ in stretch]
        chart.plot(times, [value / unit for _, value in stretch], color=LINE, linewidth=1.0)  # type: ignore[arg-type]
    if stretches:
        low, high = limits(stretches)
        chart.set_ylim(low / unit, high / unit)
    chart.grid(visible=True, alpha=0.3)


def _shade(chart: Axes, course: Course, ends: float) -> None:
    for colour, intervals in ((GROWING, course.growing), (LEAKING, course.leaking)):
        for begin, end in intervals:
            until = _date(ends if end is None else end)
            chart.axvspan(_date(begin), until, color=colour, alpha=0.25, linewidth=0)  # type: ignore[arg-type]


def _date(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
