"""Drawings of the memory and load in a trace, as SVG and for a terminal."""

from collections.abc import Iterator, Sequence
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
from vllm_headroom.units import DAY_SECONDS, GIB, format_instant, format_size, to_datetime
from vllm_headroom.vocabulary import LeakState
from vllm_headroom_tools.history import Curves, LeakCourse, LeakReplay
from vllm_headroom_tools.terminal import Pick, draw_bars

WIDTH: Final = 1000.0
"""The width of the picture; all sizes here are in SVG units."""

HEIGHT: Final = 200.0
"""The height of the frame around one curve."""

ABOVE: Final = 30.0
"""The space for the title above a frame."""

BELOW: Final = 30.0
"""The space for the time labels below a frame."""

BOX_HEIGHT: Final = ABOVE + HEIGHT + BELOW
CURVE_COLUMNS: Final = 500
"""Curves are thinned to at most two points per column. More would not be visible."""

HOST_TITLE: Final = "host memory: free, on a scale from 0"
LONGEST_FORECAST_SHARE: Final = 0.5
"""Our choice: the longest forecast shown, as a share of the trace's span."""


def draw_replay(replay: LeakReplay, curves: Curves) -> str:
    """Return an SVG picture with boxes for each GPU, the host and the load.

    A GPU's box shows its free memory or, if that is unknown, the engine's memory. The host gets a
    box only if its memory is known.
    """
    begin, end = replay.span
    forecasts = [
        _build_forecast(course, curves.of("free", uuid)) for _, uuid, course in replay.gpus
    ]
    forecast_seconds = max(
        (MARGIN * forecast.seconds for forecast in forecasts if forecast is not None), default=0.0
    )
    # A forecast far into the future would leave no room for the past.
    span = (begin, end + min(forecast_seconds, LONGEST_FORECAST_SHARE * (end - begin)))
    boxes = [
        _draw_gpu(gpu, curves, span, forecast)
        for gpu, forecast in zip(replay.gpus, forecasts, strict=True)
    ]
    host_points = curves.of("host")
    if host_points:
        boxes.append(_draw_box(HOST_TITLE, host_points, span, is_in_bytes=True, has_zero_line=True))
    boxes.append(_draw_box("running requests", curves.of("running"), span))

    shapes = ['<rect width="100%" height="100%" fill="var(--ground)"/>']
    for place, box in enumerate(boxes):
        top = place * BOX_HEIGHT + ABOVE
        shapes.append(f'<g transform="translate(0 {top:.0f})">{box}</g>')
    style = f"<style>{escape(STYLE, quote=False)}</style>"
    frame = Frame(begin=begin, end=end, top=1.0, width=WIDTH, height=len(boxes) * BOX_HEIGHT)
    title = f"{len(replay.gpus)} GPUs from {format_instant(begin)} to {format_instant(end)}"
    return drawing.draw_picture(frame, (style, *shapes), title=title, stretch=False)


def _build_forecast(course: LeakCourse, free_points: list[Point]) -> Forecast | None:
    """Return the forecast of the last alarm, from the newest free memory to 0 bytes.

    Returns None if the trace does not end in an alarm. Also returns None if the time until OOM or
    the free memory is unknown.
    """
    alarm = course.last_alarm
    if course.state is not LeakState.LEAKING or alarm is None:
        return None
    # The newest known value is used, because the last sample may not contain the memory.
    free_bytes = next((value for _, value in reversed(free_points) if value is not None), None)
    if alarm.time_to_oom_seconds is None or free_bytes is None:
        return None
    return Forecast(
        begin=alarm.seconds,
        value=free_bytes,
        seconds=alarm.time_to_oom_seconds,
        earliest_seconds=alarm.time_to_oom_seconds_lower,
    )


def _draw_gpu(
    gpu: tuple[int, str, LeakCourse],
    curves: Curves,
    span: tuple[float, float],
    forecast: Forecast | None,
) -> str:
    """Return a GPU's box with its free memory.

    If that is unknown, the box shows the engine's memory.
    """
    index, uuid, course = gpu
    points = curves.of("free", uuid)
    has_free_memory = bool(points)
    subject = "free memory on a scale from 0"
    if not has_free_memory:
        points = curves.of("held", uuid)
        subject = "memory held by the engine"
    title = f"{name_device(index, uuid)}: {subject}; {course.state} at the end"
    if forecast is not None:
        title += f", out of memory {format_instant(forecast.begin + forecast.seconds)}"
    alarms = [alarm_begin for alarm_begin, _ in course.leaking]
    return _draw_box(
        title, points, span, alarms, forecast, is_in_bytes=True, has_zero_line=has_free_memory
    )


def _draw_box(
    title: str,
    points: list[Point],
    span: tuple[float, float],
    marks: Sequence[float] = (),
    forecast: Forecast | None = None,
    *,
    is_in_bytes: bool = False,
    has_zero_line: bool = False,
) -> str:
    """Return a curve in a frame, with a title, times and its top value.

    `marks` are the times of alarms. If the curve may fall to 0, the box has a line at 0.
    """
    begin, end = span
    known_values = [value for _, value in points if value is not None]
    # find_top(), which the sidecar's page also uses, leaves room above a curve of free memory.
    top = drawing.find_top(known_values) if has_zero_line else max(known_values, default=1.0)
    frame = Frame(begin=begin, end=end, top=top, width=WIDTH, height=HEIGHT)
    stretches = drawing.thin_curve(drawing.build_curve(points), CURVE_COLUMNS)
    top_label = format_size(top) if is_in_bytes else f"{top:.0f}"
    right = f"{WIDTH - 4:.0f}"
    bottom = f"{HEIGHT + 18:.0f}"
    parts = [
        f'<text x="4" y="-8">{escape_text(title)}</text>',
        f'<text x="{right}" y="-8" text-anchor="end">{top_label}</text>',
        drawing.draw_curve(frame, stretches),
        *(drawing.draw_mark(frame, seconds) for seconds in marks),
    ]
    if forecast is not None:
        parts.append(drawing.draw_forecast(frame, forecast))
    if has_zero_line:
        parts.append(drawing.draw_zero(frame))
    parts += [
        f'<text x="4" y="{bottom}">{format_instant(begin)}</text>',
        f'<text x="{right}" y="{bottom}" text-anchor="end">{format_instant(end)}</text>',
    ]
    return "".join(parts)


MEMORY_LINES: Final = 10
LOAD_LINES: Final = 5
AXIS_COLUMNS: Final = 11
"""The width of the labels of the vertical axis, in columns."""

FLOOR_MARGIN: Final = 0.05
"""Our choice: the scale of held memory starts below the curve's minimum. The distance is this share
of the curve's range.
"""

FLAT_MARGIN: Final = 0.01
"""The margin for a flat curve, as a share of its value."""


def draw_charts(replay: LeakReplay, curves: Curves, *, columns: int) -> Iterator[str]:
    """Yield the lines of the charts for each GPU, the host and the load.

    There is no chart for a curve without known values.
    """
    width = columns - AXIS_COLUMNS
    for index, uuid, course in replay.gpus:
        name = name_device(index, uuid)
        alarm = None
        unit = "GiB"
        if course.first_alarm is not None:
            alarm = course.first_alarm.seconds
            unit = "GiB; ▲ is the first alarm"
        free_gib = _convert_to_gib(curves.of("free", uuid))
        if free_gib:
            title = f"{name}: free memory on a scale from 0, {unit}"
            yield from _draw_chart(title, free_gib, width, MEMORY_LINES, alarm=alarm)
            # Held memory has a different scale, and is drawn only if free memory is unknown.
            continue
        held_gib = _convert_to_gib(curves.of("held", uuid))
        title = f"{name}: memory held by the engine, {unit}"
        floor = _find_floor(held_gib)
        yield from _draw_chart(
            title, held_gib, width, MEMORY_LINES, alarm=alarm, pick=max, floor=floor
        )
    host_gib = _convert_to_gib(curves.of("host"))
    yield from _draw_chart(f"{HOST_TITLE}, GiB", host_gib, width, MEMORY_LINES)
    yield from _draw_chart("running requests", curves.of("running"), width, LOAD_LINES, pick=max)


def _convert_to_gib(points: list[Point]) -> list[Point]:
    return [(seconds, None if value is None else value / GIB) for seconds, value in points]


def _find_floor(points: list[Point]) -> float:
    """Return the lowest value, in GiB, on the scale of a held-memory chart.

    The floor is slightly below the minimum, because growth would not be visible on a scale from 0.
    Returns 0 if there are no values.
    """
    values = [value for _, value in points if value is not None]
    if not values:
        return 0.0
    lowest = min(values)
    highest = max(values)
    margin = FLOOR_MARGIN * (highest - lowest)
    if margin == 0:
        margin = FLAT_MARGIN * highest
    return max(0.0, lowest - margin)


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
    """Yield the lines of a chart with its axes.

    Yields nothing if no value is known. `pick` selects one of a column's values; `alarm` is the
    time marked on the axis.
    """
    values = [value for _, value in points if value is not None]
    if not values:
        return
    top = find_top(values) if pick is min else max(values)
    decimals = _choose_decimals(top - floor)
    top_label = f"{top:9.{decimals}f}"
    floor_label = f"{floor:9.{decimals}f}"
    yield ""
    yield title
    for number, bars in enumerate(draw_bars(points, width, lines, ends=(floor, top), pick=pick)):
        label = top_label if number == 0 else ""
        yield f"{label:>9} │{bars}"

    begin = min(seconds for seconds, _ in points)
    end = max(seconds for seconds, _ in points)
    axis = "─" * width
    if alarm is not None:
        # If the newest sample raised the alarm, the column is capped at the last one.
        column = min(width - 1, int(width * (alarm - begin) / (end - begin or 1.0)))
        axis = f"{axis[:column]}▲{axis[column + 1 :]}"
    yield f"{floor_label} └{axis}"
    time_format = "%H:%M" if end - begin <= DAY_SECONDS else "%m-%d %H:%M"
    begin_label = to_datetime(begin).strftime(time_format)
    end_label = to_datetime(end).strftime(time_format)
    left_width = width // 2
    right_width = width - left_width
    yield f"{'':{AXIS_COLUMNS}}{begin_label:<{left_width}}{end_label:>{right_width}}"


def _choose_decimals(extent: float) -> int:
    """Return how many decimals an axis's labels need to show its extent with two digits."""
    for decimals, least_extent in ((0, 20.0), (1, 2.0), (2, 0.2)):
        if extent >= least_extent:
            return decimals
    return 3
