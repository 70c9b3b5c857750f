"""One series of memory readings, followed through runs, rests and blocks."""

from math import exp
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import (
    MIB,
    RISE_BYTES,
    Observation,
    Point,
    Ring,
    Step,
    Track,
    Work,
    count_folds,
)
from vllm_headroom.derive.leak.growth import RECORDS, USELESS_CHANCE
from vllm_headroom.derive.leak.judge import judge_track
from vllm_headroom.derive.readings import is_new_run

BLOCK_SECONDS: Final = 30.0
PARTS: Final = (1, 4, 8)
"""How many blocks of the ring below make one: 30 s, 2 and 16 minutes."""

RING_POINTS: Final = 62
"""Half an hour, two hours and 16 hours."""

DOUBTED_SECONDS: Final = 86_400.0
"""A time this far ahead, or an earlier one, is trusted once a second reading confirms it."""

REST_SHARE, WAKE_SHARE = 0.5, 0.8
"""Half of the memory gone is a sleep, until four fifths are back. Twice as much after it is a backup of the weights."""

REST_MOST_SECONDS: Final = 1800.0
"""An engine that serves for this long needs no more than it holds, or gives nothing back."""

CROWDED_MOST_SECONDS: Final = 3600.0
"""A neighbour that stays longer belongs to the device; one that leaves earlier changes nothing."""

LEAP: Final = 2.0
"""Load so many times as high as before creates new demands. Steady load exceeds its first minutes by a half at most."""

LEAST_STEP_BYTES, NEWEST_STEPS = 24 * MIB, 32
"""More than a segment for small tensors, 20 MiB (c10 kLargeBuffer)."""

AVERAGE_SECONDS, RESET_SECONDS = 300.0, 600.0
"""A rate's average; a counter that stays lower for ten minutes was reset, and continues from there."""


def observe(track: Track, seen: Observation) -> Track:
    """Return the track with one more reading; takes microseconds, and a millisecond when growth is judged."""
    doubted = None if track.doubted_clock is None else seen.seconds - track.doubted_clock
    is_confirmed = doubted is not None and 0 <= doubted < DOUBTED_SECONDS
    if not is_confirmed and not 0 <= seen.seconds - track.clock < DOUBTED_SECONDS:
        return replace(track, doubted_clock=seen.seconds)
    work, elapsed = track.work, max(0.0, seen.seconds - track.clock)
    another = is_new_run(work.run_id, seen.run_id, work.finished_total, seen.finished_total)
    if another or elapsed >= DOUBTED_SECONDS:
        return observe(Track(clock=seen.seconds), replace(seen, run_id=seen.run_id or work.run_id))
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
    track = _update_rest(track, seen.held_bytes, elapsed, idle=seen.running == 0)
    return (
        track
        if track.rested is not None
        else _gather(track, float(seen.held_bytes), seen.room_bytes)
    )


def add_work(work: Work, seen: Observation, elapsed: float, now: float) -> Work:
    """Return the work done by `now`.

    While the counter cannot be read, or belongs to another server, requests continue at the last known rate: treated as
    idle time, a gap would turn its growth into growth without work.
    """
    run_id = work.run_id or seen.run_id
    highest, total = work.finished_total, seen.finished_total
    lower = highest is not None and total is not None and total < highest
    since = (now if work.below_since is None else work.below_since) if lower else None
    requests, rate, base = work.requests, work.rate, work.base_requests
    if total is None or (since is not None and now < since + RESET_SECONDS):
        return replace(work, requests=requests + rate * elapsed, run_id=run_id, below_since=since)
    if highest is not None and not lower:
        requests = max(requests, base + total - highest)
    if elapsed > 0:
        rate += (1 - exp(-elapsed / min(now, AVERAGE_SECONDS))) * (
            (requests - work.requests) / elapsed - rate
        )
    return Work(
        requests=requests, rate=rate, finished_total=total, base_requests=requests, run_id=run_id
    )


def is_warming_up(track: Track) -> bool:
    """Return whether so little work was done since the anchor that the next block can be no evidence."""
    if track.anchor is None:
        return True
    now = Point(track.seconds, track.work.requests)
    soon = Point(now.seconds + BLOCK_SECONDS, now.requests + BLOCK_SECONDS * track.work.rate)
    return RECORDS * count_folds(track.anchor, now, soon) >= USELESS_CHANCE


def anchor_track(track: Track) -> Track:
    """Return the track at the start of a new stretch of comparable readings."""
    return Track(
        clock=track.clock,
        seconds=track.seconds,
        work=track.work,
        load=track.load,
        asleep=track.asleep,
        neighbours=track.neighbours,
        risen_seconds=track.risen_seconds,
        anchor=Point(track.seconds, track.work.requests),
        rings=(Ring(),) * len(PARTS),
    )


def _update_neighbours(track: Track, neighbours: int | None) -> Track:
    """Return the track, paused without its open block while another process is on the device; restarted if it stays."""
    if not neighbours or neighbours == track.neighbours:
        return track if track.crowded_since is None else replace(track, crowded_since=None)
    if track.neighbours is None:
        return replace(track, neighbours=neighbours)
    since = track.seconds if track.crowded_since is None else track.crowded_since
    if neighbours > track.neighbours and track.seconds - since < CROWDED_MOST_SECONDS:
        return replace(track, crowded_since=since, block=None, held_bytes=None)
    return replace(track, neighbours=neighbours, anchor=None, crowded_since=None)


def _update_rest(track: Track, held_bytes: int, elapsed: float, *, idle: bool) -> Track:
    """Return the track, resting while the engine sleeps, has released its memory, or may release a backup of weights.

    Its evidence is kept: the same process continues with what it did not give back.
    """
    if track.anchor is None:
        track = anchor_track(track)
    rested, top_bytes = track.rested, track.top_bytes
    is_back = held_bytes >= (REST_SHARE if rested is None else WAKE_SHARE) * top_bytes
    asleep = track.asleep or (rested is not None and 0 < top_bytes < REST_SHARE * held_bytes)
    if is_back and not asleep:
        return track if rested is None else replace(track, rested=None)
    rested = (
        0.0
        if rested is None or track.asleep
        else rested + (0.0 if idle and not asleep else elapsed)
    )
    if not track.asleep and rested >= REST_MOST_SECONDS:
        return anchor_track(track)
    return replace(track, rested=rested, asleep=asleep, block=None, held_bytes=None, estimate=None)


def _gather(track: Track, held_bytes: float, room_bytes: int | None) -> Track:
    if held_bytes != track.held_bytes:
        rise, steps = held_bytes - (track.held_bytes or held_bytes), track.steps
        if rise >= LEAST_STEP_BYTES:
            steps = (*steps, Step(track.seconds, rise, held_bytes))[-NEWEST_STEPS:]
        elif rise <= 0:  # it is 0 after a pause, in which some may have been given back
            cut = [(step, max(0.0, step.top_bytes - held_bytes)) for step in steps]
            left = [
                Step(step.seconds, step.size_bytes - less, step.top_bytes - less)
                for step, less in cut
            ]
            steps = tuple([step for step in left if step.size_bytes >= LEAST_STEP_BYTES])
        track = replace(
            track, held_bytes=held_bytes, steps=steps, top_bytes=max(track.top_bytes, held_bytes)
        )
    block = track.block
    if block is not None and track.seconds - block.seconds >= BLOCK_SECONDS:
        track = judge_track(_close_block(track, block), room_bytes)
        block = None
    if block is not None and held_bytes >= block.floor_bytes:
        return track
    new = Point(track.seconds, track.work.requests) if block is None else block
    return replace(track, block=replace(new, floor_bytes=held_bytes))


def _close_block(track: Track, block: Point) -> Track:
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
    rings, floor_bytes = list(track.rings), block.floor_bytes
    for number, ring in enumerate(track.rings):
        floor_bytes = min(floor_bytes, ring.floor_bytes) if ring.parts else floor_bytes
        if ring.parts + 1 < PARTS[number]:
            rings[number] = replace(ring, parts=ring.parts + 1, floor_bytes=floor_bytes)
            break
        points, highest_bytes = (
            (*ring.points, replace(now, floor_bytes=floor_bytes)),
            ring.highest_bytes,
        )
        if len(points) > RING_POINTS:
            points, highest_bytes = points[1:], max(highest_bytes, points[0].floor_bytes)
        rings[number] = Ring(points=points, highest_bytes=highest_bytes, verdict=ring.verdict)
    first = track.first
    leaps = first is None or (track.load > LEAP * first.load and track.incident is None)
    assert track.anchor is not None  # noqa: S101 - blocks are gathered after it is set
    anchor = (
        track.anchor if first is not None else replace(track.anchor, floor_bytes=now.floor_bytes)
    )
    return replace(
        track,
        anchor=anchor,
        rings=tuple(rings),
        busy_seconds=busy_seconds,
        first=now if leaps else first,
    )
