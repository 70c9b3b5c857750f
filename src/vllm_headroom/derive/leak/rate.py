"""The rate of growth with its interval, and the time until the device is full."""

from bisect import bisect_right
from itertools import combinations, pairwise
from math import sqrt
from statistics import fmean, median
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import MIB, OUT_OF_MEMORY_BYTES, RISE_BYTES, Estimate, Point, Track
from vllm_headroom.derive.leak.growth import Growth

BATCHES: Final = 5
T_95: Final = 2.776
"""Student's t for 95 % with 4 degrees of freedom."""

SLOPE_POINTS: Final = 16
"""Points for slopes: the cost is quadratic, and more points gave no better rates."""

LARGEST_STEP_BYTES: Final = 64 * MIB
UNLIKE: Final = 1.4
"""Requests drive the growth unless their batches vary this much more than those of time."""

DAY_SECONDS: Final = 86_400.0
UNSEEN_SHARE: Final = 0.6
"""Load has a daily cycle: before a day was seen, it may rise so much that only this share of the time is left."""

LAST_SECONDS: Final = 3600.0
"""The load of the last hour may continue, whatever the night before was like."""

SHORT_SECONDS: Final = 900.0
MARGIN_SECONDS: Final = 300.0
"""An estimate is up to two minutes old, and peaks of some minutes are in no block's floor."""


def estimate(grown: Growth, *, began_bytes: float, track: Track, room_bytes: float | None) -> Estimate:
    """Return rates from the later half of the stretch, and the paces at the expected request rate.

    The slope is Theil and Sen's, which single benign steps do not move. Its interval comes from the means of five
    batches, because rises are not independent, widened by one median rise over the window, because the true amount is
    known only to the allocator's step. It does not reach below zero: a leak gives nothing back.
    """
    seconds = [point.seconds for point in grown.points]
    requests = [point.requests for point in grown.points]
    step = min(LARGEST_STEP_BYTES, median(rise for rise in grown.clipped if rise > 0))
    per_second, second_half_width, second_spread = measure_rate(seconds, grown.kept_bytes, step)
    per_request, request_half_width, request_spread = measure_rate(requests, grown.kept_bytes, step)
    by_requests = per_request > 0 and track.work.rate > 0 and request_spread <= UNLIKE * second_spread
    pace, fastest = (per_second, per_second + second_half_width) if per_second > 0 else (None, None)
    if room_bytes is not None and by_requests:
        usual, most = _forecast_rates(_find_usable(room_bytes), per_request, track)
        pace = per_request * usual if usual > 0 else None
        fastest = (per_request + request_half_width) * most if most > 0 else None
    if room_bytes is not None and fastest is not None and (by_requests or track.work.finished_total is None):
        fastest /= UNSEEN_SHARE if _is_unseen(room_bytes / fastest, track.seconds) else 1.0
    return Estimate(
        bytes_per_second=per_second,
        lower=max(min(0.0, per_second), per_second - second_half_width),
        upper=per_second + second_half_width,
        bytes_per_request=per_request if requests[-1] > requests[0] else None,
        by_requests=by_requests,
        leaked_bytes=max(grown.total_bytes, grown.points[-1].floor_bytes - began_bytes),
        pace=pace,
        fastest=fastest,
    )


def _is_unseen(horizon: float, now: float) -> bool:
    """Return whether the time left is long compared with the observed load, and that is less than a day."""
    return now < DAY_SECONDS and horizon > now / 2


def set_time_left(found: Estimate, track: Track, room_bytes: float) -> Estimate:
    """Return the estimate with the time left now.

    The next peak, with a demand as large as the largest recent one, may be the one that finds no room: the lower bound
    is the time until then.
    """
    demand_bytes = _estimate_swing(track, found.bytes_per_second) + _find_largest(track)
    room, least = _find_usable(room_bytes), max(0.0, room_bytes - max(demand_bytes, OUT_OF_MEMORY_BYTES))
    return replace(
        found,
        oom_seconds=room / found.pace if found.pace else None,
        oom_seconds_lower=max(0.0, least / found.fastest - MARGIN_SECONDS) if found.fastest else None,
    )


def _find_usable(room_bytes: float) -> float:
    return max(0.0, room_bytes - OUT_OF_MEMORY_BYTES)


def measure_rate(axis: list[float], values: tuple[float, ...], step_bytes: float) -> tuple[float, float, float]:
    """Return slope, half width of its 95 % interval and relative spread of its batches on one axis."""
    if axis[-1] <= axis[0]:
        return 0.0, 0.0, float("inf")
    half = len(axis) // 2
    slope = _fit_late_slope(axis, values)
    batches = _fit_batches(axis, values)
    if len(batches) < BATCHES:
        return slope, abs(slope), float("inf")
    mean = fmean(batches)
    spread = sqrt(sum((batch - mean) ** 2 for batch in batches) / (len(batches) - 1))
    half_width = T_95 * spread / sqrt(len(batches)) + step_bytes / (axis[-1] - axis[half])
    return slope, half_width, spread / max(abs(mean), 1e-9)


def _fit_late_slope(axis: list[float], values: tuple[float, ...]) -> float:
    """Return the Theil-Sen slope of the later half, which a few large steps do not move.

    If it is 0 the growth was in such steps, and the slope is that of the whole.
    """
    half = len(axis) // 2
    every = -(-(len(axis) - half) // SLOPE_POINTS)
    late = zip(axis[half::every], values[half::every], strict=True)
    slopes = [(y - before) / (x - since) for (since, before), (x, y) in combinations(late, 2) if x > since]
    return (median(slopes) if slopes else 0.0) or (values[-1] - values[0]) / (axis[-1] - axis[0])


def _fit_batches(axis: list[float], values: tuple[float, ...]) -> list[float]:
    """Return the slopes of five equal batches of the later three quarters."""
    first = len(axis) // 4
    size = (len(axis) - 1 - first) // BATCHES
    if size < 1:
        return []
    cuts = [len(axis) - 1 - size * number for number in range(BATCHES, -1, -1)]
    return [
        (values[end] - values[begin]) / (axis[end] - axis[begin])
        for begin, end in pairwise(cuts)
        if axis[end] > axis[begin]
    ]


def _forecast_rates(room: float, per_request: float, track: Track) -> tuple[float, float]:
    """Return the expected and the highest requests per second until the room is full.

    The horizon depends on the expected rate, and the rate on the horizon.
    """
    rate = track.work.rate
    for _ in range(3):
        horizon = room / (per_request * rate)
        rate = forecast_rate(track, horizon)
        if rate <= 0:
            return 0.0, 0.0
    spans = (LAST_SECONDS, *(horizon * share for share in (0.125, 0.25, 0.5, 1.0, 2.0)))
    return rate, 1.1 * max(forecast_rate(track, span) for span in spans)


def forecast_rate(track: Track, horizon_seconds: float) -> float:
    """Return the expected requests per second over a horizon: the mean of an equally long past, as far as is known."""
    points: tuple[Point, ...] = track.rings[-1].points
    then = bisect_right(points, track.seconds - horizon_seconds, key=lambda point: point.seconds) - 1
    since = points[max(0, then)] if points else None
    if since is None or horizon_seconds < SHORT_SECONDS or track.seconds - since.seconds < SHORT_SECONDS:
        return track.work.rate
    return (track.work.requests - since.requests) / (track.seconds - since.seconds)


def _find_largest(track: Track) -> float:
    floors = [point.floor_bytes for point in track.rings[0].points]
    return max((after - before for before, after in pairwise(floors) if after - before >= RISE_BYTES), default=0.0)


def _estimate_swing(track: Track, pace: float) -> float:
    """Return how far above the present memory its next peak would be, at this pace of growth.

    Memory that follows load, and the sawtooth of a garbage collector, return to their old peak plus what leaked since:
    out-of-memory happens at the peak, not in the present valley.
    """
    held_bytes, most = track.rings[0].points[-1].floor_bytes, 0.0
    for ring in track.rings:
        valley_bytes, valley_seconds = held_bytes, track.seconds
        for point in reversed(ring.points):
            if point.floor_bytes < valley_bytes:
                valley_bytes, valley_seconds = point.floor_bytes, point.seconds
            depth = point.floor_bytes - valley_bytes
            if depth > most:
                again = point.floor_bytes - held_bytes + pace * (track.seconds - valley_seconds)
                most = max(most, min(depth, again))
    return most
