"""The judge: adds the evidence of the witnesses, holds an alarm until its growth has ended, and measures it."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import combinations, pairwise
from math import inf, sqrt
from statistics import fmean, median, stdev
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import (
    OUT_OF_MEMORY_BYTES,
    RISE_BYTES,
    Certainty,
    Estimate,
    LeakAlarm,
    Point,
    Track,
)
from vllm_headroom.derive.leak.growth import (
    DAY_SECONDS,
    GROWING_SECONDS,
    LATE_SHARE,
    LEAKING_SECONDS,
    LEAST_GROWTH_BYTES,
    LENGTHS,
    Course,
    Growth,
    clip_rises,
    compute_patience,
    cut_window,
    find_step_windows,
    has_ended,
    is_even,
    is_over,
    is_steady,
    judge_steps,
    list_falls,
    survey,
    weigh_pace,
)

LEAST_RISES, LEAST_RARE = 6, 10.0
"""Least rises for a verdict, fewer are indistinguishable from first uses of kernels, and their least evidence."""

LIKELY, SURE, SURE_IF_FAR, MOST = 12.0, 14.0, 18.0, 12.0
"""The least evidence of rises and pace for a warning, for an alarm and for one of what is full in more than 30 days, as
logarithms of odds. Each counts at most 12, so that neither is enough alone."""

SOON_SHARE: Final = 0.75
"""Steady growth of 11 blocks is an alarm without odds after this share of the time left; after an hour LATE_SHARE."""

OVERHEAD: Final = 1.15
"""What a configured pool may take beyond its size."""

HELD, PAUSES = (2700.0, 3.0), 1.5
"""An alarm is held for so many seconds without a rise, and so many usual gaps; for longer with less than 1 GiB left. If
it came within a day after another it is held for so many times what lay between: the leak pauses."""

LARGE_BYTES, FULL_BYTES = 64 * 2**20, 2**30
KEPT_SHARE, KEPT_BLOCKS = 0.5, 10
"""After a fall growth is compared with what is left; an alarm ends when that is less than a share of it for five
minutes: a cache fills again after a sleep. On a full card it does not."""


def judge_track(track: Track, room_bytes: int | None) -> Track:
    """Return the track with its verdict, its incident and its estimate, when the shortest block has ended.

    It is judged every two minutes, when a block of the second ring ends: judging costs more than the rest. Between them
    the time left counts down. The verdict uses the room that would be left if other processes had not changed, the time
    left the actual room.
    """
    first, now = track.first, track.rings[0].points[-1] if track.rings[0].points else None
    if first is None or now is None or now.seconds != track.seconds:
        return track
    if room_bytes is not None:
        track = replace(
            track, most_bytes=max(track.most_bytes, (track.held_bytes or 0.0) + room_bytes)
        )
    own_room = None if room_bytes is None else track.most_bytes - now.floor_bytes
    track = track if track.incident is None else _update_incident(track, track.incident, now)
    recent_bytes = now.floor_bytes - track.rings[0].points[0].floor_bytes
    if track.rings[1].parts and (own_room is None or recent_bytes < SOON_SHARE * own_room):
        return _update_estimate(track, None, room_bytes)
    if track.incident is not None:
        since = track.incident.began
        reach = (
            each for each in track.rings if each.points and each.points[0].seconds <= since.seconds
        )
        ring = next(reach, track.rings[-1])  # the shortest blocks that reach back so far
        course = (
            survey(ring, since)
            if ring.points and ring.points[-1].seconds == track.seconds
            else None
        )
        grown = None if course is None else cut_window(course, 0)
    else:
        track, grown = _judge_rings(track, first, own_room)
    return _update_estimate(track, grown, room_bytes)


def _update_estimate(track: Track, grown: Growth | None, room_bytes: int | None) -> Track:
    """Return the track with a new estimate; with its old one if the new one, in a valley, shows no growth."""
    found = track.estimate if track.verdict else None
    if grown is not None and track.verdict:
        began_bytes = (
            grown.kept_bytes[0] if track.incident is None else track.incident.began.floor_bytes
        )
        new = estimate(grown, began_bytes=began_bytes, track=track, room_bytes=room_bytes)
        found = new if found is None or new.pace is not None else found
    if found is not None and room_bytes is not None:
        found = set_time_left(found, track, room_bytes)
    return replace(track, estimate=found)


def _judge_rings(
    track: Track, first: Point, room_bytes: float | None
) -> tuple[Track, Growth | None]:
    """Return the track with the verdict of each ring whose block has ended, and the growth behind the surest."""
    rings, best, grown = [], Certainty.NONE, None
    reach = (
        each
        for each in track.rings[1:]
        if each.points and each.points[0].seconds <= first.seconds + 960.0
    )
    wide = next(
        reach, track.rings[-1]
    )  # the shortest blocks, from two minutes on, that lack at most 16 minutes
    for ring in track.rings:
        verdict = ring.verdict
        if ring.points and ring.points[-1].seconds == track.seconds:
            course, whole = survey(ring, first), ring is wide
            judged = (
                ()
                if course is None
                else _judge_windows(course, track, first, room_bytes, whole=whole)
            )
            verdict, _, found = max(
                judged, key=lambda judgement: judgement[:2], default=(Certainty.NONE, 0.0, None)
            )
            if found is not None and verdict >= max(best, Certainty.GROWING):
                best, grown = verdict, found
        rings.append(replace(ring, verdict=verdict))
    verdict = max(ring.verdict for ring in rings)
    track = replace(track, rings=tuple(rings), verdict=verdict)
    if verdict is Certainty.LEAKING and grown is not None:
        began, newest = (
            replace(grown.points[at], floor_bytes=grown.kept_bytes[at]) for at in (0, -1)
        )
        squares = grown.typical_bytes * grown.grown_bytes
        track = replace(track, incident=LeakAlarm(began=began, newest=newest, squares=squares))
    return track, grown if best is verdict or track.estimate is None else None


def _judge_windows(
    course: Course, track: Track, first: Point, room_bytes: float | None, *, whole: bool
) -> Iterator[tuple[Certainty, float, Growth]]:
    """Yield the verdict on each window, with its evidence; one that may fill a configured pool is no alarm."""
    assert track.anchor is not None  # noqa: S101 - it is set before the first block
    beyond = course.kept_bytes[-1] >= track.anchor.floor_bytes + OVERHEAD * track.bound_bytes
    most = Certainty.LEAKING if beyond else Certainty.GROWING
    for length in reversed(LENGTHS):
        begin = len(course.points) - 1 - length
        if begin < 0 or course.kept_bytes[-1] - course.highest_bytes[begin] < LEAST_GROWTH_BYTES:
            continue
        grown = cut_window(course, begin)
        likely = grown.score >= LEAST_RARE or is_steady(grown)
        if grown.count >= LEAST_RISES and likely and not has_ended(grown):
            odds = min(MOST, grown.score) + min(MOST, weigh_pace(grown, track.anchor))
            yield min(most, _judge_even(grown, odds, room_bytes)), odds, grown
    fallen_bytes = max((fall for _, fall in list_falls(track)), default=0.0) if whole else 0.0
    for grown in find_step_windows(course) if whole else ():
        if not has_ended(grown) and grown.grown_bytes >= fallen_bytes:
            verdict, odds = judge_steps(grown, track, first, room_bytes)
            yield min(most, verdict), odds, grown


def _judge_even(grown: Growth, odds: float, room_bytes: float | None) -> Certainty:
    """Return the verdict on even growth, given the odds.

    Whatever its cause, growth that has lasted longer than the time left until the device is full is an alarm; a single
    large rise says nothing of that time. In the first minutes of a run, when anything new is likely, it must be steady.
    """
    trend_bytes = sum(clip_rises(grown, LARGE_BYTES))
    left = (
        None
        if room_bytes is None
        else max(0.0, room_bytes - OUT_OF_MEMORY_BYTES) / trend_bytes * grown.lasted
    )
    share = SOON_SHARE if grown.lasted < LEAKING_SECONDS else LATE_SHARE
    is_soon = left is not None and share * left <= grown.lasted and is_steady(grown)
    likely = is_soon or (grown.score >= LEAST_RARE and odds >= LIKELY)
    if trend_bytes < LEAST_GROWTH_BYTES or not likely or not is_even(grown):
        return Certainty.NONE
    sure = SURE_IF_FAR if left is not None and left > 30 * DAY_SECONDS else SURE
    if is_soon or (odds >= sure and grown.lasted >= compute_patience(left)):
        return Certainty.LEAKING
    if grown.lasted < GROWING_SECONDS:
        return Certainty.NONE
    return Certainty.LEAKING if left is not None and grown.lasted >= left else Certainty.GROWING


def _update_incident(track: Track, incident: LeakAlarm, now: Point) -> Track:
    """Return the track with its incident after a block, or without it and its evidence: it ended, or was given back."""
    began, newest = incident.began, incident.newest
    if now.floor_bytes >= newest.floor_bytes + RISE_BYTES:
        squares = incident.squares + (now.floor_bytes - newest.floor_bytes) ** 2
        return replace(track, incident=replace(incident, newest=now, squares=squares))
    longer = (
        max(1.0, FULL_BYTES / max(1.0, track.most_bytes - newest.floor_bytes))
        if track.most_bytes
        else 1.0
    )
    fall, full = newest.floor_bytes - now.floor_bytes, longer > 1.0
    if full:  # torch's allocator gives back its cache, which hides the growth beneath
        began = replace(began, floor_bytes=began.floor_bytes - max(0.0, fall))
    kept_bytes = began.floor_bytes + (0.0 if full else KEPT_SHARE) * (
        newest.floor_bytes - began.floor_bytes
    )
    if now.floor_bytes >= kept_bytes and fall > LARGE_BYTES:
        return replace(track, incident=replace(incident, began=began, newest=now))
    count = (newest.floor_bytes - began.floor_bytes) ** 2 / incident.squares
    pause = inf if track.risen_seconds is None else began.seconds - track.risen_seconds
    quiet = max(longer * HELD[0], PAUSES * pause if pause < DAY_SECONDS else 0.0)
    is_kept = max(point.floor_bytes for point in track.rings[0].points[-KEPT_BLOCKS:]) >= kept_bytes
    if is_kept and not is_over(began, newest, now, count, (quiet, longer * HELD[1])):
        return track
    over = {"parts": 0, "highest_bytes": newest.floor_bytes, "verdict": Certainty.NONE}
    rings = tuple(replace(ring, points=ring.points[-1:], **over) for ring in track.rings)
    return replace(
        track, incident=None, rings=rings, verdict=Certainty.NONE, risen_seconds=newest.seconds
    )


BATCHES, T_95 = 5, 2.776
"""Batches of an interval, and Student's t for 95 % with 4 degrees of freedom."""

UNLIKE: Final = 1.4
"""Requests drive the growth unless their batches vary this much more than those of time."""

UNSEEN_SHARE: Final = 0.6
"""Load has a daily cycle: before a day was seen, it may rise so much that only this share of the time is left."""

SHORT_SECONDS, MARGIN_SECONDS = 900.0, 300.0
"""An estimate is made every two minutes, and peaks of some minutes are in no block's floor."""


def estimate(
    grown: Growth, *, began_bytes: float, track: Track, room_bytes: float | None
) -> Estimate:
    """Return rates from the later half of the stretch, and the paces at the expected request rate.

    The slope is Theil and Sen's, which single benign steps do not move. Its interval comes from five batches of the
    later three quarters, because rises are not independent, widened by one median rise, because the true amount is
    known only to the allocator's step. It does not reach below zero: a leak gives nothing back.
    """
    seconds = [point.seconds for point in grown.points]
    requests = [point.requests for point in grown.points]
    step = min(LARGE_BYTES, median(rise for rise in grown.rises if rise > 0))
    per_second, half_width, spread = measure_rate(seconds, grown.kept_bytes, step)
    per_request, request_half_width, request_spread = measure_rate(requests, grown.kept_bytes, step)
    by_requests = per_request > 0 and track.work.rate > 0 and request_spread <= UNLIKE * spread
    pace, fastest = per_second, per_second + half_width if per_second > 0 else 0.0
    if room_bytes is not None and by_requests:
        horizon = max(0.0, room_bytes - OUT_OF_MEMORY_BYTES) / (per_request * track.work.rate)
        pace = per_request * forecast_rate(track, horizon)
        most = max(
            forecast_rate(track, span) for span in (3600.0, horizon / 4, horizon)
        )  # the last hour's may go on
        fastest = 1.1 * most * (per_request + request_half_width)
    is_known = track.seconds >= DAY_SECONDS or not (
        by_requests or track.work.finished_total is None
    )
    if room_bytes is not None and not is_known and fastest * track.seconds / 2 < room_bytes:
        fastest /= UNSEEN_SHARE
    return Estimate(
        bytes_per_second=per_second,
        lower=max(min(0.0, per_second), per_second - half_width),
        upper=per_second + half_width,
        bytes_per_request=per_request if requests[-1] > requests[0] else None,
        by_requests=by_requests,
        leaked_bytes=max(grown.grown_bytes, grown.points[-1].floor_bytes - began_bytes),
        pace=pace if pace > 0 else None,
        fastest=fastest if fastest > 0 else None,
    )


def set_time_left(found: Estimate, track: Track, room_bytes: float) -> Estimate:
    """Return the estimate with the time left now.

    Out-of-memory happens at the next peak, not in the present valley. Memory that follows load, and the sawtooth of a
    garbage collector, return to their old height plus what leaked since; a demand as large as the largest recent one
    may come on top. The lower bound is the time until then.
    """
    newest, rate = [point.floor_bytes for point in track.rings[0].points], found.bytes_per_second
    falls = (
        (fall, at.floor_bytes - newest[-1], track.seconds - at.seconds)
        for at, fall in list_falls(track)
    )
    swings = [0.0, *(min(fall, lower + rate * seconds) for fall, lower, seconds in falls)]
    largest_bytes = max((after - before for before, after in pairwise(newest)), default=0.0)
    demand_bytes = max(max(swings) + largest_bytes, OUT_OF_MEMORY_BYTES)
    room, least = max(0.0, room_bytes - OUT_OF_MEMORY_BYTES), max(0.0, room_bytes - demand_bytes)
    return replace(
        found,
        oom_seconds=room / found.pace if found.pace else None,
        oom_seconds_lower=max(0.0, least / found.fastest - MARGIN_SECONDS)
        if found.fastest
        else None,
    )


def measure_rate(
    axis: list[float], values: tuple[float, ...], step_bytes: float
) -> tuple[float, float, float]:
    """Return slope, half width of its 95 % interval and relative spread of its batches on one axis.

    Where the later half has no slope, growth was in a few large steps, and the slope is that of the whole.
    """
    length = axis[-1] - axis[0]
    if length <= 0:
        return 0.0, 0.0, inf
    half, size = len(axis) // 2, (len(axis) - 1 - len(axis) // 4) // BATCHES
    every = -(
        -(len(axis) - half) // 16
    )  # the cost is quadratic, and more points gave no better rates
    late = zip(axis[half::every], values[half::every], strict=True)
    slopes = [
        (y - before) / (x - since) for (since, before), (x, y) in combinations(late, 2) if x > since
    ]
    slope = (median(slopes) if slopes else 0.0) or (values[-1] - values[0]) / length
    cuts = pairwise(len(axis) - 1 - size * number for number in range(BATCHES, -1, -1))
    batches = [
        (values[end] - values[at]) / (axis[end] - axis[at])
        for at, end in cuts
        if axis[end] > axis[at]
    ]
    if len(batches) < BATCHES:
        return slope, abs(slope), inf
    spread = stdev(batches)
    half_width = T_95 * spread / sqrt(BATCHES) + step_bytes / (axis[-1] - axis[half])
    return slope, half_width, spread / max(abs(fmean(batches)), 1e-9)


def forecast_rate(track: Track, horizon_seconds: float) -> float:
    """Return the expected requests per second over a horizon: the mean of an equally long past, as far as is known."""
    points: tuple[Point, ...] = track.rings[-1].points
    then = (
        bisect_right(points, track.seconds - horizon_seconds, key=lambda point: point.seconds) - 1
    )
    since = points[max(0, then)] if points else None
    if (
        since is None
        or horizon_seconds < SHORT_SECONDS
        or track.seconds - since.seconds < SHORT_SECONDS
    ):
        return track.work.rate
    return (track.work.requests - since.requests) / (track.seconds - since.seconds)
