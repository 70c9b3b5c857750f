"""The witnesses of even growth: how often it rises, at what pace, in what shape."""

from math import log
from typing import Final

from vllm_headroom.derive.leak.facts import OUT_OF_MEMORY_BYTES, Certainty, Point, count_folds
from vllm_headroom.derive.leak.growth import Growth

EVEN_SHARES: Final = {Certainty.LEAKING: (0.45, 0.35), Certainty.GROWING: (0.40, 0.30)}
"""The later half's least share of the growth, on the axis where it is larger and on the other one."""

FIRST_QUARTER, LAST_QUARTER = 0.05, 0.10
"""Least shares of the first and last quarter: growth that began or ended within the stretch is not even."""


def weigh_pace(grown: Growth, first: Point) -> float:
    """Return the log likelihood ratio of growth at a constant rate against growth by all the folds of work.

    Records and first uses come at a constant or falling rate per e-fold of work, a leak by time or by requests:
    Poisson's law with steps of the typical size. One more step, the largest, is attributed to the time before, since
    the window was chosen to begin with a step.
    """
    opened, now = grown.points[0], grown.points[-1]
    before = max(0.0, grown.kept_bytes[0] - first.floor_bytes) + max(grown.rises)
    pace = (before + grown.grown_bytes) / count_folds(first, first, now)
    by_folds = log(before / count_folds(first, first, opened) / pace)
    if by_folds >= 0:
        return 0.0
    total = slow = slow_requests = 0.0
    for one, two, folds, rise in zip(grown.points, grown.points[1:], grown.folds, grown.rises, strict=False):
        if rise > 0:
            total += rise
            slow += rise * log((two.seconds - one.seconds) / folds)
            slow_requests += rise * log(max(two.requests - one.requests, 1e-3) / folds)
    at_a_rate = log(grown.grown_bytes / grown.lasted / pace) + slow / total
    done = now.requests - opened.requests
    if done > 0:
        at_a_rate = max(at_a_rate, log(grown.grown_bytes / done / pace) + slow_requests / total)
    return (before * by_folds + grown.grown_bytes * at_a_rate) / grown.typical_bytes


def judge_evenness(grown: Growth) -> Certainty:
    """Return whether the later half has its share of the growth, by requests or by busy time."""
    axes = ([point.requests for point in grown.points], [point.busy_seconds for point in grown.points])
    quarters = [shares for axis in axes if (shares := _split_quarters(grown, axis)) is not None]
    if not quarters or not any(_is_unceasing(shares) for shares in quarters):
        return Certainty.NONE
    late = [shares[2] + shares[3] for shares in quarters]
    for verdict, (most, least) in EVEN_SHARES.items():
        if max(late) >= most and min(late) >= least:
            return verdict
    return Certainty.NONE


def _is_unceasing(shares: list[float]) -> bool:
    return shares[0] >= FIRST_QUARTER and shares[1] > 0 and shares[2] > 0 and shares[3] >= LAST_QUARTER


def _split_quarters(grown: Growth, axis: list[float]) -> list[float] | None:
    """Return the share of the growth in each quarter of the axis; None when nothing happened on it."""
    first, length = axis[0], axis[-1] - axis[0]
    if length <= 0:
        return None
    shares = [0.0] * 4
    scale = 2 / length
    for before, after, rise in zip(axis, axis[1:], grown.clipped, strict=False):
        shares[min(3, int(scale * (before + after - 2 * first)))] += rise
    return [share / grown.total_bytes for share in shares]


GROWING_SECONDS: Final = 600.0
LEAKING_SECONDS: Final = 3600.0
"""Least length of a stretch. Bounded ramps (caches, LoRA slots) are linear until they end: only time distinguishes
them."""

HASTE: Final = 0.25
HASTE_SECONDS: Final = 180.0
"""An alarm may come after this share of the time left until out-of-memory, if that is sooner."""

PATIENCE: Final = 0.05
MOST_PATIENCE_SECONDS: Final = 12 * 3600.0
"""If out-of-memory is far, the alarm waits for this share of it, at most half a day: what is days away wakes nobody,
and slow ramps mostly end."""


def compute_patience(left: float | None) -> float:
    """Return how many seconds certain growth must have lasted, given the time left."""
    if left is None:
        return LEAKING_SECONDS
    late = min(max(PATIENCE * left, LEAKING_SECONDS), MOST_PATIENCE_SECONDS)
    return min(max(HASTE * left, HASTE_SECONDS), late)


def find_time_left(grown_bytes: float, lasted: float, room_bytes: float | None) -> float | None:
    """Return the seconds until the device is full at a stretch's pace; None if nothing can fill up."""
    return None if room_bytes is None else max(0.0, room_bytes - OUT_OF_MEMORY_BYTES) * lasted / grown_bytes
