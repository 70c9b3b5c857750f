"""A series of memory readings, followed through runs, rests and blocks."""

from math import exp
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import (
    RISE_BYTES,
    Block,
    FinishedWork,
    MemoryStep,
    Observation,
    Occupancy,
    Ring,
    Track,
    TrackClock,
    TrackHistory,
    start_track,
)
from vllm_headroom.derive.leak.growth_evidence import RISE_SOURCES, USELESS_CHANCE, count_folds
from vllm_headroom.derive.leak.judge import judge_track
from vllm_headroom.derive.leak.precedent import end_run
from vllm_headroom.derive.run_identity import is_new_run
from vllm_headroom.units import DAY_SECONDS, HOUR_SECONDS, MIB

BLOCK_SECONDS: Final = 30.0
"""Our choice: the length of the shortest blocks."""

RING_PARTS: Final = (1, 4, 8)
"""For each ring, how many of the previous ring's blocks make one block. The blocks of the three
rings last 30 s, 2 minutes and 16 minutes.
"""

RING_BLOCKS: Final = 62
"""The number of blocks that a ring keeps. In the three rings, they cover half an hour, two hours
and 16 hours.
"""

DOUBTED_SECONDS: Final = DAY_SECONDS
"""A snapshot's time is not trusted if it is before the previous snapshot's, or this much later. A
second reading must confirm a doubted time.
"""

REST_SHARE: Final = 0.5
"""The engine rests while it holds less than this share of its usual memory. An example is sleep.
While the engine rests, it may hold a backup of its weights. More than twice the earlier peak of
memory indicates such a backup.
"""

WAKE_SHARE: Final = 0.8
"""A rest ends when this share of the usual memory is held again."""

LONGEST_REST_SECONDS: Final = 1800.0
"""After this long awake and working, a rest ends in any case. Either the engine needs no more
memory, or it will not release its backup. After the rest, a new stretch of comparable readings
begins.
"""

LONGEST_CROWDED_SECONDS: Final = HOUR_SECONDS
"""An additional process that stays for longer than this is considered usual. When the process
becomes usual, a new stretch begins. If it exits earlier, nothing changes.
"""

LOAD_LEAP: Final = 2.0
"""Load of this many times its earlier maximum creates new demands. Steady load exceeds the load in
its first minutes by at most half.
"""

LEAST_STEP_BYTES: Final = 24 * MIB
"""The minimum size of a step. The minimum is larger than torch's segment of 20 MiB for tensors of 1
to 10 MiB (c10 kLargeBuffer).
"""

NEWEST_STEPS: Final = 32
"""Our choice: the number of steps that are kept. The number limits the size of the state."""

AVERAGE_SECONDS: Final = 300.0
"""Our choice: the time constant of the average request rate."""

RESET_SECONDS: Final = 600.0
"""If a counter stays lower for this long, it was reset. After the reset, requests are counted from
the lower value.
"""


def observe(track: Track, observation: Observation) -> Track:
    """Return the track with one more reading.

    If the reading ends a block, the growth is judged. The track starts over when another run of the
    engine begins. The track also starts over after a gap of a day between readings. If a reading's
    memory is unknown, only the clock and the work are updated. A call takes microseconds, or a
    millisecond if growth is judged.
    """
    clock = track.clock
    elapsed_seconds = observation.seconds - clock.snapshot_seconds
    is_near = 0 <= elapsed_seconds < DOUBTED_SECONDS
    if not is_near and not _confirms_doubted_time(clock, observation.seconds):
        # A single wrong clock reading must not erase the history. A wrong clock reading occurs
        # after a VM was suspended.
        return replace(track, clock=replace(clock, doubted_seconds=observation.seconds))
    elapsed_seconds = max(0.0, elapsed_seconds)

    work = track.work
    # Earlier readings are not comparable after a gap of a day, or in another run.
    is_another_run = is_new_run(
        work.run_id, observation.run_id, work.counter_total, observation.finished_total
    )
    if is_another_run or elapsed_seconds >= DOUBTED_SECONDS:
        run_id = observation.run_id or work.run_id
        next_track = replace(start_track(observation.seconds), precedent=end_run(track))
        # This recurses only once, because an empty track has no earlier run to differ from.
        return observe(next_track, replace(observation, run_id=run_id))

    now_seconds = clock.now_seconds + elapsed_seconds
    presence = track.presence
    is_asleep = observation.awake is False
    if presence.is_asleep != is_asleep:
        presence = replace(presence, is_asleep=is_asleep)
    track = replace(
        track,
        clock=TrackClock(snapshot_seconds=observation.seconds, now_seconds=now_seconds),
        work=add_work(work, observation, elapsed_seconds, now_seconds),
        presence=presence,
        bound_bytes=observation.bound_bytes,
    )
    if observation.held_bytes is None:
        return track  # Unknown memory does not change the verdict.
    track = _update_neighbours(track, observation.neighbours)
    if track.presence.crowded_since_seconds is not None:
        return track
    is_idle = observation.running == 0
    track = _update_rest(track, observation.held_bytes, elapsed_seconds, is_idle=is_idle)
    if track.presence.rested_seconds is not None:
        return track
    return _add_reading(track, float(observation.held_bytes), observation.room_bytes)


def _confirms_doubted_time(clock: TrackClock, snapshot_seconds: float) -> bool:
    """Return whether this time confirms a doubted time, by following it within a day."""
    if clock.doubted_seconds is None:
        return False
    return 0 <= snapshot_seconds - clock.doubted_seconds < DOUBTED_SECONDS


def add_work(
    work: FinishedWork, observation: Observation, elapsed_seconds: float, now_seconds: float
) -> FinishedWork:
    """Return the work, including the requests that have finished since the last reading.

    If the counter is unusable, requests are assumed to continue at the last rate. A counter is
    unusable if it cannot be read, or may be another server's. If the engine were assumed to be
    idle, growth would seem to require no work.
    """
    run_id = work.run_id or observation.run_id
    peak_running = max(work.peak_running, observation.running or 0.0)
    counter_total = observation.finished_total
    is_lower = (
        counter_total is not None
        and work.counter_total is not None
        and counter_total < work.counter_total
    )
    # Behind a load balancer, another server may answer for a while. A lower counter is therefore
    # accepted only if it persists.
    lower_since_seconds = None
    if is_lower:
        lower_since_seconds = work.lower_since_seconds
        if lower_since_seconds is None:
            lower_since_seconds = now_seconds
    may_be_another_server = (
        lower_since_seconds is not None and now_seconds < lower_since_seconds + RESET_SECONDS
    )
    if counter_total is None or may_be_another_server:
        return replace(
            work,
            requests=work.requests + work.requests_per_second * elapsed_seconds,
            lower_since_seconds=lower_since_seconds,
            run_id=run_id,
            peak_running=peak_running,
        )

    requests = work.requests
    if work.counter_total is not None and not is_lower:
        # Requests that were estimated stay in the count, so that the count never falls.
        requests = max(requests, work.requests_at_counter + counter_total - work.counter_total)
    requests_per_second = work.requests_per_second
    if elapsed_seconds > 0:
        # The average is exponential. At first, its time constant is the time observed so far.
        weight = 1 - exp(-elapsed_seconds / min(now_seconds, AVERAGE_SECONDS))
        newest_rate = (requests - work.requests) / elapsed_seconds
        requests_per_second += weight * (newest_rate - requests_per_second)
    return FinishedWork(
        requests=requests,
        requests_per_second=requests_per_second,
        counter_total=counter_total,
        requests_at_counter=requests,
        run_id=run_id,
        peak_running=peak_running,
    )


def is_warming_up(track: Track) -> bool:
    """Return whether the next block cannot be evidence yet.

    The next block is no evidence while little work has been done.
    """
    anchor = track.history.anchor
    if anchor is None:
        return True
    now = Block(track.clock.now_seconds, track.work.requests)
    block_requests = BLOCK_SECONDS * track.work.requests_per_second
    soon = Block(now.seconds + BLOCK_SECONDS, now.requests + block_requests)
    return RISE_SOURCES * count_folds(anchor, now, soon) >= USELESS_CHANCE


def anchor_track(track: Track) -> Track:
    """Return the track at the start of a new stretch.

    The new track has no history, verdict or alarm. The clock and the work are kept.
    """
    return Track(
        clock=track.clock,
        work=track.work,
        presence=Occupancy(
            is_asleep=track.presence.is_asleep, neighbours=track.presence.neighbours
        ),
        history=TrackHistory(
            anchor=Block(track.clock.now_seconds, track.work.requests),
            rings=(Ring(),) * len(RING_PARTS),
        ),
        bound_bytes=track.bound_bytes,
        reached=track.reached,
        precedent=track.precedent,
        previous_alarm_seconds=track.previous_alarm_seconds,
    )


def _update_neighbours(track: Track, neighbours: int | None) -> Track:
    """Return the track, updated with the number of processes on the device.

    `neighbours` is None if that number does not matter.

    While there is an additional process, `crowded_since_seconds` is set. During this time, the
    track is paused without an open block. If the process stays, or a usual process has exited, a
    new stretch begins.
    """
    presence = track.presence
    # There are as many processes as usual, or their number does not matter.
    if not neighbours or neighbours == presence.neighbours:
        if presence.crowded_since_seconds is None:
            return track
        return replace(track, presence=replace(presence, crowded_since_seconds=None))
    if presence.neighbours is None:
        return replace(track, presence=replace(presence, neighbours=neighbours))

    now_seconds = track.clock.now_seconds
    since_seconds = presence.crowded_since_seconds
    if since_seconds is None:
        since_seconds = now_seconds
    has_come = neighbours > presence.neighbours
    if has_come and now_seconds - since_seconds < LONGEST_CROWDED_SECONDS:
        presence = replace(presence, crowded_since_seconds=since_seconds)
        # Memory held while the additional process is present is not comparable with earlier memory.
        history = replace(track.history, open_block=None, held_bytes=None)
        return replace(track, presence=presence, history=history)
    return anchor_track(replace(track, presence=replace(presence, neighbours=neighbours)))


def _update_rest(track: Track, held_bytes: int, elapsed_seconds: float, *, is_idle: bool) -> Track:
    """Return the track, with `rested_seconds` set while the engine rests.

    The engine rests in three cases:

    - It sleeps.
    - It has released most of its memory.
    - It may hold a backup of its weights.

    The evidence is kept. The process is the same, and holds the memory that it did not release. A
    new stretch begins after LONGEST_REST_SECONDS of work.
    """
    if track.history.anchor is None:
        track = anchor_track(track)
    presence = track.presence
    rested_seconds = presence.rested_seconds
    peak_bytes = track.history.peak_bytes
    # The two shares differ. With a single limit, a rest might begin and end repeatedly.
    present_share = REST_SHARE if rested_seconds is None else WAKE_SHARE
    is_present = held_bytes >= present_share * peak_bytes
    has_doubled = 0 < peak_bytes < REST_SHARE * held_bytes
    is_backup = rested_seconds is not None and has_doubled
    is_asleep = presence.is_asleep or is_backup
    if is_present and not is_asleep:
        if rested_seconds is None:
            return track
        return replace(track, presence=replace(presence, rested_seconds=None))

    # Only time in which the engine is awake and working is counted. An idle engine has no reason to
    # take its memory again.
    if rested_seconds is None or presence.is_asleep:
        rested_seconds = 0.0
    elif is_asleep or not is_idle:
        rested_seconds += elapsed_seconds
    if not presence.is_asleep and rested_seconds >= LONGEST_REST_SECONDS:
        return anchor_track(track)
    return replace(
        track,
        presence=replace(presence, rested_seconds=rested_seconds, is_asleep=is_asleep),
        history=replace(track.history, open_block=None, held_bytes=None),
        # After the engine wakes up, the growth that caused the alarm continues. Memory may stay
        # below its old height for an hour.
        estimate=None if track.alarm is None else track.estimate,
    )


def _add_reading(track: Track, held_bytes: float, room_bytes: int | None) -> Track:
    """Return the track with a reading added to its open block.

    If the open block is complete, it is closed and judged first. In that case, the reading opens
    the next block.
    """
    # This is the fast path: most readings repeat the previous one.
    if held_bytes != track.history.held_bytes:
        track = replace(track, history=_note_change(track, held_bytes))
    open_block = track.history.open_block
    now_seconds = track.clock.now_seconds
    if open_block is not None and now_seconds - open_block.seconds >= BLOCK_SECONDS:
        track = judge_track(_close_block(track, open_block), room_bytes)
        open_block = None
    if open_block is None:
        open_block = Block(now_seconds, track.work.requests, floor_bytes=held_bytes)
    elif held_bytes < open_block.floor_bytes:
        open_block = replace(open_block, floor_bytes=held_bytes)
    else:
        return track
    return replace(track, history=replace(track.history, open_block=open_block))


def _note_change(track: Track, held_bytes: float) -> TrackHistory:
    """Return the history after a changed reading, with its peak and its steps updated."""
    history = track.history
    # After a pause, the rise is unknown and taken as 0.
    rise_bytes = held_bytes - (history.held_bytes or held_bytes)
    steps = history.steps
    if rise_bytes >= LEAST_STEP_BYTES:
        step = MemoryStep(track.clock.now_seconds, rise_bytes, held_bytes)
        steps = (*steps, step)[-NEWEST_STEPS:]
    elif rise_bytes <= 0 and steps:
        steps = _cut_steps(steps, held_bytes)
    peak_bytes = max(history.peak_bytes, held_bytes)
    return replace(history, held_bytes=held_bytes, steps=steps, peak_bytes=peak_bytes)


def _cut_steps(steps: tuple[MemoryStep, ...], held_bytes: float) -> tuple[MemoryStep, ...]:
    """Return the steps after a fall to `held_bytes`.

    The part of a step above `held_bytes` was released. Steps that have become too small are
    dropped.
    """
    remaining: list[MemoryStep] = []
    for step in steps:
        cut_bytes = max(0.0, step.top_bytes - held_bytes)
        size_bytes = step.size_bytes - cut_bytes
        if size_bytes >= LEAST_STEP_BYTES:
            remaining.append(MemoryStep(step.seconds, size_bytes, step.top_bytes - cut_bytes))
    return tuple(remaining)


def _close_block(track: Track, open_block: Block) -> Track:
    """Return the track with its open block closed and added to the rings.

    An idle block without a rise is omitted. An idle block does not speak against a leak that is
    driven by requests. Demands can be compared only at similar load. If load has doubled since the
    origin, the closed block becomes the origin. During an alarm, the origin does not change.
    """
    history = track.history
    work = track.work
    floor_bytes = open_block.floor_bytes
    is_idle = work.counter_total is not None and work.requests <= open_block.requests
    shortest = history.rings[0].blocks
    if is_idle and shortest and floor_bytes < shortest[-1].floor_bytes + RISE_BYTES:
        return replace(track, history=replace(history, open_block=None))

    now_seconds = track.clock.now_seconds
    busy_seconds = history.busy_seconds + now_seconds - open_block.seconds
    closed = Block(now_seconds, work.requests, busy_seconds, floor_bytes, work.peak_running)
    anchor = history.anchor
    assert anchor is not None  # noqa: S101 - blocks are gathered after it is set
    origin = history.origin
    if origin is None:  # This is the first block of the stretch.
        anchor = replace(anchor, floor_bytes=floor_bytes)
        origin = closed
    elif work.peak_running > LOAD_LEAP * origin.peak_running and track.alarm is None:
        origin = closed
    rings = _add_to_rings(history.rings, closed)
    history = replace(history, anchor=anchor, origin=origin, busy_seconds=busy_seconds, rings=rings)
    return replace(track, history=history)


def _add_to_rings(rings: tuple[Ring, ...], closed: Block) -> tuple[Ring, ...]:
    """Return the rings after adding a closed block of the shortest length.

    The block becomes part of the incomplete block in the next ring. If that block is now complete,
    it is passed on in turn.
    """
    updated = list(rings)
    floor_bytes = closed.floor_bytes
    for number, ring in enumerate(rings):
        if ring.parts > 0:
            floor_bytes = min(floor_bytes, ring.floor_bytes)
        if ring.parts + 1 < RING_PARTS[number]:
            updated[number] = replace(ring, parts=ring.parts + 1, floor_bytes=floor_bytes)
            # If this block is incomplete, so are all longer blocks.
            break
        blocks = (*ring.blocks, replace(closed, floor_bytes=floor_bytes))
        highest_bytes = ring.highest_bytes
        if len(blocks) > RING_BLOCKS:
            # A dropped block still counts. Memory that returns to its earlier height has not grown.
            highest_bytes = max(highest_bytes, blocks[0].floor_bytes)
            blocks = blocks[1:]
        updated[number] = Ring(blocks=blocks, highest_bytes=highest_bytes, verdict=ring.verdict)
    return tuple(updated)
