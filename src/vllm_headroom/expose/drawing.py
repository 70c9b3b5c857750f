"""Draw curves over time as SVG, for the page, files and reports."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from html import escape
from math import ceil, floor, inf, log10
from operator import itemgetter
from typing import Any, Final

from msgspec import Struct

from vllm_headroom.units import DAY_SECONDS, HOUR_SECONDS
from vllm_headroom.vocabulary import CONTROLS

Point = tuple[float, float | None]
"""A time in seconds and a value; the value is None if unknown."""

Curve = tuple[Sequence[float], Sequence[float | None]]
"""Times in ascending order, and the value at each time."""

LinePoints = list[tuple[float, float]]
"""The points that a line connects."""


def pack_style(text: str) -> str:
    """Return a style sheet without its line breaks and indentation."""
    return "".join(line.strip() for line in text.splitlines())


_LIGHT: Final = """--ink:#1b1f24;--dim:#57606a;--line:#d0d7de;--ground:#fff;--good:#1a7f37;
--unknown:#57606a;--warning:#8a5a00;--alarm:#b42318;--room:#0969da;--peak:#8250df"""
_DARK: Final = """--ink:#e6edf3;--dim:#9ba6b2;--line:#30363d;--ground:#0d1117;--good:#4ac26b;
--unknown:#9ba6b2;--warning:#e3b341;--alarm:#ff8177;--room:#6cb6ff;--peak:#c297ff"""

THEME_RULES: Final = pack_style(
    f":root[data-theme=light]{{color-scheme:light;{_LIGHT}}}"
    f":root[data-theme=dark]{{color-scheme:dark;{_DARK}}}"
)
"""The colours of a theme chosen by the reader, regardless of the system's theme."""

STYLE: Final = pack_style(f"""
:root{{{_LIGHT}}}
@media(prefers-color-scheme:dark){{:root{{{_DARK}}}}}
""") + pack_style("""
svg .area{fill:var(--room);fill-opacity:.18}
svg .line{fill:none;stroke:var(--room);stroke-width:2}
svg .peak{fill:none;stroke:var(--peak);stroke-width:1}
svg .zero{stroke:var(--alarm);stroke-width:3}
svg .mark{stroke:var(--alarm);stroke-dasharray:3 3}
svg .now{stroke:var(--ink)}
svg .grid{stroke:var(--line)}
svg .cross{stroke:var(--ink);stroke-dasharray:1 2}
svg .ahead{stroke:var(--alarm);stroke-width:2;stroke-dasharray:6 4;fill:none}
svg .edge{fill:var(--alarm);fill-opacity:.15}
svg path,svg line{vector-effect:non-scaling-stroke}
svg text{fill:var(--dim);font:13px system-ui,sans-serif}
""")
"""The colours in light and dark mode. Every text has a contrast ratio of at least 4.5."""


def escape_text(text: str) -> str:
    """Return text escaped for HTML and SVG; control characters are shown as codes."""
    return escape(text if text.isprintable() else text.translate(CONTROLS))


_INNER_SPACE: Final = re.compile(
    r"(?<=\d) (?=(?:d|h|min|s|[KMGTP]?i?B)\b|%)|(?<=\d [dh]) (?=\d)|(?<=\d min) (?=\d+ s\b)"
)
"""A space within a size, share or duration, as in "5 h 34 min"."""


def render_text(text: str) -> str:
    """Return text escaped for HTML, with no-break spaces in sizes, shares and durations."""
    return _INNER_SPACE.sub("\N{NO-BREAK SPACE}", escape_text(text))


MARGIN: Final = 1.15
"""The margin of a picture (our choice). A picture's top value is this multiple of the value at
SCALE_QUANTILE. The time axis ends at this multiple of the forecast's length.
"""

SCALE_QUANTILE: Final = 0.9
"""The quantile of the values that determines the scale. The highest value is not used. The card is
almost empty for minutes while an engine starts.
"""


GRID_PARTS: Final = 4
"""The number of parts into which grid lines divide a figure's height (our choice)."""

ROUND_DIGITS: Final = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.5, 8.0, 10.0)
"""The leading digits of round numbers. Their quarters, halves and multiples are easy to read."""

TICK_SECONDS: Final = (
    *(60.0 * minutes for minutes in (1, 2, 5, 10, 15, 30)),
    *(HOUR_SECONDS * hours for hours in (1, 2, 3, 4, 6, 12)),
    *(DAY_SECONDS * days for days in (1, 2, 5, 10, 30)),
)
"""Tick intervals that are familiar from a clock or a calendar."""

MOST_TICKS: Final = 6
"""The maximum number of ticks (our choice). With more, their labels would touch on a phone 390
pixels wide.
"""


def find_top(values: Iterable[float | None], *, limit: float | None = None) -> float:
    """Return the top of the scale for a picture of free memory.

    The top is at most `limit`. The values of a card that was empty only briefly may lie above it.
    Returns 1 if no value is known.
    """
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return 1.0
    usual_high = ordered[int(SCALE_QUANTILE * (len(ordered) - 1))]
    return min(limit or ordered[-1], MARGIN * usual_high)


class Frame(Struct, frozen=True, kw_only=True):
    """Maps times and values to a box of `width` by `height`.

    The times range from `begin` to `end`, the values from 0 to `top`. The time scale is the same
    for past and future. A forecast therefore continues the slope of its curve.
    """

    begin: float
    end: float
    top: float
    width: float = 1000.0
    height: float = 200.0

    def x(self, seconds: float) -> float:
        """Return a time's distance from the left edge."""
        # If the span has no length, its only time lies at the left edge.
        span_seconds = self.end - self.begin or 1.0
        return self.width * (seconds - self.begin) / span_seconds

    def y(self, value: float) -> float:
        """Return a value's distance from the upper edge.

        Values above the top lie on the edge.
        """
        return self.height * max(0.0, 1 - value / (self.top or 1.0))


class Forecast(Struct, frozen=True, kw_only=True):
    """A straight line that starts at `value` at the time `begin`, and falls to zero."""

    begin: float
    value: float
    seconds: float
    """The time from `begin` until the value is zero."""
    earliest_seconds: float | None = None
    """The lower bound of `seconds`, or None if unknown."""


def build_curve(points: Iterable[Point]) -> Curve:
    """Return the curve through these points, which are sorted because clocks may be set back."""
    ordered = sorted(points, key=itemgetter(0))
    times = [seconds for seconds, _ in ordered]
    values = [value for _, value in ordered]
    return times, values


def thin_curve(curve: Curve, columns: int, *, begin: float = -inf) -> list[LinePoints]:
    """Return the curve from the time `begin` on, thinned to two points per column.

    The two points are the lowest and the highest in the column, in chronological order. The curve
    is split into stretches at columns without known values. The result is empty if no value is
    known.
    """
    times, values = curve
    # A curve has one point per minute, so thinning it keeps the page small.
    start = bisect_left(times, begin)
    column_size = max(1, ceil((len(values) - start) / columns))
    has_gaps = None in values
    stretches: list[LinePoints] = [[]]
    for column_start in range(start, len(values), column_size):
        column: Sequence[Any] = values[column_start : column_start + column_size]
        known_values = column
        if has_gaps:  # Without gaps, the column need not be copied.
            known_values = [value for value in column if value is not None]
        if known_values:
            # Both extremes of a column are kept, because an average would hide short peaks.
            lowest_place = column.index(min(known_values))
            highest_place = column.index(max(known_values))
            for place in sorted({lowest_place, highest_place}):
                seconds = times[column_start + place]
                stretches[-1].append((seconds, column[place]))
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def draw_line(frame: Frame, stretches: Iterable[LinePoints], *, kind: str) -> str:
    """Return a line through each stretch, or "" if there are none.

    `kind` is the line's CSS class. A stretch of one point is drawn as a dot.
    """
    path = "".join(_draw_path(frame, stretch) for stretch in stretches)
    return f'<path class="{kind}" d="{path}"/>' if path else ""


def draw_curve(frame: Frame, stretches: Iterable[LinePoints]) -> str:
    """Return a line through each stretch, with a shaded area below.

    Returns "" if there are no stretches.
    """
    paths = [_draw_path(frame, stretch) for stretch in stretches]
    if not paths:
        return ""
    area = "".join(_close_path(frame, path) for path in paths)
    line = "".join(paths)
    return f'<path class="area" d="{area}"/><path class="line" d="{line}"/>'


def _close_path(frame: Frame, path: str) -> str:
    """Return the outline of the area between a path and the line at zero."""
    first_x = path[1 : path.index(" ")]
    return f"{path}V{frame.height:.0f}H{first_x}Z"


def draw_zero(frame: Frame) -> str:
    """Return the line at zero."""
    right = f"{frame.width:.0f}"
    bottom = f"{frame.height:.0f}"
    return f'<line class="zero" x1="0" x2="{right}" y1="{bottom}" y2="{bottom}"/>'


def draw_mark(frame: Frame, seconds: float, *, kind: str = "mark") -> str:
    """Return a vertical line at a time, or "" outside of the frame.

    `kind` is the line's CSS class.
    """
    if not frame.begin <= seconds <= frame.end:
        return ""
    x = f"{frame.x(seconds):.1f}"
    return f'<line class="{kind}" x1="{x}" x2="{x}" y1="0" y2="{frame.height:.0f}"/>'


def draw_grid(frame: Frame, times: Iterable[float]) -> str:
    """Return horizontal lines at each quarter of the height, and vertical lines at `times`."""
    right = f"{frame.width:.0f}"
    lines = []
    for quarter in range(GRID_PARTS):
        y = f"{frame.height * quarter / GRID_PARTS:.1f}"
        lines.append(f'<line class="grid" x1="0" x2="{right}" y1="{y}" y2="{y}"/>')
    lines += [draw_mark(frame, seconds, kind="grid") for seconds in times]
    return "".join(lines)


def round_top(top: float, unit: float) -> float:
    """Return `top` rounded up to four times a round multiple of `unit`.

    `unit` is, for example, the number of bytes in a GiB.
    """
    step = top / GRID_PARTS / unit
    power = 10.0 ** floor(log10(step))
    digits = next((digits for digits in ROUND_DIGITS if digits * power >= step), 10.0)
    return GRID_PARTS * digits * power * unit


def list_ticks(begin: float, end: float) -> list[float]:
    """Return at most MOST_TICKS round times in a period.

    The result is empty if the period is very long.
    """
    for step_seconds in TICK_SECONDS:
        first = ceil(begin / step_seconds)
        last = floor(end / step_seconds)
        if last - first < MOST_TICKS:
            return [step_seconds * number for number in range(first, last + 1)]
    return []


def draw_forecast(frame: Frame, forecast: Forecast) -> str:
    """Return the forecast's line to zero.

    If the earliest end is known, a shaded area is added. The area lies between the forecast's line
    and the line to the earliest end. Both lines are cut off at the right edge of the frame.
    """
    begin = (forecast.begin, forecast.value)
    likely_end = _find_end(frame, forecast, forecast.seconds)
    line = draw_line(frame, [[begin, likely_end]], kind="ahead")
    if forecast.earliest_seconds is None:
        return line
    earliest_end = _find_end(frame, forecast, forecast.earliest_seconds)
    earliest_value = earliest_end[1]
    # If both lines are cut off, the area ends at the frame's edge.
    edge_seconds = earliest_end[0] if earliest_value == 0 else likely_end[0]
    corners = [
        begin,
        earliest_end,
        (edge_seconds, earliest_value),
        (likely_end[0], earliest_value),
        likely_end,
    ]
    return f'<path class="edge" d="{_draw_path(frame, corners)}Z"/>{line}'


def _find_end(frame: Frame, forecast: Forecast, seconds: float) -> tuple[float, float]:
    """Return the end of a forecast's line that reaches zero after `seconds`.

    The line ends at zero, or where it leaves the frame.
    """
    share = 1.0
    if seconds > 0:
        share = min(1.0, (frame.end - forecast.begin) / seconds)
    return forecast.begin + share * seconds, (1 - share) * forecast.value


def _draw_path(frame: Frame, stretch: Sequence[tuple[float, float]]) -> str:
    """Return a stretch as an SVG path, with coordinates rounded to one decimal."""
    x = frame.x
    y = frame.y
    points = [f"{x(seconds):.1f} {y(value):.1f}" for seconds, value in stretch]
    path = f"M{'L'.join(points)}"
    if len(stretch) > 1:
        return path
    return f"{path}h.1"  # Browsers do not draw a line of zero length.


def draw_picture(frame: Frame, shapes: Iterable[str], *, title: str, stretch: bool = True) -> str:
    """Return the SVG picture of the shapes in a frame.

    `title` is for screen readers. With `stretch`, the picture fills a box of any proportions, and
    text in the picture is distorted.
    """
    ratio = ' preserveAspectRatio="none"' if stretch else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {frame.width:.0f} {frame.height:.0f}"{ratio} role="img" '
        f'aria-label="{escape_text(title)}">{"".join(shapes)}</svg>'
    )
