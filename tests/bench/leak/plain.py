"""What people use instead: a line through the last six hours, tests on them, and a challenger of fifty lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from math import sqrt
from typing import Any

MIB = 2**20
WINDOW = 6 * 3600.0
Reading = tuple[float, float, float]
"""Seconds, bytes held, and the bytes at which it is full."""


def read_series(samples: list[dict[str, Any]], series: str) -> list[Reading]:
    """Return the readings of the first GPU (`gpu`), or of a host process by its role."""
    readings = []
    for sample in samples:
        if series == "gpu":
            gpus = (sample["gpus"] or [])[:1]
            readings += [
                (sample["t"], gpu.get("engine", gpu["used"]), gpu["total"] - gpu.get("other", 0)) for gpu in gpus
            ]
        else:
            processes = [process for process in sample["processes"] if process["role"] == series]
            readings += [(sample["t"], process["rss"], sample["host"]["limit"]) for process in processes]
    return readings


def extrapolated(readings: Iterable[Reading], ahead: float = 86_400.0, lasting: float = 1800.0) -> float | None:
    """Return when `predict_linear(held[6h], 86400) > total` has held for half an hour."""
    return _find_lasting(((at, now + slope * ahead > full) for at, now, slope, _, full in _regress(readings)), lasting)


def significant(readings: Iterable[Reading], sure: float = 5.0, lasting: float = 1800.0) -> float | None:
    """Return when the slope of least squares over six hours has been above five standard errors for half an hour."""
    return _find_lasting(((at, slope > sure * error) for at, _, slope, error, _ in _regress(readings)), lasting)


def _regress(readings: Iterable[Reading]) -> Iterator[tuple[float, float, float, float, float]]:
    """Yield time, fitted value, slope, its standard error and the full size, each minute after half an hour."""
    window: deque[tuple[float, float]] = deque()
    sums, origin = [0.0] * 6, None
    for seconds, held, full in _thinned(readings, 60.0):
        origin = (seconds, held) if origin is None else origin
        _add(sums, window, (seconds - origin[0], (held - origin[1]) / 2**20))
        count, x, y, xx, xy, yy = sums
        if seconds - origin[0] >= 1800.0:
            spread = max(count * xx - x * x, 1e-9)
            slope = (count * xy - x * y) / spread
            rest = max(yy - y * y / count - slope * (xy - x * y / count), 1e-9)
            error = sqrt(rest / max(count - 2, 1) * count / spread)
            now = (y - slope * x) / count + slope * (seconds - origin[0])
            yield seconds, origin[1] + now * 2**20, slope * 2**20, error * 2**20, full


def _find_lasting(judged: Iterable[tuple[float, bool]], lasting: float) -> float | None:
    since = None
    for seconds, is_true in judged:
        since = None if not is_true else seconds if since is None else since
        if since is not None and seconds - since >= lasting:
            return seconds
    return None


def exceeding(readings: Iterable[Reading], share: float = 0.97, lasting: float = 600.0) -> float | None:
    """Return when more than this share of the memory has been held for ten minutes."""
    return _find_lasting(((at, held > share * full) for at, held, full in readings), lasting)


FLOOR_SECONDS, FLOORS = 480.0, 120


def challenge(readings: Iterable[Reading]) -> float | None:
    """Return when fifty lines would call it a leak: rises of floors of 8 minutes, evenly, for long enough.

    Even growth rises in two blocks of three of the newest 9 to 30, by 64 MiB, with 35 % of it in the later half, and
    has lasted an hour or a twentieth of the time left. Steps are four rises of 96 MiB that took a quarter of the room.
    """
    floors: deque[float] = deque(maxlen=FLOORS)
    began, floor = None, float("inf")
    for seconds, held, full in _thinned(readings, 0.0):
        began = seconds if began is None else began
        floor = min(floor, held)
        if seconds - began < FLOOR_SECONDS:
            continue
        floors.append(floor)
        began, floor = seconds, float("inf")
        kept = list(reversed(list(accumulate(reversed(floors), min))))
        rises = [after - before for before, after in pairwise(kept)]
        for count in (9, 15, 30):
            newest = rises[-count:]
            grown, lasted = sum(newest), count * FLOOR_SECONDS
            if len(newest) < count or grown < 64 * MIB or sum(newest[count // 2 :]) < 0.35 * grown:
                continue
            left = max(0.0, full - held) * lasted / grown
            if sum(rise >= MIB for rise in newest) >= 2 * count / 3 and lasted >= min(max(3600.0, left / 20), 43_200.0):
                return seconds
        large = [rise for rise in rises if rise >= 96 * MIB]
        late = sum(rise for rise in rises[len(rises) // 2 :] if rise >= 96 * MIB)
        if len(large) >= 4 and len(rises) >= 30 and late >= 0.4 * sum(large) >= 0.1 * (full - held + sum(large)):
            return seconds
    return None


def _add(sums: list[float], window: deque[tuple[float, float]], point: tuple[float, float]) -> None:
    window.append(point)
    _count(sums, point, 1.0)
    while point[0] - window[0][0] > WINDOW:
        _count(sums, window.popleft(), -1.0)


def _count(sums: list[float], point: tuple[float, float], times: float) -> None:
    x, y = point
    for place, value in enumerate((1.0, x, y, x * x, x * y, y * y)):
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
