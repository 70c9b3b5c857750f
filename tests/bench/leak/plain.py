"""What people use instead: a line through the last six hours, and the Mann-Kendall test on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import sqrt

WINDOW = 6 * 3600.0
Reading = tuple[float, float, float]
"""Seconds, bytes held, and the bytes at which it is full."""


def extrapolated(readings: Iterable[Reading], ahead: float = 86_400.0, lasting: float = 1800.0) -> float | None:
    """Return when `predict_linear(held[6h], 86400) > total` has held for half an hour."""
    window: deque[tuple[float, float]] = deque()
    sums, since, origin = [0.0] * 5, None, None
    for seconds, held, full in _thinned(readings, 60.0):
        origin = (seconds, held) if origin is None else origin
        _add(sums, window, (seconds - origin[0], held - origin[1]))
        if seconds - origin[0] < lasting:
            continue
        count, x, y, xx, xy = sums
        slope = (count * xy - x * y) / max(count * xx - x * x, 1e-9)
        predicted = (y - slope * x) / count + slope * (seconds - origin[0] + ahead) + origin[1]
        since = None if predicted <= full else seconds if since is None else since
        if since is not None and seconds - since >= lasting:
            return seconds
    return None


def _add(sums: list[float], window: deque[tuple[float, float]], point: tuple[float, float]) -> None:
    window.append(point)
    _count(sums, point, 1.0)
    while point[0] - window[0][0] > WINDOW:
        _count(sums, window.popleft(), -1.0)


def _count(sums: list[float], point: tuple[float, float], times: float) -> None:
    x, y = point
    for place, value in enumerate((1.0, x, y, x * x, x * y)):
        sums[place] += times * value


def trending(readings: Iterable[Reading], least: int = 24, most: int = 72, sure: float = 3.89) -> float | None:
    """Return when Mann-Kendall first says "rising" with p < 0.0001, by readings five minutes apart."""
    window: deque[float] = deque()
    score = 0
    for seconds, held, _ in _thinned(readings, 300.0):
        if len(window) == most:
            first = window.popleft()
            score -= sum((value > first) - (value < first) for value in window)
        score += sum((held > value) - (held < value) for value in window)
        window.append(held)
        if len(window) >= least and (score - 1) / sqrt(max(_variance(window), 1.0)) > sure:
            return seconds
    return None


def _variance(window: deque[float]) -> float:
    ties: dict[float, int] = {}
    for value in window:
        ties[value] = ties.get(value, 0) + 1
    return (_spread(len(window)) - sum(_spread(count) for count in ties.values() if count > 1)) / 18


def _spread(count: int) -> int:
    return count * (count - 1) * (2 * count + 5)


def _thinned(readings: Iterable[Reading], apart: float) -> Iterable[Reading]:
    last = None
    for reading in readings:
        if last is None or reading[0] - last >= apart:
            last = reading[0]
            yield reading
