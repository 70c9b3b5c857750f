"""One series of memory readings, followed through runs, rests and blocks."""

from math import exp
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import (
    BLOCK_SECONDS,
    MIB,
    PARTS,
    RING_POINTS,
    RISE_BYTES,
    Block,
    Observation,
    Point,
    Ring,
    Track,
    Work,
    count_folds,
)
from vllm_headroom.derive.leak.growth import USELESS_CHANCE, compute_chance
from vllm_headroom.derive.leak.judge import judge_track
from vllm_headroom.derive.leak.steps import add_step
from vllm_headroom.derive.readings import is_new_run

DOUBTED_SECONDS: Final = 86_400.0
"""A time this far ahead, or an earlier one, is trusted once a second reading confirms it."""

REST_SHARE: Final = 0.5
WAKE_SHARE: Final = 0.8
"""Half of the memory gone is a sleep or a stop; it is back at four fifths. Between them nothing is decided."""

REST_MOST_SECONDS: Final = 1800.0
"""An engine awake that holds half of its earlier memory for this long needs no more."""

CROWDED_MOST_SECONDS: Final = 3600.0
"""A neighbour that stays longer belongs to the device; one that leaves earlier changes nothing."""

LEAP: Final = 2.0
"""Load this many times as high as ever before creates new demands. Steady load exceeds its first minutes by up to a
half."""

GIVEN_BACK_BYTES: Final = 8 * MIB
GIVEN_BACK_POINTS: Final = 11
"""Memory that stays this far below its highest floor for so many blocks of 16 minutes was given back."""

AVERAGE_SECONDS: Final = 300.0
RESET_SECONDS: Final = 600.0
"""A counter that stays lower for this long was reset, and continues from there."""


def observe(track: Track, seen: Observation) -> Track:
    """Return the track with one more reading; takes microseconds, and a millisecond when growth is judged."""
    doubted = None if track.doubted_clock is None else seen.seconds - track.doubted_clock
    is_confirmed = doubted is not None and 0 <= doubted < DOUBTED_SECONDS
    if not is_confirmed and not 0 <= seen.seconds - track.clock < DOUBTED_SECONDS:
        return replace(track, doubted_clock=seen.seconds)
    work = track.work
    another = is_new_run(work.life, seen.life, work.finished_total, seen.finished_total)
    if another or seen.seconds - track.clock >= DOUBTED_SECONDS:
        life = work.life if seen.life is None else seen.life
        return observe(Track(clock=seen.seconds), replace(seen, life=life))
    elapsed = max(0.0, seen.seconds - track.clock)
    now = track.seconds + elapsed
    track = replace(
        track,
        clock=seen.seconds,
        doubted_clock=None,
        seconds=now,
        work=add_work(work, seen, elapsed, now),
        load=max(track.load, seen.running or 0.0),
        asleep=seen.awake is False,
        bound_bytes=seen.bound_bytes,
    )
    if seen.held_bytes is None:
        return track
    track = _update_neighbours(track, seen.neighbours)
    if track.crowded_since is not None:
        return track
    track = _update_rest(track, seen.held_bytes)
    return track if track.resting_since is not None else _gather(track, float(seen.held_bytes), seen.room_bytes)


def add_work(work: Work, seen: Observation, elapsed: float, now: float) -> Work:
    """Return the work done by `now`.

    While the counter cannot be read, or belongs to another server, requests continue at the last known rate: treated as
    idle time, a gap would turn its growth into growth without work.
    """
    life = work.life or seen.life
    highest, total = work.finished_total, seen.finished_total
    lower = highest is not None and total is not None and total < highest
    since = (now if work.below_since is None else work.below_since) if lower else None
    requests, rate, base = work.requests, work.rate, work.base_requests
    if total is None or (since is not None and now < since + RESET_SECONDS):
        return replace(work, requests=requests + rate * elapsed, life=life, below_since=since)
    if highest is not None and not lower:
        requests = max(requests, base + total - highest)
    if elapsed > 0:
        rate += (1 - exp(-elapsed / AVERAGE_SECONDS)) * ((requests - work.requests) / elapsed - rate)
    return Work(requests=requests, rate=rate, finished_total=total, base_requests=requests, life=life)


def is_warming_up(track: Track) -> bool:
    """Return whether so little work was done since the anchor that the next block can be no evidence."""
    if track.anchor is None:
        return True
    now = Point(track.seconds, track.work.requests)
    soon = Point(now.seconds + BLOCK_SECONDS, now.requests + BLOCK_SECONDS * track.work.rate)
    return compute_chance(count_folds(track.anchor, now, soon), BLOCK_SECONDS) >= USELESS_CHANCE


def anchor_track(track: Track) -> Track:
    """Return the track at the start of a new stretch of comparable readings."""
    return Track(
        clock=track.clock,
        seconds=track.seconds,
        work=track.work,
        load=track.load,
        asleep=track.asleep,
        neighbours=track.neighbours,
        anchor=Point(track.seconds, track.work.requests),
        rings=(Ring(),) * len(PARTS),
    )


def _update_neighbours(track: Track, neighbours: int | None) -> Track:
    """Return the track, paused while another process is on the device, and restarted if it stays."""
    if not neighbours or neighbours == track.neighbours:
        return track if track.crowded_since is None else replace(track, crowded_since=None)
    if track.neighbours is None or neighbours < track.neighbours:
        anchor = track.anchor if track.neighbours is None else None
        return replace(track, neighbours=neighbours, anchor=anchor, crowded_since=None)
    if track.crowded_since is None:
        return _pause(replace(track, crowded_since=track.seconds))
    if track.seconds - track.crowded_since < CROWDED_MOST_SECONDS:
        return track
    return replace(track, neighbours=neighbours, anchor=None, crowded_since=None)


def _pause(track: Track) -> Track:
    """Return the track without its open block, so that a pause never falls within a block."""
    return replace(track, block=None, held_bytes=None)


def _update_rest(track: Track, held_bytes: int) -> Track:
    """Return the track, resting while the engine sleeps or has released its memory.

    Its evidence is kept: the same process continues with what it did not give back.
    """
    if track.anchor is None:
        track = anchor_track(track)
    if track.resting_since is None:
        if track.asleep or held_bytes < REST_SHARE * track.top_bytes:
            return _pause(replace(track, resting_since=track.seconds))
        return track
    if track.asleep:
        return track
    if held_bytes >= WAKE_SHARE * track.top_bytes:
        return replace(track, resting_since=None)
    return anchor_track(track) if track.seconds - track.resting_since >= REST_MOST_SECONDS else track


def _gather(track: Track, held_bytes: float, room_bytes: int | None) -> Track:
    if held_bytes != track.held_bytes:
        before_bytes = held_bytes if track.held_bytes is None else track.held_bytes
        steps = add_step(track.steps, track.seconds, before_bytes, held_bytes)
        track = replace(track, held_bytes=held_bytes, steps=steps, top_bytes=max(track.top_bytes, held_bytes))
    block = track.block
    if block is not None and track.seconds - block.seconds >= BLOCK_SECONDS:
        track = judge_track(_close_block(track, block), room_bytes)
        track = anchor_track(track) if _is_given_back(track) else track
        block = None
    if block is None:
        block = Block(track.seconds, track.work.requests, held_bytes, 0)
    elif held_bytes < block.floor_bytes:
        block = replace(block, floor_bytes=held_bytes)
    else:
        return track
    return replace(track, block=block)


def _is_given_back(track: Track) -> bool:
    """Return whether memory has stayed lower for long: then the comparison starts over, unless a verdict stands."""
    newest, points = track.rings[0], track.rings[-1].points[-GIVEN_BACK_POINTS:]
    if track.verdict or len(points) < GIVEN_BACK_POINTS or points[-1].seconds != track.seconds:
        return False
    return max(point.floor_bytes for point in (*points, *newest.points)) < newest.highest_bytes - GIVEN_BACK_BYTES


def _close_block(track: Track, block: Block) -> Track:
    """End the shortest block and add it to the next ring's block, which may end too.

    An idle block without a rise is left out: it is no evidence against a leak by requests. Demands are comparable only
    at similar load: when load has doubled, work is counted from here, but not during an alarm.
    """
    newest = track.rings[0].points[-1] if track.rings[0].points else None
    idle = track.work.finished_total is not None and track.work.requests <= block.requests
    if idle and newest is not None and block.floor_bytes < newest.floor_bytes + RISE_BYTES:
        return replace(track, block=None)
    busy_seconds = track.busy_seconds + track.seconds - block.seconds
    now = Point(track.seconds, track.work.requests, busy_seconds, block.floor_bytes, track.load)
    rings = list(track.rings)
    for number, ring in enumerate(track.rings):
        if number:
            whole = ring.block or replace(block, parts=0)
            block = replace(whole, floor_bytes=min(whole.floor_bytes, block.floor_bytes), parts=whole.parts + 1)
            if block.parts < PARTS[number]:
                rings[number] = replace(ring, block=block)
                break
        points, highest_bytes = (*ring.points, replace(now, floor_bytes=block.floor_bytes)), ring.highest_bytes
        if len(points) > RING_POINTS:
            points, highest_bytes = points[1:], max(highest_bytes, points[0].floor_bytes)
        rings[number] = Ring(points=points, highest_bytes=highest_bytes, verdict=ring.verdict)
    leaps = track.first is None or (track.load > LEAP * track.first_load and track.incident is None)
    assert track.anchor is not None  # noqa: S101 - blocks are gathered after it is set
    anchor = track.anchor if track.first is not None else replace(track.anchor, floor_bytes=now.floor_bytes)
    return replace(
        track,
        anchor=anchor,
        rings=tuple(rings),
        busy_seconds=busy_seconds,
        first=now if leaps else track.first,
        first_load=track.load if leaps else track.first_load,
    )
