"""Does the growth of a stretch look like a leak: many rises, even, long enough and not fading?"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from math import exp
from operator import itemgetter
from statistics import median
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import MIB, Observation, Point, Track, Verdict, Work

LEAST_RISES: Final = 6
"""Rises before anything is said: fewer are indistinguishable from first uses of kernels."""

LEAST_GROWTH_BYTES: Final = 48 * MIB
"""Growth before anything is said: a few of the allocator's 20 MiB segments (c10 kLargeBuffer) are not a leak."""

CLIP: Final = 3.0
"""A rise counts at most this many median rises: one large step must not make a trend."""

LARGEST_STEP: Final = 0.40
"""A stretch of which one rise makes up more than this may be growing; it is not called a leak."""

EVEN_SHARES: Final = {Verdict.LEAKING: (0.45, 0.35), Verdict.GROWING: (0.40, 0.30)}
"""The later half's least share of the growth, on the axis where it is larger and on the other one."""

FIRST_QUARTER, LAST_QUARTER = 0.05, 0.10
"""Least shares of the first and last quarter: growth that began or ended within the stretch is not even."""

STEADY_PACE, STEADY_BY_TIME, GROWING_PACE = 0.82, 0.75, 0.50
"""Least pace of the last half of a life against the quarter before, by requests: a logarithm gives 0.5, a line 1."""

YOUNG: Final = 3
GROWING_SECONDS: Final = 600.0
LEAKING_SECONDS: Final = 3600.0
"""How long a stretch must last. Bounded ramps (caches, LoRA slots) are linear until they end: only waiting tells."""

HASTE: Final = 0.25
"""An alarm may come after this share of the time that is left until out-of-memory, if that is sooner."""

PATIENCE: Final = 0.05
MOST_PATIENCE_SECONDS: Final = 12 * 3600.0
"""And it waits for this share where out-of-memory is far, half a day at most: what is days away wakes nobody, and slow
ramps mostly end."""

OUT_OF_MEMORY_BYTES: Final = 100 * MIB
"""What is left when allocations begin to fail: they come in segments of 20 MiB and more."""


class Growth(Struct, frozen=True, kw_only=True):
    """A stretch's rises, clipped, and their sum, between retained floors; `largest_share` is before the clipping."""

    points: tuple[Point, ...]
    retained_bytes: tuple[float, ...]
    rises: tuple[float, ...]
    total_bytes: float
    largest_share: float


def growth(points: tuple[Point, ...]) -> Growth | None:
    """Return the growth that was never given back; None when it is too little to say anything."""
    floors = retained(points)
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


def retained(points: tuple[Point, ...]) -> tuple[float, ...]:
    """Return the floors less what later floors gave back: running minima from the end."""
    least, kept = float("inf"), []
    for point in reversed(points):
        least = min(least, point.floor_bytes)
        kept.append(least)
    return tuple(reversed(kept))


def judge(grown: Growth, steadiness: Verdict, room_bytes: float | None) -> Verdict:
    """Return what the stretch amounts to, given how steady the whole life's growth is.

    Whatever its cause may be, growth that has lasted longer than what is left until the device is full is an alarm.
    Single large steps are no part of an even pace: sure growth is waited for the longer, the more of it is theirs.
    """
    even = _evenness(grown)
    if Verdict.NONE in (even, steadiness):
        return Verdict.NONE
    lasted = grown.points[-1].seconds - grown.points[0].seconds
    raw_bytes = grown.retained_bytes[-1] - grown.retained_bytes[0]
    left = _left(raw_bytes, lasted, room_bytes)
    left_evenly = _left(grown.total_bytes**2 / raw_bytes, lasted, room_bytes)
    sure = even is steadiness is Verdict.LEAKING and grown.largest_share <= LARGEST_STEP
    if sure and lasted >= patience(left_evenly):
        return Verdict.LEAKING
    if lasted < GROWING_SECONDS:
        return Verdict.NONE
    return Verdict.LEAKING if left is not None and lasted >= left else Verdict.GROWING


def patience(left: float | None) -> float:
    """Return how many seconds sure growth must have lasted, given what is left."""
    if left is None:
        return LEAKING_SECONDS
    late = min(max(PATIENCE * left, LEAKING_SECONDS), MOST_PATIENCE_SECONDS)
    return min(max(HASTE * left, GROWING_SECONDS), late)


def _left(grown_bytes: float, lasted: float, room_bytes: float | None) -> float | None:
    """Return the seconds until the device is full at a stretch's pace; None where nothing can fill up."""
    return None if room_bytes is None else max(0.0, room_bytes - OUT_OF_MEMORY_BYTES) * lasted / grown_bytes


def _evenness(grown: Growth) -> Verdict:
    """Return whether the later half has its share of the growth, by requests or by busy time."""
    axes = ([point.requests for point in grown.points], [point.busy_seconds for point in grown.points])
    quarters = [shares for axis in axes if (shares := _quarters(grown, axis)) is not None]
    if not quarters or not any(_never_stops(shares) for shares in quarters):
        return Verdict.NONE
    late = [shares[2] + shares[3] for shares in quarters]
    for verdict, (most, least) in EVEN_SHARES.items():
        if max(late) >= most and min(late) >= least:
            return verdict
    return Verdict.NONE


def _never_stops(shares: list[float]) -> bool:
    return shares[0] >= FIRST_QUARTER and shares[1] > 0 and shares[2] > 0 and shares[3] >= LAST_QUARTER


def _quarters(grown: Growth, axis: list[float]) -> list[float] | None:
    """Return the share of the growth in each quarter of the axis; None when nothing happened on it."""
    first, length = axis[0], axis[-1] - axis[0]
    if length <= 0:
        return None
    shares = [0.0] * 4
    scale = 2 / length
    for before, after, rise in zip(axis, axis[1:], grown.rises, strict=False):
        shares[min(3, int(scale * (before + after - 2 * first)))] += rise
    return [share / grown.total_bytes for share in shares]


def steadiness(history: tuple[tuple[float, float, float], ...], now: tuple[float, float, float]) -> Verdict:
    """Return whether growth keeps its pace over this life: the last half against the quarter before it.

    `history` and `now` are (requests, busy seconds, grown bytes) since the anchor. Growth by records and first uses is
    logarithmic in the work done, which halves the pace; a leak keeps it.
    """
    if len(history) < YOUNG:
        return Verdict.LEAKING
    by_requests, by_time = _pace(history, now, 0), _pace(history, now, 1)
    if by_requests is None:
        by_requests = float("inf") if by_time is None else by_time
    if by_requests >= STEADY_PACE or (by_time is not None and by_time >= 1.0 and by_requests >= STEADY_BY_TIME):
        return Verdict.LEAKING
    return Verdict.GROWING if by_requests >= GROWING_PACE else Verdict.NONE


def _pace(history: tuple[tuple[float, float, float], ...], now: tuple[float, float, float], axis: int) -> float | None:
    """Return the growth per unit in the last half over that in the quarter before; None when nothing happened."""
    here = now[axis]
    if here <= 0:
        return None
    half, quarter = _grown_at(history, axis, here / 2), _grown_at(history, axis, here / 4)
    before = (half - quarter) / (here / 4)
    return float("inf") if before <= 0 else (now[2] - half) / (here / 2) / before


def _grown_at(history: tuple[tuple[float, float, float], ...], axis: int, where: float) -> float:
    """Interpolate the grown bytes at a place on an axis."""
    index = bisect_right(history, where, key=lambda entry: entry[axis])
    if index in (0, len(history)):
        return history[index - 1 if index else 0][2]
    left, right = history[index - 1], history[index]
    return left[2] + (right[2] - left[2]) * (where - left[axis]) / (right[axis] - left[axis])


def swing(track: Track, held_bytes: float, pace: float) -> float:
    """Return how far above what is held now memory would be at its next height, at a pace of growth beneath.

    Memory that follows load, and the teeth of a collector, come back to where they were, and higher by what leaked
    since: out-of-memory is at the height, not in the valley that is seen now.
    """
    most = max(_swing(level.points, track.seconds, held_bytes, pace) for level in track.levels)
    if track.flush is None:
        return most
    flush = track.flush
    grown = held_bytes - flush.valley_bytes - pace * (track.seconds - flush.seconds)
    return max(most, flush.height_bytes - flush.valley_bytes - max(0.0, grown))


def _swing(points: tuple[Point, ...], now: float, held_bytes: float, pace: float) -> float:
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
"""A counter that stays lower for this long was reset, and is counted on from there."""

MILEAGE_POINTS: Final = 97
"""A day in quarters of an hour: the request rate expected over an horizon is that of as long a time before."""


def worked(work: Work, seen: Observation, elapsed: float, now: float) -> Work:
    """Return the work done by `now`.

    While the counter cannot be read, or a lower one of another server is, requests go on at the last known rate: a gap
    taken for idleness would make what grew in it look like growth without work.
    """
    life = work.life or seen.life
    highest, total = work.finished_total, seen.finished_total
    lower = highest is not None and total is not None and total < highest
    since = (now if work.below_since is None else work.below_since) if lower else None
    requests, rate, base = work.requests, work.rate, work.base_requests
    if total is None or (since is not None and now < since + RESET_SECONDS):
        requests += rate * elapsed
        return replace(
            work, requests=requests, life=life, below_since=since, mileage=_mileage(work.mileage, now, requests)
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
        mileage=_mileage(work.mileage, now, requests),
    )


def _mileage(mileage: tuple[tuple[float, float], ...], now: float, requests: float) -> tuple[tuple[float, float], ...]:
    if mileage and now - mileage[-1][0] < MILEAGE_SECONDS:
        return mileage
    return (*mileage, (now, requests))[-MILEAGE_POINTS:]


def expected_rate(work: Work, now: float, horizon_seconds: float) -> float:
    """Return the requests per second to expect over a horizon: the mean of as long a time back, a day at most."""
    then = bisect_right(work.mileage, now - horizon_seconds, key=itemgetter(0)) - 1
    seconds, requests = work.mileage[max(0, then)] if work.mileage else (now, work.requests)
    if horizon_seconds < MILEAGE_SECONDS or now - seconds < MILEAGE_SECONDS:
        return work.rate
    return (work.requests - requests) / (now - seconds)
