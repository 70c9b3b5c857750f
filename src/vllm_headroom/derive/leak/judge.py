"""What the evidence, the last hours and the room that is left amount to."""

from __future__ import annotations

from bisect import bisect_left
from itertools import combinations, pairwise
from math import sqrt
from statistics import fmean, median
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.blocks import here
from vllm_headroom.derive.leak.facts import (
    MIB,
    MISSES_THAT_END_IT,
    RISE_BYTES,
    THRESHOLDS,
    Estimate,
    Level,
    Track,
    Verdict,
    Work,
    settle,
    stretch,
)
from vllm_headroom.derive.leak.shape import (
    OUT_OF_MEMORY_BYTES,
    Growth,
    expected_rate,
    growth,
    judge,
    retained,
    steadiness,
    swing,
)
from vllm_headroom.derive.leak.steps import Life, project

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


PROJECTED_LEVEL: Final = 3
"""Its 62 blocks of 16 minutes are the last 16 hours."""

NEAR_SECONDS: Final = 3600.0
NEAR_SHARE: Final = 0.25
HELD_SECONDS: Final = 2700.0
"""With less than an hour left, or room for a quarter of what leaked, an alarm is held for so long after its growth."""

STEP_LEVEL: Final = 1
STEP_SECONDS: Final = 3240.0
"""An alarm of a few large steps is a warning again after 54 minutes without a rise, which this level sees four minutes
late at most, and until the next one."""

REFILL_SECONDS: Final = 3600.0
"""After the allocator gave back its cache that fills again, and for this long is not taken for the leak's rate."""


def judged(track: Track, room_bytes: int | None) -> Track:
    """Return the track with the verdict of the surest level and its estimate."""
    if track.seconds < track.run.alarm_until:
        return track
    if room_bytes is not None:
        track = replace(track, most_bytes=max(track.most_bytes, _floor(track) + room_bytes))
    own_room = None if room_bytes is None else track.most_bytes - _floor(track)
    track, grown = _weighed(track, own_room)
    verdict = max(foretold(track), *(level.verdict for level in track.levels))
    if verdict is not Verdict.LEAKING and _is_held(track):
        return replace(_timed(track, room_bytes), verdict=Verdict.LEAKING)
    track = replace(track, verdict=verdict)
    if verdict is Verdict.NONE:
        return replace(track, estimate=None, sure_seconds=None)
    refills = track.flush is not None and track.seconds - track.flush.seconds < REFILL_SECONDS
    known = track.estimate is not None and (refills or grown is None)
    if grown is not None and not known:
        track = _estimated(track, grown, room_bytes)
    track = _timed(track, room_bytes)
    near = verdict is Verdict.LEAKING and _is_near(track, room_bytes)
    return replace(track, sure_seconds=track.seconds if near else None)


def foretold(track: Track) -> Verdict:
    """Return what the last hours foretell, less between two steps; an alarm of theirs is older than any block here."""
    if track.projected is not Verdict.LEAKING:
        return track.projected
    points = track.levels[STEP_LEVEL].points
    floors = retained(points)
    risen = max(_flushed(track), points[bisect_left(floors, floors[-1] - RISE_BYTES)].seconds)
    return Verdict.GROWING if track.seconds - risen >= STEP_SECONDS else Verdict.LEAKING


def _flushed(track: Track) -> float:
    """Return when the allocator last gave back its cache, 0 where it never did."""
    return 0.0 if track.flush is None else track.flush.seconds


def _floor(track: Track) -> float:
    return track.levels[0].points[-1].floor_bytes


def _weighed(track: Track, room_bytes: float | None) -> tuple[Track, Growth | None]:
    """Return the track with each level's verdict and that of the last hours, and the growth that says most.

    There is none where the surest level, the longest of them, has no new block.
    """
    steady, floor_bytes = steadiness(track.history, here(track)), _floor(track)
    levels = []
    for level, threshold, most in zip(track.levels, THRESHOLDS, MISSES_THAT_END_IT, strict=True):
        grown = None if level.verdict is Verdict.LEAKING else _grown(track, level, threshold)
        said = Verdict.NONE if grown is None else judge(grown, steady, room_bytes)
        levels.append(settle(level, said, threshold, most, floor_bytes))
    surest, threshold = max(zip(reversed(levels), reversed(THRESHOLDS), strict=True), key=lambda pair: pair[0].verdict)
    projected, grown = _projected(track, room_bytes)
    track = replace(track, levels=tuple(levels), projected=projected)
    if grown is not None and projected > surest.verdict:
        return track, grown
    return track, _grown(track, surest, threshold) if surest.verdict else None


def _grown(track: Track, level: Level, threshold: float) -> Growth | None:
    """Return the growth of a level whose evidence is enough; a level says something new only when its block ended."""
    return growth(stretch(level)) if level.score >= threshold and _just_ended(track, level) else None


def _projected(track: Track, room_bytes: float | None) -> tuple[Verdict, Growth | None]:
    """Return what the last hours foretell; anew when one of their blocks ends, and for an alarm without a figure."""
    level = track.levels[PROJECTED_LEVEL]
    unknown = track.projected is Verdict.LEAKING and track.estimate is None and bool(level.points)
    if track.first is None or not (unknown or _just_ended(track, level)):
        return track.projected, None
    life = Life(
        first=track.first,
        room_bytes=room_bytes,
        before=track.projected,
        flushed_seconds=_flushed(track),
        alike_seconds=track.peaks[0][0] if track.peaks else 0.0,
    )
    return project(level.points, track.steps, life)


def _just_ended(track: Track, level: Level) -> bool:
    return bool(level.points) and level.points[-1].seconds == track.seconds


def _timed(track: Track, room_bytes: int | None) -> Track:
    """Return the track with the time that is left now, at the paces of its estimate."""
    found = track.estimate
    if found is None or room_bytes is None:
        return track
    back = swing(track, _floor(track), found.bytes_per_second)
    return replace(track, estimate=timed(found, room_bytes, back + max(track.rises, default=0.0)))


def _is_near(track: Track, room_bytes: int | None) -> bool:
    found = track.estimate
    if found is None or room_bytes is None:
        return False
    return room_bytes <= max(NEAR_SHARE * found.leaked_bytes, NEAR_SECONDS * found.bytes_per_second)


def _is_held(track: Track) -> bool:
    if track.sure_seconds is None or track.projected is Verdict.LEAKING:
        return False
    return track.seconds - track.sure_seconds <= HELD_SECONDS


def _estimated(track: Track, grown: Growth, room_bytes: int | None) -> Track:
    """Return the track with a new estimate; with the one it has where the new one, in a valley, sees no growth."""
    began = min(
        (level.began for level in track.levels if level.verdict and level.began),
        key=lambda point: point.seconds,
        default=grown.points[0],
    )
    found = estimate(grown, began_bytes=began.floor_bytes, work=track.work, now=track.seconds, room_bytes=room_bytes)
    vanished = found.pace is None and track.estimate is not None
    return track if vanished else replace(track, estimate=found)
