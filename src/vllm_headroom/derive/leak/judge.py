"""The judge: adds the evidence of the witnesses, and holds an alarm until its growth has ended."""

from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import MIB, RISE_BYTES, Certainty, Incident, Point, Ring, Track
from vllm_headroom.derive.leak.growth import Course, Growth, cut_window, find_windows, has_ended, is_over, survey
from vllm_headroom.derive.leak.rate import estimate, set_time_left
from vllm_headroom.derive.leak.steps import find_step_windows, judge_steps
from vllm_headroom.derive.leak.witnesses import (
    GROWING_SECONDS,
    compute_patience,
    find_time_left,
    judge_evenness,
    weigh_pace,
)

LEAST_RARE: Final = 10.0
LIKELY, SURE, MOST = 12.0, 14.0, 12.0
"""The least evidence of the rises, and with the pace for a warning and for an alarm, as logarithms of odds. Each
counts at most 12, so that neither is enough alone."""

LARGEST_STEP: Final = 0.40
"""A stretch with one rise above this share may be growing; it is not called a leak."""

OVERHEAD: Final = 1.15
"""What a configured pool may take beyond its size."""

HELD_SECONDS, HELD_GAPS = 2700.0, 3.0
FULL_FACTOR: Final = 4.0
"""An alarm is held for so long without a rise, and so many usual gaps; longer by a factor while little room is left."""

FULL_BYTES: Final = 1024 * MIB
FULL_SHARE: Final = 0.25
"""With no more room than this, or than this share of the growth, the card is full."""

LOWER_BYTES: Final = 64 * MIB
KEPT_SHARE, KEPT_OF_FULL_SHARE = 0.5, 0.15
"""After a fall growth is compared with what is left; an alarm ends when that is less than a share of the growth. On a
full card, where torch's allocator gives back its cache, a leak keeps less."""


def judge_track(track: Track, room_bytes: int | None) -> Track:
    """Return the track with its verdict, its incident and its estimate, when the shortest block has ended.

    It is judged every two minutes, when a block of the second ring ends: judging costs more than the rest. The verdict
    uses the room that would be left if other processes had not changed, the time left the actual room.
    """
    first, now = track.first, track.rings[0].points[-1] if track.rings[0].points else None
    if first is None or now is None or now.seconds != track.seconds:
        return track
    if room_bytes is not None:
        track = replace(track, most_bytes=max(track.most_bytes, (track.held_bytes or 0.0) + room_bytes))
    own_room = None if room_bytes is None else track.most_bytes - now.floor_bytes
    track = track if track.incident is None else _update_incident(track, track.incident, now, own_room)
    if track.rings[1].block is not None:
        return track
    if track.incident is not None:
        grown = _follow_incident(track, track.incident)
    else:
        track, grown = _judge_rings(track, first, own_room)
    if track.verdict is Certainty.NONE:
        return track if track.estimate is None else replace(track, estimate=None)
    return track if grown is None and track.estimate is None else _update_estimate(track, grown, room_bytes)


def _update_estimate(track: Track, grown: Growth | None, room_bytes: int | None) -> Track:
    """Return the track with a new estimate; with its old one if the new one, in a valley, shows no growth."""
    found = track.estimate
    if grown is not None:
        began_bytes = grown.kept_bytes[0] if track.incident is None else track.incident.began.floor_bytes
        new = estimate(grown, began_bytes=began_bytes, track=track, room_bytes=room_bytes)
        found = new if found is None or new.pace is not None else found
    if found is not None and room_bytes is not None:
        found = set_time_left(found, track, room_bytes)
    return replace(track, estimate=found)


def _judge_rings(track: Track, first: Point, room_bytes: float | None) -> tuple[Track, Growth | None]:
    """Return the track with the verdict of each ring whose block has ended, and the growth behind the surest."""
    rings, best, grown = [], Certainty.NONE, None
    for each in track.rings:
        ring = each
        if ring.points and ring.points[-1].seconds == track.seconds:
            course, judged = survey(ring, first), []
            if course is not None:
                judged = list(_judge_windows(course, track, first, room_bytes, whole=each is track.rings[-1]))
            verdict, _, found = max(judged, key=lambda judgement: judgement[:2], default=(Certainty.NONE, 0.0, None))
            ring = replace(ring, verdict=verdict)
            if found is not None and verdict >= max(best, Certainty.GROWING):
                best, grown = verdict, found
        rings.append(ring)
    verdict = max(ring.verdict for ring in rings)
    track = replace(track, rings=tuple(rings), verdict=verdict)
    if verdict is Certainty.LEAKING and grown is not None:
        began = replace(grown.points[0], floor_bytes=grown.kept_bytes[0])
        newest = replace(grown.points[-1], floor_bytes=grown.kept_bytes[-1])
        track = replace(track, incident=Incident(began=began, newest=newest, rises=grown.count))
    return track, grown if best is verdict or track.estimate is None else None


def _judge_windows(
    course: Course, track: Track, first: Point, room_bytes: float | None, *, whole: bool
) -> Iterator[tuple[Certainty, float, Growth]]:
    """Yield the verdict on each window, with its evidence; one that may fill a configured pool is no alarm."""
    assert track.anchor is not None  # noqa: S101 - it is set before the first block
    beyond = course.kept_bytes[-1] >= track.anchor.floor_bytes + OVERHEAD * track.bound_bytes
    most = Certainty.LEAKING if beyond else Certainty.GROWING
    for grown in find_windows(course):
        if grown.score >= LEAST_RARE and not has_ended(grown):
            odds = min(MOST, grown.score) + min(MOST, weigh_pace(grown, first))
            yield min(most, _judge_even(grown, odds, room_bytes)), odds, grown
    for grown in find_step_windows(course, track.load) if whole else ():
        if not has_ended(grown):
            verdict, odds = judge_steps(grown, track, first, room_bytes)
            yield min(most, verdict), odds, grown


def _judge_even(grown: Growth, odds: float, room_bytes: float | None) -> Certainty:
    """Return the verdict on even growth, given the odds.

    Whatever its cause, growth that has lasted longer than the time left until the device is full is an alarm. Large
    single steps are not an even pace: the larger their share, the longer the wait.
    """
    even, lasted = judge_evenness(grown), grown.lasted
    if even is Certainty.NONE or odds < LIKELY:
        return Certainty.NONE
    left = find_time_left(grown.grown_bytes, lasted, room_bytes)
    left_evenly = find_time_left(grown.total_bytes**2 / grown.grown_bytes, lasted, room_bytes)
    sure = even is Certainty.LEAKING and odds >= SURE and max(grown.rises) <= LARGEST_STEP * grown.grown_bytes
    if sure and lasted >= compute_patience(left_evenly):
        return Certainty.LEAKING
    if lasted < GROWING_SECONDS:
        return Certainty.NONE
    return Certainty.LEAKING if left is not None and lasted >= left else Certainty.GROWING


def _update_incident(track: Track, incident: Incident, now: Point, room_bytes: float | None) -> Track:
    """Return the track with its incident after a block; it ends when its growth has, or most was given back.

    Then the evidence starts over. Growth continues beneath what was given back.
    """
    began, newest = incident.began, incident.newest
    if now.floor_bytes >= newest.floor_bytes + RISE_BYTES:
        return replace(track, incident=replace(incident, newest=now, rises=incident.rises + 1))
    grown = newest.floor_bytes - began.floor_bytes
    full = room_bytes is not None and track.most_bytes - newest.floor_bytes <= FULL_BYTES
    kept_bytes = began.floor_bytes + (KEPT_OF_FULL_SHARE if full else KEPT_SHARE) * grown
    if kept_bytes <= now.floor_bytes < newest.floor_bytes - LOWER_BYTES:
        return replace(track, incident=replace(incident, newest=now))
    near = room_bytes is not None and room_bytes <= FULL_SHARE * grown
    held = (HELD_SECONDS * (FULL_FACTOR if near else 1.0), HELD_GAPS)
    if now.floor_bytes >= kept_bytes and not is_over(began, newest, now, incident.rises, held):
        return track
    rings = tuple(Ring(points=ring.points[-1:], highest_bytes=newest.floor_bytes) for ring in track.rings)
    return replace(track, incident=None, rings=rings, verdict=Certainty.NONE)


def _follow_incident(track: Track, incident: Incident) -> Growth | None:
    """Return the growth since the incident began, in the shortest blocks that reach back so far; None between them."""
    since = incident.began.seconds
    ring = next((each for each in track.rings if each.points and each.points[0].seconds <= since), track.rings[-1])
    if not ring.points or ring.points[-1].seconds != track.seconds:
        return None
    course = survey(ring, incident.began)
    return None if course is None else cut_window(course, 0)
