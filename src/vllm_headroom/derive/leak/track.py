"""One series of memory readings followed through its lives, rests and blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from vllm_headroom.derive.leak.blocks import close, here, with_level
from vllm_headroom.derive.leak.estimate import estimate
from vllm_headroom.derive.leak.evidence import (
    BLOCK_SECONDS,
    THRESHOLDS,
    USELESS_CHANCE,
    chance,
    settle,
)
from vllm_headroom.derive.leak.facts import Block, Level, Observation, Track, Verdict
from vllm_headroom.derive.leak.shape import Growth, growth, judge, steadiness
from vllm_headroom.derive.leak.work import restarted, worked

REST_SHARE: Final = 0.5
WAKE_SHARE: Final = 0.8
"""Half of the memory gone is a sleep or a stop; it is back at four fifths. Between them nothing is decided."""

REST_MOST_SECONDS: Final = 1800.0
"""An engine that holds half of what it did for this long while awake holds what it needs now."""


JUDGED_LEVEL: Final = 1
"""Evidence is judged whenever a block of this level ends, every two minutes: judging costs more than all the rest."""


def observe(track: Track, seen: Observation) -> Track:
    """Return the track with one more reading; takes some microseconds, and a millisecond when a long block ends."""
    if restarted(track.work, seen):
        life = track.work.life if seen.life is None else seen.life
        return observe(Track(clock=seen.seconds), replace(seen, life=life))
    elapsed = max(0.0, seen.seconds - track.clock)
    now = track.seconds + elapsed
    track = replace(
        track, clock=seen.seconds, seconds=now, work=worked(track.work, seen, elapsed, now), asleep=seen.awake is False
    )
    if seen.held_bytes is None:
        return track
    if seen.neighbours is not None and seen.neighbours != track.neighbours:
        track = replace(track, neighbours=seen.neighbours, anchor_seconds=None)
    track = _rest(track, seen.held_bytes)
    return track if track.resting_since is not None else _gather(track, float(seen.held_bytes), seen.room_bytes)


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
        busy_seconds=0.0,
        top_bytes=0.0,
        resting_since=None,
        levels=(Level(),) * len(THRESHOLDS),
        history=(),
        rises=(),
        grown_bytes=0.0,
        verdict=Verdict.NONE,
        estimate=None,
    )


def _rest(track: Track, held_bytes: int) -> Track:
    """Return the track resting while the engine sleeps or has let go of its memory, anchored anew when it is back."""
    if track.resting_since is None:
        if track.anchor_seconds is None:
            track = _anchored(track)
        if track.asleep or held_bytes < REST_SHARE * track.top_bytes:
            return replace(track, resting_since=track.seconds, verdict=Verdict.NONE, estimate=None)
        return track
    rested = track.seconds - track.resting_since
    if not track.asleep and (held_bytes >= WAKE_SHARE * track.top_bytes or rested >= REST_MOST_SECONDS):
        return _anchored(track)
    return track


def _gather(track: Track, held_bytes: float, room_bytes: int | None) -> Track:
    if held_bytes > track.top_bytes:
        track = replace(track, top_bytes=held_bytes)
    block = track.levels[0].block
    if block is not None and track.seconds - block.seconds >= BLOCK_SECONDS:
        track = close(track, 0)
        if track.anchor_seconds is None:
            return _gather(_anchored(track), held_bytes, room_bytes)
        if track.levels[JUDGED_LEVEL].block is None:
            track = _judged(track, room_bytes)
        block = None
    now = (track.seconds, track.work.requests)
    if block is None:
        opened = Block(*now, held_bytes, held_bytes, 0)
    elif block.floor_bytes <= held_bytes <= block.ceiling_bytes:
        return track
    else:
        opened = replace(
            block,
            floor_bytes=min(block.floor_bytes, held_bytes),
            ceiling_bytes=max(block.ceiling_bytes, held_bytes),
        )
    return with_level(track, 0, replace(track.levels[0], block=opened))


def _judged(track: Track, room_bytes: int | None) -> Track:
    """Return the track with the verdict of the surest level and its estimate."""
    levels, best = [], None
    steady = steadiness(track.history, here(track))
    for level, threshold in zip(track.levels, THRESHOLDS, strict=True):
        grown = growth(level.points) if level.score >= threshold else None
        judged = Verdict.NONE if grown is None else judge(grown, steady, room_bytes)
        level = settle(level, judged, threshold)  # noqa: PLW2901 - the same level, settled
        levels.append(level)
        if level.verdict and grown is not None and (best is None or level.verdict >= best[0].verdict):
            best = (level, grown)
    verdict = max(level.verdict for level in levels)
    track = replace(track, levels=tuple(levels), verdict=verdict)
    if verdict is Verdict.NONE:
        return replace(track, estimate=None)
    return track if best is None else _estimated(track, best[1], room_bytes)


def _estimated(track: Track, grown: Growth, room_bytes: int | None) -> Track:
    began = min(
        (level.began for level in track.levels if level.verdict and level.began), key=lambda point: point.seconds
    )
    return replace(track, estimate=estimate(grown, began, track.work, track.seconds, room_bytes))
