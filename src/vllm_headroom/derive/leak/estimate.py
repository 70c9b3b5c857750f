"""How fast is it growing, what drives it and how long is left?"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from math import sqrt
from statistics import fmean, median
from typing import Final

from vllm_headroom.derive.leak.facts import MIB, Estimate, Work
from vllm_headroom.derive.leak.shape import OUT_OF_MEMORY_BYTES, Growth
from vllm_headroom.derive.leak.work import expected_rate

BATCHES: Final = 5
T_95: Final = 2.776
"""Student's t for 95 % with 4 degrees of freedom."""

SLOPE_POINTS: Final = 16
"""Points that slopes are taken between: their number is quadratic, and more points gave no better rates."""

LARGEST_STEP_BYTES: Final = 64 * MIB
UNLIKE: Final = 1.4
"""Requests drive the growth unless their batches vary this much more than those of time."""


DAY_SECONDS: Final = 86_400.0
UNSEEN_SHARE: Final = 0.6
"""Load comes back daily: before a day was seen, it may be so much higher than it was that only this share is left."""

STALE_SECONDS: Final = 120.0
"""An estimate is up to this old when the next one is made."""


def estimate(
    grown: Growth, *, began_bytes: float, work: Work, now: float, room_bytes: float | None, demand_bytes: float
) -> Estimate:
    """Return rates from the later half of the stretch, and the time left at the request rate to expect.

    A demand as large as the largest of late may be the one that finds no room: the lower bound of the time is to that.

    The slope is Theil and Sen's, which single benign steps do not move. Its interval comes from the means of five
    batches, because rises are not independent, widened by one median rise over the window, because the true amount is
    known only to the allocator's step.
    """
    seconds = [point.seconds for point in grown.points]
    requests = [point.requests for point in grown.points]
    per_second, second_half_width, second_spread = _rate(grown, seconds)
    per_request, request_half_width, request_spread = _rate(grown, requests)
    by_requests = per_request > 0 and work.rate > 0 and request_spread <= UNLIKE * second_spread
    rate, half_width = per_second, second_half_width
    oom, oom_lower = None, None
    if room_bytes is not None:
        room, least = _rooms(room_bytes, demand_bytes)
        if by_requests:
            oom, fastest = _left_by_requests(room, per_request, work, now)
            if fastest:
                oom_lower = _lower(least, (per_request + request_half_width) * fastest)
        elif rate > 0:
            oom, oom_lower = room / rate, _lower(least, rate + half_width)
        if oom_lower is not None and (by_requests or work.finished_total is None) and _unseen(oom_lower, now):
            oom_lower *= UNSEEN_SHARE
    return Estimate(
        bytes_per_second=rate,
        lower=rate - half_width,
        upper=rate + half_width,
        bytes_per_request=per_request if requests[-1] > requests[0] else None,
        by_requests=by_requests,
        leaked_bytes=max(grown.total_bytes, grown.points[-1].floor_bytes - began_bytes),
        oom_seconds=oom,
        oom_seconds_lower=oom_lower,
    )


def _unseen(horizon: float, now: float) -> bool:
    """Return whether what is left is long against what was seen of the load, which was not yet a whole day."""
    return now < DAY_SECONDS and horizon > now / 2


def refreshed(found: Estimate, room_bytes: float, demand_bytes: float) -> Estimate:
    """Return the estimate with the time that is left now, at the rate it has."""
    if found.bytes_per_second <= 0:
        return found
    room, least = _rooms(room_bytes, demand_bytes)
    return replace(found, oom_seconds=room / found.bytes_per_second, oom_seconds_lower=_lower(least, found.upper))


def _rooms(room_bytes: float, demand_bytes: float) -> tuple[float, float]:
    room = max(0.0, room_bytes - OUT_OF_MEMORY_BYTES)
    return room, max(0.0, min(room, room_bytes - demand_bytes))


def _lower(room: float, pace: float) -> float:
    return max(0.0, room / pace - STALE_SECONDS)


def _rate(grown: Growth, axis: list[float]) -> tuple[float, float, float]:
    """Return slope, half width of its 95 % interval and relative spread of its batches on one axis."""
    if axis[-1] <= axis[0]:
        return 0.0, 0.0, float("inf")
    half = len(axis) // 2
    slope = late_slope(axis, grown.retained_bytes)
    batches = _batches(axis, grown.retained_bytes)
    if len(batches) < BATCHES:
        return slope, abs(slope), float("inf")
    mean = fmean(batches)
    spread = sqrt(sum((batch - mean) ** 2 for batch in batches) / (len(batches) - 1))
    step = min(LARGEST_STEP_BYTES, median(rise for rise in grown.rises if rise > 0))
    half_width = T_95 * spread / sqrt(len(batches)) + step / (axis[-1] - axis[half])
    return slope, half_width, spread / max(abs(mean), 1e-9)


def late_slope(axis: list[float], values: tuple[float, ...]) -> float:
    """Return the slope of the later half, Theil and Sen's: single steps do not move it."""
    half = len(axis) // 2
    every = -(-(len(axis) - half) // SLOPE_POINTS)
    return _theil_sen(axis[half::every], values[half::every])


def _theil_sen(axis: list[float], values: tuple[float, ...]) -> float:
    slopes = [
        (later[1] - sooner[1]) / (later[0] - sooner[0])
        for sooner, later in combinations(zip(axis, values, strict=True), 2)
        if later[0] > sooner[0]
    ]
    return median(slopes) if slopes else 0.0


def _batches(axis: list[float], values: tuple[float, ...]) -> list[float]:
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


def _left_by_requests(room: float, per_request: float, work: Work, now: float) -> tuple[float | None, float]:
    """Return seconds left, and the fastest requests per second that are to be reckoned with until then.

    The horizon decides the rate to expect, and the rate the horizon.
    """
    horizon = room / (per_request * work.rate)
    for _ in range(2):
        rate = expected_rate(work, now, horizon)
        if rate <= 0:
            return None, 0.0
        horizon = room / (per_request * rate)
    return horizon, 1.1 * max(expected_rate(work, now, horizon * share) for share in (0.125, 0.25, 0.5, 1.0, 2.0))
