"""One series of memory readings, followed through runs, rests and blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.blocks import GIVEN_BACK_BYTES, add_peak, choose_first_block, close_block, lower_level
from vllm_headroom.derive.leak.facts import (
    BLOCK_SECONDS,
    MIB,
    RISE_BYTES,
    USELESS_CHANCE,
    Block,
    Certainty,
    FastRise,
    Flush,
    Observation,
    Point,
    Track,
    compute_chance,
)
from vllm_headroom.derive.leak.fast import (
    LASTS_SECONDS,
    anchor_track,
    estimate_fast,
    follow_rise,
    update_neighbours,
    update_rest,
)
from vllm_headroom.derive.leak.judge import judge_track
from vllm_headroom.derive.leak.shape import add_work
from vllm_headroom.derive.leak.steps import add_step
from vllm_headroom.derive.readings import is_new_run
from vllm_headroom.model import Gpu

DOUBTED_SECONDS: Final = 86_400.0
"""A time this far ahead, or an earlier one, is trusted once a second reading confirms it."""

JUDGED_LEVEL: Final = 1
"""Evidence is judged whenever a block of this level ends, every two minutes: judging costs more than the rest."""

FLUSHED_BYTES: Final = 64 * MIB
FLUSHED_ROOM_BYTES: Final = 1024 * MIB
"""A fall of this size with no more room than this is torch's allocator giving back its cache."""

KEPT_SHARE: Final = 0.85
KEPT_BYTES: Final = 512 * MIB
SETTLED_SECONDS: Final = 3600.0
"""What it could not give back is in use: an alarm if that is this much, and this share of this run's growth, and
load, whose needs are in use too, has not doubled recently."""

CACHE_SHARE: Final = 1 / 3
REFILLED_SECONDS: Final = 600.0
"""If ten minutes later no more than this is held, the alarm was about cache: what serving needs of the cache, which
was there before the growth, is back by then."""


def observe(track: Track, seen: Observation) -> Track:
    """Return the track with one more reading; takes microseconds, and a millisecond when a long block ends."""
    if _is_doubtful(track, seen):
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
        peaks=add_peak(track.peaks, seen.running, now),
        asleep=seen.awake is False,
    )
    if seen.held_bytes is None:
        return track
    track = update_neighbours(track, seen.neighbours)
    if track.crowded_since is not None:
        return track
    track = update_rest(track, seen.held_bytes)
    return track if track.resting_since is not None else _gather(track, float(seen.held_bytes), seen.room_bytes)


def _is_doubtful(track: Track, seen: Observation) -> bool:
    """Return whether a time is far off while the reading before was not equally far off."""
    if 0 <= seen.seconds - track.clock < DOUBTED_SECONDS:
        return False
    doubted = track.doubted_clock
    return doubted is None or not 0 <= seen.seconds - doubted < DOUBTED_SECONDS


def is_warming_up(track: Track) -> bool:
    """Return whether so little work was done since the anchor that the next block can be no evidence."""
    if track.anchor_seconds is None:
        return True
    age, done = track.seconds - track.anchor_seconds, track.work.requests - track.anchor_requests
    soon = (age + BLOCK_SECONDS, done + BLOCK_SECONDS * track.work.rate)
    return compute_chance((age, done), soon) >= USELESS_CHANCE


def _gather(track: Track, held_bytes: float, room_bytes: int | None) -> Track:
    track = _apply_flush(_update_steps(track, held_bytes), held_bytes, room_bytes)
    block = track.levels[0].block
    if block is not None and track.seconds - block.seconds >= BLOCK_SECONDS:
        closed = close_block(choose_first_block(track, block), block)
        if closed is None or _was_cache(track, held_bytes):
            return _gather(anchor_track(track), held_bytes, room_bytes)
        track = closed
        if track.levels[JUDGED_LEVEL].block is None:
            track = judge_track(track, room_bytes)
        block = None
    now = (track.seconds, track.work.requests)
    if block is None:
        opened = Block(*now, held_bytes, held_bytes, 0)
    elif block.floor_bytes <= held_bytes <= block.ceiling_bytes:
        opened = block
    else:
        floor, ceiling = min(block.floor_bytes, held_bytes), max(block.ceiling_bytes, held_bytes)
        opened = Block(block.seconds, block.requests, floor, ceiling, block.parts)
    if opened is not block:
        levels = (replace(track.levels[0], block=opened), *track.levels[1:])
        track = replace(track, levels=levels, top_bytes=max(track.top_bytes, held_bytes))
    return _raise_fast_alarm(track, held_bytes, room_bytes)


def _update_steps(track: Track, held_bytes: float) -> Track:
    if held_bytes == track.held_bytes:
        return track
    before_bytes = held_bytes if track.held_bytes is None else track.held_bytes
    return replace(track, held_bytes=held_bytes, steps=add_step(track.steps, track.seconds, before_bytes, held_bytes))


def _apply_flush(track: Track, held_bytes: float, room_bytes: int | None) -> Track:
    """Return the track with its past lowered by what the allocator gave back of its cache.

    Before torch fails for lack of room it gives back whole free segments; the growth beneath continues from there, and
    the rest of it is no cache.
    """
    block, first = track.levels[0].block, track.first
    if block is None or first is None or room_bytes is None:
        return track
    drop = block.ceiling_bytes - held_bytes
    if drop < FLUSHED_BYTES or room_bytes - drop > FLUSHED_ROOM_BYTES:
        return track
    kept_bytes = held_bytes - track.begun_bytes
    settled = track.seconds - first.seconds >= SETTLED_SECONDS
    kept = settled and kept_bytes >= max(KEPT_BYTES, KEPT_SHARE * (kept_bytes + drop))
    if not kept and track.verdict is not Certainty.LEAKING:
        return track
    return replace(
        track,
        projected=Certainty.LEAKING if kept else track.projected,
        first=replace(first, floor_bytes=first.floor_bytes - drop),
        flush=Flush(track.seconds, block.ceiling_bytes, held_bytes),
        levels=tuple(lower_level(level, drop) for level in track.levels),
    )


def _was_cache(track: Track, held_bytes: float) -> bool:
    """Return whether most of the growth before the allocator gave back its cache has not been taken again."""
    flush = track.flush
    if flush is None or track.seconds - flush.seconds < REFILLED_SECONDS:
        return False
    return held_bytes - track.begun_bytes < CACHE_SHARE * (flush.height_bytes - track.begun_bytes)


def _raise_fast_alarm(track: Track, held_bytes: float, room_bytes: int | None) -> Track:
    """Return the track with the alarm of growth that leaves no time for evidence.

    If the room is unknown, it is taken as what is held. Memory that only returns is no growth.
    """
    run, reference = track.run, track.levels[0].reference_bytes
    if track.seconds < run.quiet_until or reference is None or held_bytes < reference - GIVEN_BACK_BYTES:
        return replace(track, run=FastRise(quiet_until=run.quiet_until)) if run.points else track
    if run.alarm_until and track.seconds >= run.alarm_until:
        return judge_track(replace(track, run=FastRise()), room_bytes)
    if track.verdict is Certainty.LEAKING and not run.alarm_until:
        return track
    longer = follow_rise(run, Point(track.seconds, track.work.requests, track.busy_seconds, held_bytes))
    if longer is run:
        return track
    track = replace(track, run=longer)
    room = held_bytes if room_bytes is None else room_bytes
    found = estimate_fast(longer, room, track.work.rate, on=run.alarm_until > 0)
    if found is None:
        return track
    lasting = replace(longer, alarm_until=track.seconds + LASTS_SECONDS)
    return replace(track, run=lasting, verdict=Certainty.LEAKING, estimate=found)


def update_residues(
    asleep: dict[str, Track],
    tracks: dict[str, Track],
    least_bytes: Mapping[str, int],
    seen: Iterable[tuple[Gpu, Observation]],
) -> dict[str, Track]:
    """Return the tracks of the memory kept in sleep, by UUID, after one more sample; `least_bytes` are the residues.

    A track starts in an observed sleep of a run that has worked: earlier residues say less than its work. `tracks` are
    those of held memory, before this sample.
    """
    found = {uuid: track for uuid, track in asleep.items() if uuid in least_bytes}
    for gpu, each in seen if least_bytes else ():
        uuid = gpu.reading.uuid
        before = found.get(uuid) or (Track(clock=each.seconds) if each.awake is False else None)
        if before is not None and uuid in least_bytes:
            found[uuid] = _update_residue(before, tracks.get(uuid), _observe_residue(each, least_bytes[uuid]))
    return found


def _observe_residue(seen: Observation, least_bytes: int) -> Observation:
    """Return the observation as if the engine held the residue until its next sleep.

    Nothing is known during sleep, when the room is different, nor where another process may hold a part of it.
    """
    alone = seen.neighbours is None or seen.neighbours <= 1
    return replace(seen, held_bytes=least_bytes if seen.awake and alone else None, awake=None)


def _update_residue(before: Track, held: Track | None, seen: Observation) -> Track:
    """Return the track after one more sample; an alarm is held for a while after a sleep that kept more."""
    track = observe(before, seen)
    alarm = before if held is None else take_surer(held, before)
    more = seen.held_bytes is not None and seen.held_bytes >= (before.held_bytes or 0.0) + RISE_BYTES
    if alarm.verdict is not Certainty.LEAKING or not more:
        return track
    return replace(track, verdict=Certainty.LEAKING, estimate=alarm.estimate, sure_seconds=track.seconds)


def update_held(before: Track, seen: Observation, asleep: Track | None) -> Track:
    """Return the track of held memory after one more sample, restarted at a wake if the sleep denies its alarm.

    Then the growth was cache.
    """
    track = observe(before, seen)
    woke = before.resting_since is not None and track.resting_since is None
    if not woke or before.verdict is not Certainty.LEAKING or asleep is None or asleep.held_bytes is None:
        return track
    return track if asleep.verdict is Certainty.LEAKING else anchor_track(track)


def take_surer(track: Track, asleep: Track | None) -> Track:
    """Return the track with the verdict of the memory kept in sleep, unless its own is as certain.

    Its own time to out-of-memory includes the next peak, which the kept memory does not show.
    """
    if asleep is None or asleep.verdict <= track.verdict:
        return track
    return replace(track, verdict=asleep.verdict, estimate=asleep.estimate)
