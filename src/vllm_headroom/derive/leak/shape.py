"""The shape of a leak: many even rises that last long and do not fade."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from math import exp
from operator import itemgetter
from statistics import median
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import MIB, Certainty, Observation, Point, Track, Work

LEAST_RISES: Final = 6
"""Least rises for a verdict: fewer are indistinguishable from first uses of kernels."""

LEAST_GROWTH_BYTES: Final = 48 * MIB
"""Least growth for a verdict: a few of the allocator's 20 MiB segments (c10 kLargeBuffer) are no leak."""

CLIP: Final = 3.0
"""A rise counts at most this many median rises: one large step must not make a trend."""

LARGEST_STEP: Final = 0.40
"""A stretch with one rise above this share may be growing; it is not called a leak."""

EVEN_SHARES: Final = {Certainty.LEAKING: (0.45, 0.35), Certainty.GROWING: (0.40, 0.30)}
"""The later half's least share of the growth, on the axis where it is larger and on the other one."""

FIRST_QUARTER, LAST_QUARTER = 0.05, 0.10
"""Least shares of the first and last quarter: growth that began or ended within the stretch is not even."""

STEADY_PACE, STEADY_BY_TIME, GROWING_PACE = 0.82, 0.75, 0.50
"""Least pace of the last half of a run against the quarter before, by requests: a logarithm gives 0.5, a line 1."""

YOUNG: Final = 3
GROWING_SECONDS: Final = 600.0
LEAKING_SECONDS: Final = 3600.0
"""Least length of a stretch. Bounded ramps (caches, LoRA slots) are linear until they end: only time distinguishes
them."""

HASTE: Final = 0.25
"""An alarm may come after this share of the time left until out-of-memory, if that is sooner."""

PATIENCE: Final = 0.05
MOST_PATIENCE_SECONDS: Final = 12 * 3600.0
"""If out-of-memory is far, the alarm waits for this share of it, at most half a day: what is days away wakes nobody,
and slow ramps mostly end."""

OUT_OF_MEMORY_BYTES: Final = 100 * MIB
"""What is left when allocations begin to fail: segments are 20 MiB and larger."""


class Growth(Struct, frozen=True, kw_only=True):
    """A stretch's rises, clipped, and their sum, between retained floors; `largest_share` is before clipping."""

    points: tuple[Point, ...]
    retained_bytes: tuple[float, ...]
    rises: tuple[float, ...]
    total_bytes: float
    largest_share: float


def find_growth(points: tuple[Point, ...]) -> Growth | None:
    """Return the growth that was never given back; None when too small for a verdict."""
    floors = find_retained(points)
    raw = [after - before for before, after in pairwise(floors)]
    rising = [rise for rise in raw if rise > 0]
    if len(rising) < LEAST_RISES:
        return None
    most = CLIP * median(rising)
    clipped = tuple(min(rise, most) for rise in raw)
    total = sum(clipped)
    if total < LEAST_GROWTH_BYTES:
        return None
    largest_share = max(rising) / sum(rising)
    return Growth(points=points, retained_bytes=floors, rises=clipped, total_bytes=total, largest_share=largest_share)


def find_retained(points: tuple[Point, ...]) -> tuple[float, ...]:
    """Return the floors less what later floors gave back: running minima from the end."""
    least, kept = float("inf"), []
    for point in reversed(points):
        least = min(least, point.floor_bytes)
        kept.append(least)
    return tuple(reversed(kept))


def judge_growth(grown: Growth, steadiness: Certainty, room_bytes: float | None) -> Certainty:
    """Return the verdict on a stretch, given the steadiness of the whole run's growth.

    Whatever its cause, growth that has lasted longer than the time left until the device is full is an alarm. Large
    single steps are not an even pace: the larger their share, the longer the wait.
    """
    even = _judge_evenness(grown)
    if Certainty.NONE in (even, steadiness):
        return Certainty.NONE
    lasted = grown.points[-1].seconds - grown.points[0].seconds
    raw_bytes = grown.retained_bytes[-1] - grown.retained_bytes[0]
    left = _find_time_left(raw_bytes, lasted, room_bytes)
    left_evenly = _find_time_left(grown.total_bytes**2 / raw_bytes, lasted, room_bytes)
    sure = even is steadiness is Certainty.LEAKING and grown.largest_share <= LARGEST_STEP
    if sure and lasted >= compute_patience(left_evenly):
        return Certainty.LEAKING
    if lasted < GROWING_SECONDS:
        return Certainty.NONE
    return Certainty.LEAKING if left is not None and lasted >= left else Certainty.GROWING


def compute_patience(left: float | None) -> float:
    """Return how many seconds certain growth must have lasted, given the time left."""
    if left is None:
        return LEAKING_SECONDS
    late = min(max(PATIENCE * left, LEAKING_SECONDS), MOST_PATIENCE_SECONDS)
    return min(max(HASTE * left, GROWING_SECONDS), late)


def _find_time_left(grown_bytes: float, lasted: float, room_bytes: float | None) -> float | None:
    """Return the seconds until the device is full at a stretch's pace; None if nothing can fill up."""
    return None if room_bytes is None else max(0.0, room_bytes - OUT_OF_MEMORY_BYTES) * lasted / grown_bytes


def _judge_evenness(grown: Growth) -> Certainty:
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
    for before, after, rise in zip(axis, axis[1:], grown.rises, strict=False):
        shares[min(3, int(scale * (before + after - 2 * first)))] += rise
    return [share / grown.total_bytes for share in shares]


def judge_steadiness(history: tuple[tuple[float, float, float], ...], now: tuple[float, float, float]) -> Certainty:
    """Return whether growth keeps its pace over this run: the last half against the quarter before it.

    `history` and `now` are (requests, busy seconds, grown bytes) since the anchor. Growth by records and first uses is
    logarithmic in the work done, which halves the pace; a leak keeps it.
    """
    if len(history) < YOUNG:
        return Certainty.LEAKING
    by_requests, by_time = _measure_pace(history, now, 0), _measure_pace(history, now, 1)
    if by_requests is None:
        by_requests = float("inf") if by_time is None else by_time
    if by_requests >= STEADY_PACE or (by_time is not None and by_time >= 1.0 and by_requests >= STEADY_BY_TIME):
        return Certainty.LEAKING
    return Certainty.GROWING if by_requests >= GROWING_PACE else Certainty.NONE


def _measure_pace(
    history: tuple[tuple[float, float, float], ...], now: tuple[float, float, float], axis: int
) -> float | None:
    """Return the growth per unit in the last half over that in the quarter before; None when nothing happened."""
    here = now[axis]
    if here <= 0:
        return None
    half, quarter = _interpolate_grown(history, axis, here / 2), _interpolate_grown(history, axis, here / 4)
    before = (half - quarter) / (here / 4)
    return float("inf") if before <= 0 else (now[2] - half) / (here / 2) / before


def _interpolate_grown(history: tuple[tuple[float, float, float], ...], axis: int, where: float) -> float:
    index = bisect_right(history, where, key=lambda entry: entry[axis])
    if index in (0, len(history)):
        return history[index - 1 if index else 0][2]
    left, right = history[index - 1], history[index]
    return left[2] + (right[2] - left[2]) * (where - left[axis]) / (right[axis] - left[axis])


def estimate_swing(track: Track, held_bytes: float, pace: float) -> float:
    """Return how far above the present memory its next peak would be, at this pace of growth.

    Memory that follows load, and the sawtooth of a garbage collector, return to their old peak plus what leaked since:
    out-of-memory happens at the peak, not in the present valley.
    """
    most = max(_estimate_swing(level.points, track.seconds, held_bytes, pace) for level in track.levels)
    if track.flush is None:
        return most
    flush = track.flush
    grown = held_bytes - flush.valley_bytes - pace * (track.seconds - flush.seconds)
    return max(most, flush.height_bytes - flush.valley_bytes - max(0.0, grown))


def _estimate_swing(points: tuple[Point, ...], now: float, held_bytes: float, pace: float) -> float:
    valley_bytes, valley_seconds, most = held_bytes, now, 0.0
    for point in reversed(points):
        if point.floor_bytes < valley_bytes:
            valley_bytes, valley_seconds = point.floor_bytes, point.seconds
        depth = point.floor_bytes - valley_bytes
        if depth > most:
            most = max(most, min(depth, point.floor_bytes - held_bytes + pace * (now - valley_seconds)))
    return most


AVERAGE_SECONDS: Final = 300.0
MILEAGE_SECONDS: Final = 900.0
RESET_SECONDS: Final = 600.0
"""A counter that stays lower for this long was reset, and continues from there."""

MILEAGE_POINTS: Final = 97
"""A day in quarters of an hour: the expected rate over a horizon is that of an equally long past."""


def add_work(work: Work, seen: Observation, elapsed: float, now: float) -> Work:
    """Return the work done by `now`.

    While the counter cannot be read, or belongs to another server, requests continue at the last known rate: treated as
    idle time, a gap would turn its growth into growth without work.
    """
    life = work.life or seen.life
    highest, total = work.finished_total, seen.finished_total
    lower = highest is not None and total is not None and total < highest
    since = (now if work.below_since is None else work.below_since) if lower else None
    requests, rate, base = work.requests, work.rate, work.base_requests
    if total is None or (since is not None and now < since + RESET_SECONDS):
        requests += rate * elapsed
        return replace(
            work, requests=requests, life=life, below_since=since, mileage=_add_mileage(work.mileage, now, requests)
        )
    if highest is not None and not lower:
        requests = max(requests, base + total - highest)
    if elapsed > 0:
        rate += (1 - exp(-elapsed / AVERAGE_SECONDS)) * ((requests - work.requests) / elapsed - rate)
    return Work(
        requests=requests,
        rate=rate,
        finished_total=total,
        base_requests=requests,
        life=life,
        mileage=_add_mileage(work.mileage, now, requests),
    )


def _add_mileage(
    mileage: tuple[tuple[float, float], ...], now: float, requests: float
) -> tuple[tuple[float, float], ...]:
    if mileage and now - mileage[-1][0] < MILEAGE_SECONDS:
        return mileage
    return (*mileage, (now, requests))[-MILEAGE_POINTS:]


def forecast_rate(work: Work, now: float, horizon_seconds: float) -> float:
    """Return the expected requests per second over a horizon: the mean of an equally long past, at most a day."""
    then = bisect_right(work.mileage, now - horizon_seconds, key=itemgetter(0)) - 1
    seconds, requests = work.mileage[max(0, then)] if work.mileage else (now, work.requests)
    if horizon_seconds < MILEAGE_SECONDS or now - seconds < MILEAGE_SECONDS:
        return work.rate
    return (work.requests - requests) / (now - seconds)
