"""Blocks of readings that end: evidence for their level, a part of the next one's block, a step in the history."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Final

from vllm_headroom.derive.leak.evidence import BLOCK_SECONDS, PARTS, RISE_BYTES, THRESHOLDS, chance, weigh
from vllm_headroom.derive.leak.facts import MIB, Block, Level, Point, Track, Verdict
from vllm_headroom.derive.leak.shape import CLIP

HISTORY_STEP: Final = 1.08
HISTORY_POINTS: Final = 200
NEWEST_RISES: Final = 31
FEW_RISES: Final = 3
LEAP: Final = 2.0
"""Load that is so many times as high as ever before makes demands of its own. Level load exceeds its first minutes by a
half at times."""

GIVEN_BACK_BYTES: Final = 8 * MIB
GIVEN_BACK_SECONDS: Final = 3 * 3600.0
GIVEN_BACK_LEVEL: Final = 2
"""Memory that stays this far below its highest floor for this long was given back: the comparison begins anew, once
there is no verdict that this would end."""


def with_level(track: Track, index: int, level: Level) -> Track:
    """Return the track with another level in one place."""
    return replace(track, levels=(*track.levels[:index], level, *track.levels[index + 1 :]))


def lowered(level: Level, drop: float) -> Level:
    """Return the level as if so much less had been held until now."""
    reference, began, block = level.reference_bytes, level.began, level.block
    return replace(
        level,
        reference_bytes=None if reference is None else reference - drop,
        points=tuple(replace(point, floor_bytes=point.floor_bytes - drop) for point in level.points),
        began=None if began is None else replace(began, floor_bytes=began.floor_bytes - drop),
        block=None
        if block is None
        else replace(block, floor_bytes=block.floor_bytes - drop, ceiling_bytes=block.ceiling_bytes - drop),
    )


def founded(track: Track, block: Block) -> Track:
    """Return the track with the block that work is counted from: the first one, or a later one in which load doubled.

    Demands are alike only at a load of a height: at twice the most that ever was, their records begin anew.
    """
    if track.first is not None and track.most_load <= LEAP * track.first_load:
        return track
    first = Point(track.seconds, track.work.requests, track.busy_seconds, block.floor_bytes)
    return replace(track, first=first, first_load=track.most_load)


def close(track: Track, index: int) -> Track:
    """End the block of a level: weigh it, and make it a part of the next level's block.

    The anchor is None afterwards when memory was given back for good.
    """
    level = track.levels[index]
    block = level.block
    if block is None:
        return track
    if index == 0:
        track = _remember(track, level, block)
    point = Point(track.seconds, track.work.requests, track.busy_seconds, block.floor_bytes)
    level = replace(level, block=None)
    if level.reference_bytes is None:
        level = replace(level, reference_bytes=block.floor_bytes, points=(point,))
    elif _tells(track, level.reference_bytes, block, point):
        level = weigh(level, point, _chance(track, block), THRESHOLDS[index])
        if index == GIVEN_BACK_LEVEL:
            level = _given_back(level, block, track.seconds)
            below = 0.0 if level.below_since is None else track.seconds - level.below_since
            if below >= GIVEN_BACK_SECONDS and track.verdict is Verdict.NONE:
                return replace(track, anchor_seconds=None)
    track = with_level(track, index, level)
    return _part(track, index + 1, block) if index + 1 < len(track.levels) else track


def _tells(track: Track, reference_bytes: float, block: Block, point: Point) -> bool:
    """Return whether a block counts: an idle one in which nothing rose is no evidence against a leak by requests."""
    uncounted = track.work.finished_total is None
    return uncounted or point.requests > block.requests or point.floor_bytes >= reference_bytes + RISE_BYTES


def _chance(track: Track, block: Block) -> float:
    assert track.first is not None  # noqa: S101 - it is set before the first block is weighed
    seconds, requests = track.first.seconds - BLOCK_SECONDS, track.first.requests
    opened = (max(0.0, block.seconds - seconds), max(0.0, block.requests - requests))
    return chance(opened, (track.seconds - seconds, track.work.requests - requests))


def _given_back(level: Level, block: Block, now: float) -> Level:
    if level.reference_bytes is None or block.ceiling_bytes >= level.reference_bytes - GIVEN_BACK_BYTES:
        return replace(level, below_since=None)
    return level if level.below_since is not None else replace(level, below_since=block.seconds)


def _part(track: Track, index: int, block: Block) -> Track:
    level = track.levels[index]
    whole = level.block or replace(block, parts=0)
    whole = replace(
        whole,
        floor_bytes=min(whole.floor_bytes, block.floor_bytes),
        ceiling_bytes=max(whole.ceiling_bytes, block.ceiling_bytes),
        parts=whole.parts + 1,
    )
    track = with_level(track, index, replace(level, block=whole))
    return close(track, index) if whole.parts == PARTS[index] else track


def _remember(track: Track, level: Level, block: Block) -> Track:
    """Add a shortest block to busy time, to the clipped growth and, now and then, to the history."""
    rise = 0.0 if level.reference_bytes is None else max(0.0, block.floor_bytes - level.reference_bytes)
    if rise >= RISE_BYTES:
        rises = (*track.rises, rise)[-NEWEST_RISES:]
        most = CLIP * median(rises) if len(rises) >= FEW_RISES else rise
        track = replace(track, rises=rises, grown_bytes=track.grown_bytes + min(rise, most))
    if track.work.requests <= block.requests and rise < RISE_BYTES:
        return track
    track = replace(track, busy_seconds=track.busy_seconds + track.seconds - block.seconds)
    now = here(track)
    last = track.history[-1] if track.history else (0.0, 0.0, 0.0)
    if now[0] >= HISTORY_STEP * last[0] or now[1] >= HISTORY_STEP * last[1]:
        track = replace(track, history=(*track.history, now)[-HISTORY_POINTS:])
    return track


def here(track: Track) -> tuple[float, float, float]:
    """Return (requests, busy seconds, grown bytes) since the anchor."""
    return track.work.requests - track.anchor_requests, track.busy_seconds, track.grown_bytes
