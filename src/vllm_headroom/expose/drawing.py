"""Draw curves over time as SVG, for the page, files and reports."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from html import escape
from math import ceil, inf
from operator import itemgetter
from typing import Any, Final

from msgspec import Struct

from vllm_headroom.vocabulary import CONTROLS

Point = tuple[float, float | None]
"""Seconds and a value; None where it is unknown."""

Curve = tuple[Sequence[float], Sequence[float | None]]
"""Ordered times, and the value at each."""

Stretch = list[tuple[float, float]]
"""Points that a line joins."""

STYLE: Final = (
    ":root{--ink:#1b1f24;--dim:#57606a;--line:#d0d7de;--ground:#fff;--good:#1a7f37;--unknown:#57606a;--warning:#8a5a00;"
    "--alarm:#b42318;--room:#0969da;--peak:#8250df}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#9ba6b2;--line:#30363d;--ground:#0d1117;--good:#4ac26b;"
    "--unknown:#9ba6b2;--warning:#e3b341;--alarm:#ff8177;--room:#6cb6ff;--peak:#c297ff}}"
    "svg .area{fill:var(--room);fill-opacity:.18}svg .line{fill:none;stroke:var(--room);stroke-width:2}"
    "svg .peak{fill:none;stroke:var(--peak);stroke-width:1}svg .zero{stroke:var(--alarm);stroke-width:3}"
    "svg .mark{stroke:var(--dim);stroke-dasharray:3 3}svg .ahead{stroke:var(--alarm);stroke-width:2;"
    "stroke-dasharray:6 4;fill:none}svg .edge{fill:var(--alarm);fill-opacity:.15}"
    "svg path,svg line{vector-effect:non-scaling-stroke}svg text{fill:var(--dim);font:13px system-ui,sans-serif}"
)
"""Colours in light and dark mode; each text has a contrast of at least 4.5."""


def escape_text(text: str) -> str:
    """Return text escaped for HTML and SVG; control characters show as codes."""
    return escape(text if text.isprintable() else text.translate(CONTROLS))


MARGIN: Final = 1.15
PAST_SHARE: Final = 2 / 3
USUAL: Final = 0.9
"""The quantile that sets the scale: while an engine starts, the card is empty for minutes."""


def find_top(values: Iterable[float | None], *, most: float | None = None) -> float:
    """Return the top of a picture of free memory: at most `most`, without short times in which a card is empty."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return 1.0
    return min(most or known[-1], MARGIN * known[int(USUAL * (len(known) - 1))])


class Frame(Struct, frozen=True, kw_only=True):
    """Maps times from `begin` to `end` and values from 0 to `top` to a box of `width` by `height`.

    With `now`, times after it have another scale on the right third, so that a forecast always reaches zero.
    """

    begin: float
    end: float
    top: float
    width: float = 1000.0
    height: float = 200.0
    now: float | None = None

    def x(self, seconds: float) -> float:
        """Return the distance of a time from the left."""
        if self.now is None:
            return self.width * (seconds - self.begin) / (self.end - self.begin or 1.0)
        if seconds <= self.now:
            return PAST_SHARE * self.width * (seconds - self.begin) / (self.now - self.begin or 1.0)
        ahead = (seconds - self.now) / (self.end - self.now or 1.0)
        return self.width * (PAST_SHARE + (1 - PAST_SHARE) * ahead)

    def y(self, value: float) -> float:
        """Return the distance of a value from the upper edge; values above the top lie on it."""
        return self.height * max(0.0, 1 - value / (self.top or 1.0))


class Forecast(Struct, frozen=True, kw_only=True):
    """From a value at a time to zero after `seconds`, at the earliest after `earliest_seconds`, where known."""

    begin: float
    value: float
    seconds: float
    earliest_seconds: float | None = None


def build_curve(points: Iterable[Point]) -> Curve:
    """Return the curve through these points, sorted: in a trace the clock may go back."""
    ordered = sorted(points, key=itemgetter(0))
    return [seconds for seconds, _ in ordered], [value for _, value in ordered]


def thin_curve(curve: Curve, columns: int, *, begin: float = -inf) -> list[Stretch]:
    """Return at most two points per column, its lowest and highest; columns without values divide the stretches."""
    times, values = curve
    start = bisect_left(times, begin)
    size = max(1, ceil((len(values) - start) / columns))
    stretches: list[Stretch] = [[]]
    has_gaps = None in values
    for first in range(start, len(values), size):
        part: Sequence[Any] = values[first : first + size]
        if known := [value for value in part if value is not None] if has_gaps else part:
            places = {part.index(min(known)), part.index(max(known))}
            stretches[-1] += [(times[first + place], part[place]) for place in sorted(places)]
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def draw_line(frame: Frame, stretches: Iterable[Stretch], *, kind: str) -> str:
    """Return the curve, of class `kind` in STYLE; a stretch of one point is a dot."""
    path = "".join(_draw_path(frame, stretch) for stretch in stretches)
    return f'<path class="{kind}" d="{path}"/>' if path else ""


def draw_curve(frame: Frame, stretches: Iterable[Stretch]) -> str:
    """Return the curve, with the area below it shaded."""
    paths = [_draw_path(frame, stretch) for stretch in stretches]
    areas = [f"{path}V{frame.height:.0f}H{path[1 : path.index(' ')]}Z" for path in paths]
    return (
        f'<path class="area" d="{"".join(areas)}"/><path class="line" d="{"".join(paths)}"/>'
        if paths
        else ""
    )


def draw_zero(frame: Frame) -> str:
    """Return the line at zero."""
    return f'<line class="zero" x1="0" x2="{frame.width:.0f}" y1="{frame.height:.0f}" y2="{frame.height:.0f}"/>'


def draw_mark(frame: Frame, seconds: float) -> str:
    """Return a vertical line at a time; none outside the frame."""
    if not frame.begin <= seconds <= frame.end:
        return ""
    x = frame.x(seconds)
    return f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{frame.height:.0f}"/>'


def draw_forecast(frame: Frame, forecast: Forecast) -> str:
    """Return the line to zero, with the area to its lower bound shaded; both are cut off at the frame."""
    begin = forecast.begin, forecast.value
    likely = _find_end(frame, forecast, forecast.seconds)
    drawn = draw_line(frame, [[begin, likely]], kind="ahead")
    if forecast.earliest_seconds is None:
        return drawn
    least = _find_end(frame, forecast, forecast.earliest_seconds)
    reached = least[0] if least[1] == 0 else likely[0]
    corners = [begin, least, (reached, least[1]), (likely[0], least[1]), likely]
    return f'<path class="edge" d="{_draw_path(frame, corners)}Z"/>{drawn}'


def _find_end(frame: Frame, forecast: Forecast, seconds: float) -> tuple[float, float]:
    """Return the end, within the frame, of a straight line to zero in `seconds`."""
    share = min(1.0, (frame.end - forecast.begin) / seconds) if seconds > 0 else 1.0
    return forecast.begin + share * seconds, (1 - share) * forecast.value


def _draw_path(frame: Frame, stretch: Sequence[tuple[float, float]]) -> str:
    x, y = frame.x, frame.y
    path = "M" + "L".join([f"{x(seconds):.1f} {y(value):.1f}" for seconds, value in stretch])
    return path if len(stretch) > 1 else f"{path}h.1"


def draw_picture(frame: Frame, shapes: Iterable[str], *, title: str, stretch: bool = True) -> str:
    """Return the box with its shapes; `title` is for screen readers, `stretch` scales it to any shape, texts too."""
    shape = ' preserveAspectRatio="none"' if stretch else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {frame.width:.0f} {frame.height:.0f}"{shape} role="img"'
        f' aria-label="{escape_text(title)}">{"".join(shapes)}</svg>'
    )
