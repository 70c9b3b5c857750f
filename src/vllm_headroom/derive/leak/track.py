"""One series of memory readings followed through its lives, rests and blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from vllm_headroom.derive.leak.blocks import GIVEN_BACK_BYTES, close, here, lowered, with_level
from vllm_headroom.derive.leak.estimate import estimate, refreshed
from vllm_headroom.derive.leak.evidence import (
    BLOCK_SECONDS,
    MISSES_THAT_END_IT,
    THRESHOLDS,
    USELESS_CHANCE,
    chance,
    settle,
    stretch,
)
from vllm_headroom.derive.leak.facts import MIB, Block, Level, Observation, Run, Track, Verdict
from vllm_headroom.derive.leak.fast import LASTS_SECONDS, QUIET_SECONDS, fast, followed
from vllm_headroom.derive.leak.projection import Life, project
from vllm_headroom.derive.leak.shape import Growth, growth, judge, steadiness
from vllm_headroom.derive.leak.work import restarted, worked

REST_SHARE: Final = 0.5
WAKE_SHARE: Final = 0.8
"""Half of the memory gone is a sleep or a stop; it is back at four fifths. Between them nothing is decided."""

STILL_LEAKED_SHARE: Final = 0.5
"""A wake after which more than this share of what leaked is gone ends the verdict."""

REST_MOST_SECONDS: Final = 1800.0
"""An engine that holds half of what it did for this long while awake holds what it needs now."""


CROWDED_MOST_SECONDS: Final = 3600.0
"""A neighbour that stays for this long belongs to the card; one that goes sooner leaves things as they were."""

DOUBTED_SECONDS: Final = 86_400.0
"""A time this far ahead, or an earlier one, is believed when a second reading bears it out."""

JUDGED_LEVEL: Final = 1
"""Evidence is judged whenever a block of this level ends, every two minutes: judging costs more than all the rest."""

PROJECTED_LEVEL: Final = 3
BORNE_OUT_SCORE: Final = 1 / 3
"""Its 64 blocks of 16 minutes are the last 17 hours; a third of its threshold bears them out."""

NEAR_SECONDS: Final = 3600.0
NEAR_SHARE: Final = 0.25
"""With less than an hour left, or room for a quarter of what leaked, an alarm is held for an hour."""


FLUSHED_BYTES: Final = 64 * MIB
FLUSHED_ROOM_BYTES: Final = 1024 * MIB
REFILL_SECONDS: Final = 3600.0
"""A fall of this much when there was no more room than this is torch's allocator giving back its cache. It fills again,
and for this long that is not taken for the leak's rate."""


def observe(track: Track, seen: Observation) -> Track:
    """Return the track with one more reading; takes some microseconds, and a millisecond when a long block ends."""
    if _doubtful(track, seen):
        return replace(track, doubted_clock=seen.seconds)
    if restarted(track.work, seen) or seen.seconds - track.clock >= DOUBTED_SECONDS:
        life = track.work.life if seen.life is None else seen.life
        return observe(Track(clock=seen.seconds), replace(seen, life=life))
    elapsed = max(0.0, seen.seconds - track.clock)
    now = track.seconds + elapsed
    track = replace(
        track,
        clock=seen.seconds,
        doubted_clock=None,
        seconds=now,
        work=worked(track.work, seen, elapsed, now),
        asleep=seen.awake is False,
    )
    if seen.held_bytes is None:
        return track
    track = _crowded(track, seen.neighbours)
    if track.crowded_since is not None:
        return track
    track = _rest(track, seen.held_bytes)
    return track if track.resting_since is not None else _gather(track, float(seen.held_bytes), seen.room_bytes)


def _doubtful(track: Track, seen: Observation) -> bool:
    """Return whether a time is far off, and the reading before was not as far off."""
    if 0 <= seen.seconds - track.clock < DOUBTED_SECONDS:
        return False
    doubted = track.doubted_clock
    return doubted is None or not 0 <= seen.seconds - doubted < DOUBTED_SECONDS


def _crowded(track: Track, neighbours: int | None) -> Track:
    """Return the track waiting while another process is on the card, and begun anew when it stays."""
    if neighbours is None or neighbours == track.neighbours:
        return track if track.crowded_since is None else replace(track, crowded_since=None)
    if track.neighbours is None or neighbours < track.neighbours:
        anchor = track.anchor_seconds if track.neighbours is None else None
        return replace(track, neighbours=neighbours, anchor_seconds=anchor, crowded_since=None)
    if track.crowded_since is None:
        return _paused(replace(track, crowded_since=track.seconds))
    if track.seconds - track.crowded_since < CROWDED_MOST_SECONDS:
        return track
    return replace(track, neighbours=neighbours, anchor_seconds=None, crowded_since=None)


def _paused(track: Track) -> Track:
    """Return the track without the block it was gathering, so that what follows a pause is not compared within it."""
    if not track.levels:
        return track
    return with_level(replace(track, run=Run()), 0, replace(track.levels[0], block=None))


def warming_up(track: Track) -> bool:
    """Return whether so little work was done since the anchor that the next block can be no evidence."""
    if track.anchor_seconds is None:
        return True
    age, done = track.seconds - track.anchor_seconds, track.work.requests - track.anchor_requests
    soon = (age + BLOCK_SECONDS, done + BLOCK_SECONDS * track.work.rate)
    return chance((age, done), soon) >= USELESS_CHANCE


def _anchored(track: Track) -> Track:
    """Return the track at the beginning of a new stretch of comparable readings."""
    return replace(
        track,
        anchor_seconds=track.seconds,
        anchor_requests=track.work.requests,
        first_bytes=0.0,
        busy_seconds=0.0,
        top_bytes=0.0,
        resting_since=None,
        levels=(Level(),) * len(THRESHOLDS),
        history=(),
        rises=(),
        grown_bytes=0.0,
        run=Run(),
        quiet_until=track.seconds + QUIET_SECONDS,
        fast_until=0.0,
        projected=Verdict.NONE,
        sure_seconds=None,
        flushed_seconds=None,
        verdict=Verdict.NONE,
        estimate=None,
    )


def _rest(track: Track, held_bytes: int) -> Track:
    """Return the track resting while the engine sleeps or has let go of its memory.

    What was learned is kept over it: the same process goes on with what it did not give back.
    """
    if track.anchor_seconds is None:
        track = _anchored(track)
    if track.resting_since is None:
        if track.asleep or held_bytes < REST_SHARE * track.top_bytes:
            return _paused(replace(track, resting_since=track.seconds))
        return track
    if track.asleep:
        return track
    if held_bytes >= WAKE_SHARE * track.top_bytes:
        return _woken(track, held_bytes)
    return _anchored(track) if track.seconds - track.resting_since >= REST_MOST_SECONDS else track


def _woken(track: Track, held_bytes: int) -> Track:
    track = replace(track, resting_since=None, quiet_until=track.seconds + QUIET_SECONDS)
    reference, found = track.levels[0].reference_bytes, track.estimate
    if reference is not None and found is not None and held_bytes < reference - STILL_LEAKED_SHARE * found.leaked_bytes:
        return replace(track, verdict=Verdict.NONE, estimate=None, sure_seconds=None)
    return track


def _gather(track: Track, held_bytes: float, room_bytes: int | None) -> Track:
    if held_bytes > track.top_bytes:
        track = replace(track, top_bytes=held_bytes)
    track = _flushed(track, held_bytes, room_bytes)
    block = track.levels[0].block
    if block is not None and track.seconds - block.seconds >= BLOCK_SECONDS:
        track = close(track, 0)
        if track.anchor_seconds is None:
            return _gather(_still_alarmed(_anchored(track), track), held_bytes, room_bytes)
        if track.levels[JUDGED_LEVEL].block is None:
            track = _judged(track, room_bytes)
        block = None
    now = (track.seconds, track.work.requests)
    if block is None:
        opened = Block(*now, held_bytes, held_bytes, 0)
    elif block.floor_bytes <= held_bytes <= block.ceiling_bytes:
        opened = block
    else:
        opened = replace(
            block,
            floor_bytes=min(block.floor_bytes, held_bytes),
            ceiling_bytes=max(block.ceiling_bytes, held_bytes),
        )
    if opened is not block:
        track = with_level(track, 0, replace(track.levels[0], block=opened))
    return _hastened(track, held_bytes, room_bytes)


def _flushed(track: Track, held_bytes: float, room_bytes: int | None) -> Track:
    """Return the track with all that was before lowered by what the allocator gave back of its cache.

    Before torch fails for want of room it gives back whole free segments; the growth beneath goes on from there.
    """
    block = track.levels[0].block
    if block is None or room_bytes is None or track.verdict is not Verdict.LEAKING:
        return track
    drop = block.ceiling_bytes - held_bytes
    if drop < FLUSHED_BYTES or room_bytes - drop > FLUSHED_ROOM_BYTES:
        return track
    return replace(
        track,
        first_bytes=track.first_bytes - drop,
        flushed_seconds=track.seconds,
        levels=tuple(lowered(level, drop) for level in track.levels),
    )


def _hastened(track: Track, held_bytes: float, room_bytes: int | None) -> Track:
    """Return the track with the alarm of growth that leaves no time for evidence.

    Where nobody knows how much room there is, it is taken for as much as is held. What only comes back is no growth.
    """
    reference = track.levels[0].reference_bytes
    if track.seconds < track.quiet_until or reference is None or held_bytes < reference - GIVEN_BACK_BYTES:
        return replace(track, run=Run()) if track.run.seconds else track
    run = followed(track.run, track.seconds, held_bytes)
    if run is track.run:
        return track
    track, on = replace(track, run=run), track.fast_until > 0
    if track.verdict is Verdict.LEAKING and not on:
        return track
    found = fast(run, held_bytes if room_bytes is None else room_bytes, on=on)
    if found is not None:
        return replace(track, fast_until=track.seconds + LASTS_SECONDS, verdict=Verdict.LEAKING, estimate=found)
    if on and track.seconds >= track.fast_until:
        return _judged(replace(track, fast_until=0.0), room_bytes)
    return track


def _judged(track: Track, room_bytes: int | None) -> Track:
    """Return the track with the verdict of the surest level and its estimate."""
    if track.seconds < track.fast_until:
        return track
    if room_bytes is not None:
        track = replace(track, most_bytes=max(track.most_bytes, _floor(track) + room_bytes))
    own_room = None if room_bytes is None else track.most_bytes - _floor(track)
    track, grown = _weighed(track, own_room)
    verdict = max(track.projected, *(level.verdict for level in track.levels))
    if verdict is not Verdict.LEAKING and _is_held(track):
        return replace(_refreshed(track, room_bytes), verdict=Verdict.LEAKING)
    track = replace(track, verdict=verdict)
    if verdict is Verdict.NONE:
        return replace(track, estimate=None, sure_seconds=None)
    refills = track.flushed_seconds is not None and track.seconds - track.flushed_seconds < REFILL_SECONDS
    known = track.estimate is not None and (refills or grown is None)
    track = _refreshed(track, room_bytes) if known or grown is None else _estimated(track, grown, room_bytes)
    near = verdict is Verdict.LEAKING and _is_near(track, room_bytes)
    return replace(track, sure_seconds=track.seconds if near else None)


def _floor(track: Track) -> float:
    points = track.levels[0].points
    return points[-1].floor_bytes if points else track.first_bytes


def _weighed(track: Track, room_bytes: float | None) -> tuple[Track, Growth | None]:
    """Return the track with each level's verdict and that of the last hours, and the growth that says most."""
    levels: list[Level] = []
    best: tuple[Verdict, Growth | None] = (Verdict.NONE, None)
    steady = steadiness(track.history, here(track))
    for level, threshold, most in zip(track.levels, THRESHOLDS, MISSES_THAT_END_IT, strict=True):
        grown = growth(stretch(level)) if level.score >= threshold else None
        judged = Verdict.NONE if grown is None else judge(grown, steady, room_bytes)
        levels.append(settle(level, judged, threshold, most, _floor(track)))
        if grown is not None and levels[-1].verdict and levels[-1].verdict >= best[0]:
            best = (levels[-1].verdict, grown)
    projected, grown = _projected(track, room_bytes)
    if grown is not None and projected > best[0]:
        best = (projected, grown)
    return replace(track, levels=tuple(levels), projected=projected), best[1]


def _projected(track: Track, room_bytes: float | None) -> tuple[Verdict, Growth | None]:
    """Return what the last hours foretell; anew only when one of their blocks ends."""
    level = track.levels[PROJECTED_LEVEL]
    if level.block is not None:
        return track.projected, None
    life = Life(
        began=(track.anchor_seconds or 0.0, track.anchor_requests),
        first_bytes=track.first_bytes,
        room_bytes=room_bytes,
        borne_out=level.score >= BORNE_OUT_SCORE * THRESHOLDS[PROJECTED_LEVEL],
        before=track.projected,
    )
    return project(level.points, life)


def _refreshed(track: Track, room_bytes: int | None) -> Track:
    if track.estimate is None or room_bytes is None:
        return track
    return replace(track, estimate=refreshed(track.estimate, room_bytes, max(track.rises, default=0.0)))


def _is_near(track: Track, room_bytes: int | None) -> bool:
    found = track.estimate
    if found is None or room_bytes is None:
        return False
    return room_bytes <= max(NEAR_SHARE * found.leaked_bytes, NEAR_SECONDS * found.bytes_per_second)


def _is_held(track: Track) -> bool:
    return track.sure_seconds is not None and track.seconds - track.sure_seconds <= NEAR_SECONDS


def _still_alarmed(track: Track, before: Track) -> Track:
    """Return a track begun anew with the alarm of the one before, where that is held."""
    if before.sure_seconds is None:
        return track
    return replace(track, verdict=before.verdict, estimate=before.estimate, sure_seconds=before.sure_seconds)


def _estimated(track: Track, grown: Growth, room_bytes: int | None) -> Track:
    began = min(
        (level.began for level in track.levels if level.verdict and level.began),
        key=lambda point: point.seconds,
        default=grown.points[0],
    )
    return replace(
        track,
        estimate=estimate(
            grown,
            began_bytes=began.floor_bytes,
            work=track.work,
            now=track.seconds,
            room_bytes=room_bytes,
            demand_bytes=max(track.rises, default=0.0),
        ),
    )
