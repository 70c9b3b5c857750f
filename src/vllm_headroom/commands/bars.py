"""Curves as bars of block characters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

BLOCKS: Final = " ▁▂▃▄▅▆▇█"

Point = Sequence[Any]
"""Seconds and a value, None for a gap."""

Pick = Callable[[Iterable[float]], float]


def bars(
    curve: Sequence[Point], width: int, rows: int, *, ends: tuple[float, float] | None = None, pick: Pick = min
) -> list[str]:
    """Return a bar for each column: of its stretch of time what `pick` takes, else what was last; a gap is blank.

    `ends` are what the lowest and the highest bar stand for; without them zero, and the highest there is.
    """
    columns = _columns(sorted(curve, key=lambda point: float(point[0])), width, pick)
    low, high = ends or (0.0, max((value for value in columns if value is not None), default=0.0))
    heights = [0 if value is None else _eighths(value - low, high - low, rows) for value in columns]
    return [
        "".join(BLOCKS[min(8, max(0, height - 8 * row))] for height in heights).rstrip()
        for row in reversed(range(rows))
    ]


def _eighths(value: float, span: float, rows: int) -> int:
    """Return how high a bar is; the least is not nothing, which would be a gap."""
    return max(1, round(8 * rows * value / (span or 1.0)))


def _columns(curve: Sequence[Point], width: int, pick: Pick) -> list[float | None]:
    if not curve:
        return []
    begin, span = float(curve[0][0]), float(curve[-1][0]) - float(curve[0][0])
    times = [float(seconds) for seconds, _ in curve]
    edges = [bisect_right(times, begin + span * place / width) for place in range(width)] + [len(curve)]
    edges[0] = 0
    return [_value(curve[min(first, last - 1) : last], pick) for first, last in pairwise(edges)]


def _value(stretch: Sequence[Point], pick: Pick) -> float | None:
    known = [float(value) for _, value in stretch if value is not None]
    return pick(known) if known else None
