"""The verdict and the estimate, from the evidence, the last hours and the room left."""

from __future__ import annotations

from bisect import bisect_left
from itertools import combinations, pairwise
from math import sqrt
from statistics import fmean, median
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.blocks import measure_progress
from vllm_headroom.derive.leak.facts import (
    MIB,
    MISSES_THAT_END_IT,
    RISE_BYTES,
    THRESHOLDS,
    BlockLevel,
    Certainty,
    Estimate,
    Track,
    Work,
    find_stretch,
    settle,
)
from vllm_headroom.derive.leak.shape import (
    OUT_OF_MEMORY_BYTES,
    Growth,
    estimate_swing,
    find_growth,
    find_retained,
    forecast_rate,
    judge_growth,
    judge_steadiness,
)
from vllm_headroom.derive.leak.steps import WindowContext, project

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

MARGIN_SECONDS: Final = 300.0
"""An estimate is up to two minutes old, and peaks of some minutes are in no block's floor."""


def estimate(grown: Growth, *, began_bytes: float, work: Work, now: float, room_bytes: float | None) -> Estimate:
    """Return rates from the later half of the stretch, and the paces at the expected request rate.

    The slope is Theil and Sen's, which single benign steps do not move. Its interval comes from the means of five
    batches, because rises are not independent, widened by one median rise over the window, because the true amount is
    known only to the allocator's step. It does not reach below zero: a leak gives nothing back.
    """
    seconds = [point.seconds for point in grown.points]
    requests = [point.requests for point in grown.points]
    step = min(LARGEST_STEP_BYTES, median(rise for rise in grown.rises if rise > 0))
    per_second, second_half_width, second_spread = measure_rate(seconds, grown.retained_bytes, step)
    per_request, request_half_width, request_spread = measure_rate(requests, grown.retained_bytes, step)
    by_requests = per_request > 0 and work.rate > 0 and request_spread <= UNLIKE * second_spread
    pace, fastest = (per_second, per_second + second_half_width) if per_second > 0 else (None, None)
    if room_bytes is not None and by_requests:
        usual, most = _forecast_rates(_find_usable(room_bytes), per_request, work, now)
        pace = per_request * usual if usual > 0 else None
        fastest = (per_request + request_half_width) * most if most > 0 else None
    if room_bytes is not None and fastest is not None and (by_requests or work.finished_total is None):
        fastest /= UNSEEN_SHARE if _is_unseen(room_bytes / fastest, now) else 1.0
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


def set_time_left(found: Estimate, room_bytes: float, demand_bytes: float) -> Estimate:
    """Return the estimate with the time left now.

    The next peak, with a demand as large as the largest recent one, may be the one that finds no room: the lower bound
    is the time until then.
    """
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
    return _fit_theil_sen(axis[half::every], values[half::every]) or (values[-1] - values[0]) / (axis[-1] - axis[0])


def _fit_theil_sen(axis: list[float], values: tuple[float, ...]) -> float:
    slopes = [
        (later[1] - sooner[1]) / (later[0] - sooner[0])
        for sooner, later in combinations(zip(axis, values, strict=True), 2)
        if later[0] > sooner[0]
    ]
    return median(slopes) if slopes else 0.0


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


def _forecast_rates(room: float, per_request: float, work: Work, now: float) -> tuple[float, float]:
    """Return the expected and the highest requests per second until the room is full.

    The horizon depends on the expected rate, and the rate on the horizon.
    """
    rate = work.rate
    for _ in range(3):
        horizon = room / (per_request * rate)
        rate = forecast_rate(work, now, horizon)
        if rate <= 0:
            return 0.0, 0.0
    spans = (LAST_SECONDS, *(horizon * share for share in (0.125, 0.25, 0.5, 1.0, 2.0)))
    return rate, 1.1 * max(forecast_rate(work, now, span) for span in spans)


PROJECTED_LEVEL: Final = 3
"""Its 62 blocks of 16 minutes are the last 16 hours."""

NEAR_SECONDS: Final = 3600.0
NEAR_SHARE: Final = 0.25
HELD_SECONDS: Final = 2700.0
"""With less than an hour left, or room for a quarter of the leak, an alarm is held this long after its growth."""

STEP_LEVEL: Final = 1
STEP_SECONDS: Final = 3240.0
"""An alarm of a few large steps becomes a warning after 54 minutes without a rise, which this level sees at most
four minutes late, until the next one."""

REFILL_SECONDS: Final = 3600.0
"""After the allocator gave back its cache, the cache refills for this long, which is not the leak's rate."""


def judge_track(track: Track, room_bytes: int | None) -> Track:
    """Return the track with the verdict of the most certain level and its estimate."""
    if track.seconds < track.run.alarm_until:
        return track
    if room_bytes is not None:
        track = replace(track, most_bytes=max(track.most_bytes, _find_floor(track) + room_bytes))
    own_room = None if room_bytes is None else track.most_bytes - _find_floor(track)
    track, grown = _weigh_levels(track, own_room)
    verdict = max(forecast_certainty(track), *(level.verdict for level in track.levels))
    if verdict is not Certainty.LEAKING and _is_held(track):
        return replace(_update_time_left(track, room_bytes), verdict=Certainty.LEAKING)
    track = replace(track, verdict=verdict)
    if verdict is Certainty.NONE:
        return replace(track, estimate=None, sure_seconds=None)
    refills = track.flush is not None and track.seconds - track.flush.seconds < REFILL_SECONDS
    known = track.estimate is not None and (refills or grown is None)
    if grown is not None and not known:
        track = _update_estimate(track, grown, room_bytes)
    track = _update_time_left(track, room_bytes)
    near = verdict is Certainty.LEAKING and _is_near(track, room_bytes)
    return replace(track, sure_seconds=track.seconds if near else None)


def forecast_certainty(track: Track) -> Certainty:
    """Return the forecast of the last hours, reduced between two steps; their alarm is older than any block here."""
    if track.projected is not Certainty.LEAKING:
        return track.projected
    points = track.levels[STEP_LEVEL].points
    floors = find_retained(points)
    risen = max(_find_flush_time(track), points[bisect_left(floors, floors[-1] - RISE_BYTES)].seconds)
    return Certainty.GROWING if track.seconds - risen >= STEP_SECONDS else Certainty.LEAKING


def _find_flush_time(track: Track) -> float:
    return 0.0 if track.flush is None else track.flush.seconds


def _find_floor(track: Track) -> float:
    return track.levels[0].points[-1].floor_bytes


def _weigh_levels(track: Track, room_bytes: float | None) -> tuple[Track, Growth | None]:
    """Return the track with the verdicts of each level and of the last hours, and the most significant growth.

    It is None if the most certain level, the longest of them, has no new block.
    """
    steady, floor_bytes = judge_steadiness(track.history, measure_progress(track)), _find_floor(track)
    levels = []
    for level, threshold, most in zip(track.levels, THRESHOLDS, MISSES_THAT_END_IT, strict=True):
        grown = None if level.verdict is Certainty.LEAKING else _find_grown(track, level, threshold)
        said = Certainty.NONE if grown is None else judge_growth(grown, steady, room_bytes)
        levels.append(settle(level, said, threshold, most, floor_bytes))
    surest, threshold = max(zip(reversed(levels), reversed(THRESHOLDS), strict=True), key=lambda pair: pair[0].verdict)
    projected, grown = _project_growth(track, room_bytes)
    track = replace(track, levels=tuple(levels), projected=projected)
    if grown is not None and projected > surest.verdict:
        return track, grown
    return track, _find_grown(track, surest, threshold) if surest.verdict else None


def _find_grown(track: Track, level: BlockLevel, threshold: float) -> Growth | None:
    """Return the growth of a level with enough evidence; there is nothing new until its block ends."""
    return find_growth(find_stretch(level)) if level.score >= threshold and _has_just_ended(track, level) else None


def _project_growth(track: Track, room_bytes: float | None) -> tuple[Certainty, Growth | None]:
    """Return the forecast of the last hours, renewed when one of their blocks ends or an alarm has no figure."""
    level = track.levels[PROJECTED_LEVEL]
    unknown = track.projected is Certainty.LEAKING and track.estimate is None and bool(level.points)
    if track.first is None or not (unknown or _has_just_ended(track, level)):
        return track.projected, None
    life = WindowContext(
        first=track.first,
        room_bytes=room_bytes,
        before=track.projected,
        flushed_seconds=_find_flush_time(track),
        alike_seconds=track.peaks[0][0] if track.peaks else 0.0,
    )
    return project(level.points, track.steps, life)


def _has_just_ended(track: Track, level: BlockLevel) -> bool:
    return bool(level.points) and level.points[-1].seconds == track.seconds


def _update_time_left(track: Track, room_bytes: int | None) -> Track:
    found = track.estimate
    if found is None or room_bytes is None:
        return track
    back = estimate_swing(track, _find_floor(track), found.bytes_per_second)
    return replace(track, estimate=set_time_left(found, room_bytes, back + max(track.rises, default=0.0)))


def _is_near(track: Track, room_bytes: int | None) -> bool:
    found = track.estimate
    if found is None or room_bytes is None:
        return False
    return room_bytes <= max(NEAR_SHARE * found.leaked_bytes, NEAR_SECONDS * found.bytes_per_second)


def _is_held(track: Track) -> bool:
    if track.sure_seconds is None or track.projected is Certainty.LEAKING:
        return False
    return track.seconds - track.sure_seconds <= HELD_SECONDS


def _update_estimate(track: Track, grown: Growth, room_bytes: int | None) -> Track:
    """Return the track with a new estimate; with its old one if the new one, in a valley, shows no growth."""
    began = min(
        (level.began for level in track.levels if level.verdict and level.began),
        key=lambda point: point.seconds,
        default=grown.points[0],
    )
    found = estimate(grown, began_bytes=began.floor_bytes, work=track.work, now=track.seconds, room_bytes=room_bytes)
    vanished = found.pace is None and track.estimate is not None
    return track if vanished else replace(track, estimate=found)
