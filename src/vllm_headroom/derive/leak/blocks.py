"""The end of a block of readings: evidence for its level, a part of the next level's block, a history entry."""

from __future__ import annotations

from statistics import median
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import (
    BLOCK_SECONDS,
    MIB,
    PARTS,
    RISE_BYTES,
    THRESHOLDS,
    Block,
    BlockLevel,
    Certainty,
    Peaks,
    Point,
    Track,
    compute_chance,
    weigh,
)
from vllm_headroom.derive.leak.shape import CLIP

HISTORY_STEP: Final = 1.08
HISTORY_POINTS: Final = 200
NEWEST_RISES: Final = 31
FEW_RISES: Final = 3
LEAP: Final = 2.0
"""Load this many times as high as ever before creates new demands. Steady load exceeds its first minutes by up to a
half."""

ALIKE_LOAD, APART = 0.85, 1.01
"""Load below this share of the peak is no precedent for the present; and the least ratio between remembered peaks,
except the newest."""

GIVEN_BACK_BYTES: Final = 8 * MIB
GIVEN_BACK_SECONDS: Final = 3 * 3600.0
GIVEN_BACK_LEVEL: Final = 2
"""Memory that stays this far below its highest floor for this long was given back: the comparison starts over, once
no verdict would end by that."""


def lower_level(level: BlockLevel, drop: float) -> BlockLevel:
    """Return the level as if this much less had been held until now."""
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


def add_peak(peaks: Peaks, running: float | None, now: float) -> Peaks:
    """Return the peaks of load with one more reading."""
    if not running or (peaks and running <= peaks[-1][1]):
        return peaks
    apart = peaks[:-1] if len(peaks) > 1 and running < APART * peaks[-2][1] else peaks
    return (*(peak for peak in apart if peak[1] >= ALIKE_LOAD * running), (now, running))


def choose_first_block(track: Track, block: Block) -> Track:
    """Return the track with the block from which work is counted: the first, or a later one in which load doubled.

    Demands are comparable only at similar load: at twice the previous peak their records start over. During an alarm
    only its end matters.
    """
    most = track.peaks[-1][1] if track.peaks else 0.0
    alike = most <= LEAP * track.first_load or track.projected is Certainty.LEAKING
    if track.first is not None and alike:
        return track
    first = Point(track.seconds, track.work.requests, track.busy_seconds, block.floor_bytes)
    begun_bytes = block.floor_bytes if track.first is None else track.begun_bytes
    return replace(track, first=first, first_load=most, begun_bytes=begun_bytes)


def close_block(track: Track, block: Block) -> Track | None:
    """End the shortest block: weigh it and add it to the next level's block, which may end too.

    None when memory was given back for good.
    """
    track, levels = _remember(track, block), list(track.levels)
    for index, level in enumerate(track.levels):
        if index:
            block = _join_block(level.block, block)
            if block.parts < PARTS[index]:
                levels[index] = replace(level, block=block)
                break
        ended = _end_block(track, index, block)
        if ended is None:
            return None
        levels[index] = ended
    return replace(track, levels=tuple(levels))


def _join_block(whole: Block | None, part: Block) -> Block:
    first = whole or replace(part, parts=0)
    return Block(
        first.seconds,
        first.requests,
        min(first.floor_bytes, part.floor_bytes),
        max(first.ceiling_bytes, part.ceiling_bytes),
        first.parts + 1,
    )


def _end_block(track: Track, index: int, block: Block) -> BlockLevel | None:
    """Return a level with the evidence of its block; None when memory was given back for good."""
    level = track.levels[index]
    point = Point(track.seconds, track.work.requests, track.busy_seconds, block.floor_bytes)
    if level.reference_bytes is None:
        return replace(level, block=None, reference_bytes=block.floor_bytes, points=(point,))
    if not _is_evidence(track, level.reference_bytes, block, point):
        return replace(level, block=None)
    level = weigh(level, point, _compute_chance(track, block), THRESHOLDS[index])
    if index != GIVEN_BACK_LEVEL:
        return level
    level = _check_given_back(level, block)
    below = 0.0 if level.below_since is None else track.seconds - level.below_since
    return None if below >= GIVEN_BACK_SECONDS and track.verdict is Certainty.NONE else level


def _is_evidence(track: Track, reference_bytes: float, block: Block, point: Point) -> bool:
    """Return whether a block counts: an idle one without a rise is no evidence against a leak by requests."""
    uncounted = track.work.finished_total is None
    return uncounted or point.requests > block.requests or point.floor_bytes >= reference_bytes + RISE_BYTES


def _compute_chance(track: Track, block: Block) -> float:
    """Return the chance that a healthy engine's floor rises with a block.

    A new peak of load in the block before explains a rise: what rises in a block shows in the next one's floor.
    """
    assert track.first is not None  # noqa: S101 - it is set before the first block is weighed
    if any(2 * block.seconds - track.seconds <= peak <= block.seconds for peak, _ in track.peaks):
        return 1.0
    seconds, requests = track.first.seconds - BLOCK_SECONDS, track.first.requests
    opened = (max(0.0, block.seconds - seconds), max(0.0, block.requests - requests))
    return compute_chance(opened, (track.seconds - seconds, track.work.requests - requests))


def _check_given_back(level: BlockLevel, block: Block) -> BlockLevel:
    if level.reference_bytes is None or block.ceiling_bytes >= level.reference_bytes - GIVEN_BACK_BYTES:
        return replace(level, below_since=None)
    return level if level.below_since is not None else replace(level, below_since=block.seconds)


def _remember(track: Track, block: Block) -> Track:
    """Add a shortest block to busy time, to the clipped growth and, at intervals, to the history."""
    reference = track.levels[0].reference_bytes
    rise = 0.0 if reference is None else max(0.0, block.floor_bytes - reference)
    if track.work.requests <= block.requests and rise < RISE_BYTES:
        return track
    rises, history = track.rises, track.history
    if rise >= RISE_BYTES:
        rises = (*rises, rise)[-NEWEST_RISES:]
    grown_bytes = track.grown_bytes + (min(rise, CLIP * median(rises)) if len(rises) >= FEW_RISES else rise)
    busy_seconds = track.busy_seconds + track.seconds - block.seconds
    requests = track.work.requests - track.anchor_requests
    last = history[-1] if history else (0.0, 0.0, 0.0)
    if requests >= HISTORY_STEP * last[0] or busy_seconds >= HISTORY_STEP * last[1]:
        history = (*history, (requests, busy_seconds, grown_bytes))[-HISTORY_POINTS:]
    return replace(track, rises=rises, grown_bytes=grown_bytes, busy_seconds=busy_seconds, history=history)


def measure_progress(track: Track) -> tuple[float, float, float]:
    """Return (requests, busy seconds, grown bytes) since the anchor."""
    return track.work.requests - track.anchor_requests, track.busy_seconds, track.grown_bytes
