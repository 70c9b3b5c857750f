"""How fast is it growing, what drives it and how long is left?"""

from __future__ import annotations

from itertools import combinations, pairwise
from math import sqrt
from statistics import fmean, median
from typing import Final

from msgspec.structs import replace

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

LAST_SECONDS: Final = 3600.0
"""The load of the last hour may go on, whatever the night before it was like."""

MARGIN_SECONDS: Final = 300.0
"""An estimate is up to two minutes old, and what comes and goes within minutes is in the floor of no block."""


def estimate(grown: Growth, *, began_bytes: float, work: Work, now: float, room_bytes: float | None) -> Estimate:
    """Return rates from the later half of the stretch, and the paces at the request rate to expect.

    The slope is Theil and Sen's, which single benign steps do not move. Its interval comes from the means of five
    batches, because rises are not independent, widened by one median rise over the window, because the true amount is
    known only to the allocator's step. It does not reach below zero: a leak gives nothing back.
    """
    seconds = [point.seconds for point in grown.points]
    requests = [point.requests for point in grown.points]
    step = min(LARGEST_STEP_BYTES, median(rise for rise in grown.rises if rise > 0))
    per_second, second_half_width, second_spread = rated(seconds, grown.retained_bytes, step)
    per_request, request_half_width, request_spread = rated(requests, grown.retained_bytes, step)
    by_requests = per_request > 0 and work.rate > 0 and request_spread <= UNLIKE * second_spread
    pace, fastest = (per_second, per_second + second_half_width) if per_second > 0 else (None, None)
    if room_bytes is not None and by_requests:
        usual, most = _request_rates(_usable(room_bytes), per_request, work, now)
        pace = per_request * usual if usual > 0 else None
        fastest = (per_request + request_half_width) * most if most > 0 else None
    if room_bytes is not None and fastest is not None and (by_requests or work.finished_total is None):
        fastest /= UNSEEN_SHARE if _unseen(room_bytes / fastest, now) else 1.0
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


def _unseen(horizon: float, now: float) -> bool:
    """Return whether what is left is long against what was seen of the load, which was not yet a whole day."""
    return now < DAY_SECONDS and horizon > now / 2


def timed(found: Estimate, room_bytes: float, demand_bytes: float) -> Estimate:
    """Return the estimate with the time that is left now.

    The next height, with a demand on it as large as the largest of late, may be what finds no room: the lower bound of
    the time is to that.
    """
    room, least = _usable(room_bytes), max(0.0, room_bytes - max(demand_bytes, OUT_OF_MEMORY_BYTES))
    return replace(
        found,
        oom_seconds=room / found.pace if found.pace else None,
        oom_seconds_lower=max(0.0, least / found.fastest - MARGIN_SECONDS) if found.fastest else None,
    )


def _usable(room_bytes: float) -> float:
    return max(0.0, room_bytes - OUT_OF_MEMORY_BYTES)


def rated(axis: list[float], values: tuple[float, ...], step_bytes: float) -> tuple[float, float, float]:
    """Return slope, half width of its 95 % interval and relative spread of its batches on one axis."""
    if axis[-1] <= axis[0]:
        return 0.0, 0.0, float("inf")
    half = len(axis) // 2
    slope = _late_slope(axis, values)
    batches = _batches(axis, values)
    if len(batches) < BATCHES:
        return slope, abs(slope), float("inf")
    mean = fmean(batches)
    spread = sqrt(sum((batch - mean) ** 2 for batch in batches) / (len(batches) - 1))
    half_width = T_95 * spread / sqrt(len(batches)) + step_bytes / (axis[-1] - axis[half])
    return slope, half_width, spread / max(abs(mean), 1e-9)


def _late_slope(axis: list[float], values: tuple[float, ...]) -> float:
    """Return the slope of the later half, Theil and Sen's: single steps do not move it, nor do a few that are large.

    Where it is none the growth was in such, and the slope is that of the whole.
    """
    half = len(axis) // 2
    every = -(-(len(axis) - half) // SLOPE_POINTS)
    return _theil_sen(axis[half::every], values[half::every]) or (values[-1] - values[0]) / (axis[-1] - axis[0])


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


def _request_rates(room: float, per_request: float, work: Work, now: float) -> tuple[float, float]:
    """Return the requests per second to expect until the room is full, and the most to reckon with.

    The horizon decides the rate to expect, and the rate the horizon.
    """
    rate = work.rate
    for _ in range(3):
        horizon = room / (per_request * rate)
        rate = expected_rate(work, now, horizon)
        if rate <= 0:
            return 0.0, 0.0
    spans = (LAST_SECONDS, *(horizon * share for share in (0.125, 0.25, 0.5, 1.0, 2.0)))
    return rate, 1.1 * max(expected_rate(work, now, span) for span in spans)
