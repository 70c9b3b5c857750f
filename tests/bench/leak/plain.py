"""What people use instead: a line through the last six hours, tests on them, and a challenger of fifty lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
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
            for gpu in (sample["gpus"] or [])[:1]:
                held_bytes = gpu.get("engine", gpu["used"])
                readings.append((sample["t"], held_bytes, gpu["total"] - gpu.get("other", 0)))
            continue
        processes = [process for process in sample["processes"] if process["role"] == series]
        readings += [(sample["t"], process["rss"], sample["host"]["limit"]) for process in processes]
    return readings


def extrapolated(readings: Iterable[Reading], ahead: float = 10_800.0, lasting: float = 1800.0) -> float | None:
    """Return when `predict_linear(held[6h], ahead) > total` has held for half an hour."""
    return _find_lasting(((at, now + slope * ahead > full) for at, now, slope, _, full in _regress(readings)), lasting)


def significant(readings: Iterable[Reading], sure: float = 80.0, lasting: float = 1800.0) -> float | None:
    """Return when the slope of least squares over six hours has been above so many standard errors for half an hour."""
    return _find_lasting(((at, slope > sure * error) for at, _, slope, error, _ in _regress(readings)), lasting)


def _regress(readings: Iterable[Reading]) -> Iterator[tuple[float, float, float, float, float]]:
    """Yield time, fitted value, slope, its standard error and the full size, each minute after half an hour."""
    window: deque[tuple[float, float]] = deque()
    sums = [0.0] * 6
    origin: tuple[float, float] | None = None
    for seconds, held_bytes, full in _thinned(readings, 60.0):
        if origin is None:
            origin = (seconds, held_bytes)
        begin_seconds, begin_bytes = origin
        # From the first reading on and in MiB, so that the sums of squares stay exact.
        _add(sums, window, (seconds - begin_seconds, (held_bytes - begin_bytes) / MIB))
        if seconds - begin_seconds < 1800.0:
            continue
        count, x, y, xx, xy, yy = sums
        x_spread = max(count * xx - x * x, 1e-9)
        slope = (count * xy - x * y) / x_spread
        residual = max(yy - y * y / count - slope * (xy - x * y / count), 1e-9)
        error = sqrt(residual / max(count - 2, 1) * count / x_spread)
        fitted = (y - slope * x) / count + slope * (seconds - begin_seconds)
        yield seconds, begin_bytes + fitted * MIB, slope * MIB, error * MIB, full


def _find_lasting(judged: Iterable[tuple[float, bool]], lasting: float) -> float | None:
    """Return when the answer has been true without a break for so many seconds; None if it never was."""
    since = None
    for seconds, is_true in judged:
        if not is_true:
            since = None
        elif since is None:
            since = seconds
        if since is not None and seconds - since >= lasting:
            return seconds
    return None


def exceeding(readings: Iterable[Reading], share: float = 0.98, lasting: float = 600.0) -> float | None:
    """Return when more than this share of the memory has been held for ten minutes."""
    return _find_lasting(((at, held_bytes > share * full) for at, held_bytes, full in readings), lasting)


FLOOR_SECONDS = 480.0
"""A floor is the lowest memory of eight minutes."""

FLOORS = 120
"""How many floors the challenger keeps: 16 hours."""


def challenge(readings: Iterable[Reading], least_mib: float = 512.0, patience: float = 1.0) -> float | None:
    """Return when fifty lines would call it a leak: rises of floors of 8 minutes, evenly, for long enough.

    Even growth rises in two blocks of three of the newest 9 to 30, by `least_mib`, with 35 % of it in the later half,
    and has lasted an hour or a twentieth of the time left, times `patience`. Steps are four rises of one and a half
    times `least_mib` that took a quarter of the room.
    """
    floors: deque[float] = deque(maxlen=FLOORS)
    begin: float | None = None
    floor = float("inf")
    for seconds, held_bytes, full in _thinned(readings, 0.0):
        if begin is None:
            begin = seconds
        floor = min(floor, held_bytes)
        if seconds - begin < FLOOR_SECONDS:
            continue
        floors.append(floor)
        begin = seconds
        floor = float("inf")
        # What a floor held and no later one gave back.
        retained = list(accumulate(reversed(floors), min))[::-1]
        rises = [later - earlier for earlier, later in pairwise(retained)]
        room = full - held_bytes
        is_even = any(_is_even(rises, count, room, least_mib * MIB, patience) for count in (9, 15, 30, 60))
        if is_even or _has_large_steps(rises, room, 1.5 * least_mib * MIB):
            return seconds
    return None


def _is_even(rises: list[float], count: int, room: float, least_mib: float, patience: float) -> bool:
    """Return whether the newest rises are an even leak that has lasted long enough for the room."""
    newest = rises[-count:]
    grown = sum(newest)
    later_half = sum(newest[count // 2 :])
    if len(newest) < count or grown < least_mib or later_half < 0.35 * grown:
        return False
    lasted_seconds = count * FLOOR_SECONDS
    left_seconds = max(0.0, room) * lasted_seconds / grown
    patience_seconds = min(patience * max(3600.0, left_seconds / 20), 43_200.0)
    rise_count = sum(rise >= MIB for rise in newest)
    return rise_count >= 2 * count / 3 and lasted_seconds >= patience_seconds


def _has_large_steps(rises: list[float], room: float, least_mib: float) -> bool:
    """Return whether four large steps took a quarter of the room, enough of it in the later half."""
    large = sum(rise for rise in rises if rise >= least_mib)
    step_count = sum(rise >= least_mib for rise in rises)
    late = sum(rise for rise in rises[len(rises) // 2 :] if rise >= least_mib)
    if step_count < 4 or len(rises) < 30:
        return False
    return late >= 0.4 * large >= 0.1 * (room + large)


def _add(sums: list[float], window: deque[tuple[float, float]], point: tuple[float, float]) -> None:
    window.append(point)
    _count(sums, point, 1.0)
    while point[0] - window[0][0] > WINDOW:
        _count(sums, window.popleft(), -1.0)


def _count(sums: list[float], point: tuple[float, float], times: float) -> None:
    x, y = point
    for place, value in enumerate((1.0, x, y, x * x, x * y, y * y)):
        sums[place] += times * value


def trending(readings: Iterable[Reading], least: int = 24, most: int = 72, sure: float = 12.0) -> float | None:
    """Return when Mann-Kendall first says "rising" by so many standard deviations, by readings five minutes apart."""
    window: deque[float] = deque()
    score = 0
    for seconds, held_bytes, _ in _thinned(readings, 300.0):
        if len(window) == most:
            oldest = window.popleft()
            score -= sum((value > oldest) - (value < oldest) for value in window)
        score += sum((held_bytes > value) - (held_bytes < value) for value in window)
        window.append(held_bytes)
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
    """Yield readings that are at least so many seconds apart."""
    newest_seconds = float("-inf")
    for reading in readings:
        if reading[0] - newest_seconds >= apart:
            newest_seconds = reading[0]
            yield reading


RULES: dict[str, Callable[..., float | None]] = {
    "linear": extrapolated,
    "squares": significant,
    "trend": trending,
    "challenger": challenge,
    "threshold": exceeding,
}

SETTINGS: dict[str, dict[str, tuple[float, ...]]] = {
    "linear": {"ahead": (3600.0, 10_800.0, 21_600.0, 86_400.0), "lasting": (1800.0, 3600.0, 7200.0, 14_400.0)},
    "squares": {"sure": (5.0, 20.0, 40.0, 80.0, 160.0, 320.0), "lasting": (1800.0, 7200.0, 21_600.0)},
    "trend": {"sure": (3.89, 6.0, 8.0, 10.0, 12.0), "least": (24, 48, 72)},
    "challenger": {"least_mib": (64.0, 256.0, 512.0, 1024.0), "patience": (1.0, 2.0, 4.0, 8.0)},
    "threshold": {"share": (0.97, 0.98, 0.99, 0.995), "lasting": (600.0, 3600.0)},
}
"""The settings from which tune.py chooses; what it chose are the defaults."""
