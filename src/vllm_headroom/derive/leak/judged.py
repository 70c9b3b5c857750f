"""What the evidence, the last hours and the room that is left amount to."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.blocks import here
from vllm_headroom.derive.leak.estimate import estimate, timed
from vllm_headroom.derive.leak.evidence import MISSES_THAT_END_IT, RISE_BYTES, THRESHOLDS, settle, stretch
from vllm_headroom.derive.leak.facts import Level, Track, Verdict
from vllm_headroom.derive.leak.projection import Life, project
from vllm_headroom.derive.leak.shape import Growth, growth, judge, retained, steadiness
from vllm_headroom.derive.leak.swings import swing

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
