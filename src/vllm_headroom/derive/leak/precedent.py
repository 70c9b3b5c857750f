"""The precedent of a series: earlier growth that was not a leak.

The growth was in the last run or on earlier days.
"""

from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import (
    GROWTH_HOURS,
    LARGE_BYTES,
    OUT_OF_MEMORY_BYTES,
    RISE_BYTES,
    Block,
    Precedent,
    Reached,
    Track,
)
from vllm_headroom.units import GIB, HOUR_SECONDS, MIB

NEW_PEAK_SHARE: Final = 0.02
"""Our choice: a rise below this share of the growth is not a new peak. A full cache that still
grows a little is therefore considered to have levelled off.
"""

LEVEL_SECONDS: Final = 2 * HOUR_SECONDS
"""Our choice: growth has levelled off after this long without a new peak. The time must also be at
least half as long as the growth took.
"""

LEVEL_SHARE: Final = 0.5
"""How long memory must be level, as a share of the growth's duration (see LEVEL_SECONDS). Since the
peak, at least this share of the growth's requests must also have finished, because the memory of an
idle engine does not grow.
"""

FALLEN_SHARE: Final = 0.5
"""Memory has followed load if this share of the growth was released."""

LOWER_LOAD: Final = 2 / 3
"""Load has fallen if an hour since the peak had a low enough request rate. The maximum is this
share of the busiest hour before the peak. A release without lower load proves nothing. Even during
a leak, torch may release its cache.
"""

LEAST_ROOM_SHARE: Final = 0.1
"""A peak is not a precedent if its room is less than this share of the growth, or less than
LEAST_ROOM_BYTES. Near the limit, torch releases its cache, so even a leak seems to level off.
"""

LEAST_ROOM_BYTES: Final = GIB
"""A peak is a precedent only if it left at least this much room."""

LEVEL_MARGIN_SHARE: Final = 0.10
"""Our choice: a cache that levels off reaches the same size, or a tenth more. The margin is at most
half of the room that was left.
"""

LOAD_MARGIN_SHARE: Final = 0.25
"""Our choice: the peaks of similar days differ by up to a quarter."""

SIMILAR_BASE_SHARE: Final = 0.02
"""Two runs are compared only if they initially held similar memory. The difference must be below
this share, or below SIMILAR_BASE_BYTES. A larger difference means that the configuration has
changed.
"""

SIMILAR_BASE_BYTES: Final = 512 * MIB
"""A difference of this many bytes is always allowed, for the sake of small processes."""

SLOWER_FACTOR: Final = 1.5
"""A run is compared with the previous run at a later age: this many times the run's own age, plus
an hour. Faster growth is not covered by the precedent.
"""

NEAR_HOURS: Final = 2
"""Our choice: the daily cycle of load may shift by up to this many hours."""


def note_reached(track: Track, newest: Block) -> Track:
    """Return the track, with `reached` updated by the newest block.

    When an hour ends, growth that was not a leak becomes a precedent.
    """
    reached = track.reached
    hour = int(newest.seconds / HOUR_SECONDS)
    if reached is None:
        reached = Reached(base=newest, peak=newest, hour_begin=newest, hour=hour)
    growth_bytes = newest.floor_bytes - reached.base.floor_bytes
    slot = hour % GROWTH_HOURS
    if hour != reached.hour:
        reached = _end_hour(reached, newest)
        # The slot of this hour still contains the value from a day ago.
        reached = replace(reached, growth_bytes=_put(reached.growth_bytes, slot, growth_bytes))
        track = settle_precedent(replace(track, reached=reached), newest)
        assert track.reached is not None  # noqa: S101 - it was just set
        reached = replace(track.reached, hour=hour)
    elif growth_bytes > reached.growth_bytes[slot]:
        reached = replace(reached, growth_bytes=_put(reached.growth_bytes, slot, growth_bytes))

    peak_bytes = reached.peak.floor_bytes
    new_peak_bytes = NEW_PEAK_SHARE * (peak_bytes - reached.base.floor_bytes)
    if newest.floor_bytes >= peak_bytes + max(RISE_BYTES, new_peak_bytes):
        reached = replace(reached, peak=newest, lowest_rate=None)
    elif reached.peak.floor_bytes > reached.released_bytes and has_released(track, reached, newest):
        reached = replace(reached, released_bytes=reached.peak.floor_bytes)
    if reached is track.reached:
        return track
    return replace(track, reached=reached)


def _put(growth_bytes: tuple[float, ...], slot: int, value: float) -> tuple[float, ...]:
    return (*growth_bytes[:slot], value, *growth_bytes[slot + 1 :])


def _end_hour(reached: Reached, newest: Block) -> Reached:
    """Return what the run has reached, with the request rate of the ended hour."""
    seconds = newest.seconds - reached.hour_begin.seconds
    rate = (newest.requests - reached.hour_begin.requests) / max(1.0, seconds)
    # The hour in which the peak occurred counts towards the load that caused it.
    if reached.peak.seconds >= reached.hour_begin.seconds:
        return replace(reached, hour_begin=newest, highest_rate=max(reached.highest_rate, rate))
    lowest_rate = rate
    if reached.lowest_rate is not None:
        lowest_rate = min(lowest_rate, reached.lowest_rate)
    return replace(reached, hour_begin=newest, lowest_rate=lowest_rate)


def settle_precedent(track: Track, newest: Block) -> Track:
    """Return the track, with this run's growth as its precedent.

    If the growth may be a leak, the precedent does not change. The growth was not a leak if memory
    has levelled off. The growth was not a leak either if memory has fallen together with load. In
    both cases, some room must have remained and there must have been no alarm.
    """
    reached = track.reached
    if reached is None or track.alarm is not None:
        return track
    growth_bytes = reached.peak.floor_bytes - reached.base.floor_bytes
    if growth_bytes < LARGE_BYTES:
        return track
    room_bytes = _find_room(track, reached.peak)
    if room_bytes is not None and room_bytes < _find_least_room(growth_bytes):
        return track

    by_hour = reached.growth_bytes
    has_levelled = _has_levelled(reached, newest, is_counted=track.work.counter_total is not None)
    if has_levelled:
        # After its peak, the engine held no more than at the peak. The later hours are therefore
        # filled with the peak's growth.
        by_hour = tuple(bytes_ or growth_bytes for bytes_ in by_hour)
    elif not _has_followed_load(reached, newest):
        return track

    precedent = track.precedent
    follows_load = not has_levelled
    if precedent is not None and _is_similar(precedent, reached):
        # Neither growth was a leak, so the higher one is used for each hour.
        by_hour = tuple(map(max, by_hour, precedent.growth_bytes))
        follows_load = follows_load or precedent.follows_load
    precedent = Precedent(
        run_id=track.work.run_id,
        base_bytes=reached.base.floor_bytes,
        growth_bytes=by_hour,
        follows_load=follows_load,
        room_bytes=room_bytes,
    )
    if not has_levelled:
        # The next day has its own peak.
        reached = replace(reached, peak=newest, highest_rate=0.0, lowest_rate=None)
    return replace(track, reached=reached, precedent=precedent)


def _find_room(track: Track, block: Block) -> float | None:
    """Return the room that was left at a block, or None if unknown."""
    if not track.history.capacity_bytes:
        return None
    return track.history.capacity_bytes - block.floor_bytes


def _find_least_room(growth_bytes: float) -> float:
    return max(LEAST_ROOM_BYTES, LEAST_ROOM_SHARE * growth_bytes)


def _has_levelled(reached: Reached, newest: Block, *, is_counted: bool) -> bool:
    """Return whether a working engine has had no new peak for a long time."""
    peak = reached.peak
    quiet_seconds = newest.seconds - peak.seconds
    growth_seconds = peak.seconds - reached.base.seconds
    if quiet_seconds < max(LEVEL_SECONDS, LEVEL_SHARE * growth_seconds):
        return False
    # If requests are not counted, only the time is considered.
    if not is_counted:
        return True
    growth_requests = peak.requests - reached.base.requests
    return newest.requests - peak.requests >= LEVEL_SHARE * growth_requests


def _has_followed_load(reached: Reached, newest: Block) -> bool:
    """Return whether half of the growth was released while load was lower."""
    growth_bytes = reached.peak.floor_bytes - reached.base.floor_bytes
    fallen_bytes = reached.peak.floor_bytes - newest.floor_bytes
    if fallen_bytes < FALLEN_SHARE * growth_bytes or reached.lowest_rate is None:
        return False
    return reached.lowest_rate <= LOWER_LOAD * reached.highest_rate


def has_released(track: Track, reached: Reached, newest: Block) -> bool:
    """Return whether most of the growth up to the peak has been released.

    Returns False if the room is known. With a known room, the time until memory is full is known
    too. Near the limit, torch releases its cache even though a leak continues.
    """
    growth_bytes = reached.peak.floor_bytes - reached.base.floor_bytes
    fallen_bytes = reached.peak.floor_bytes - newest.floor_bytes
    if growth_bytes < LARGE_BYTES or fallen_bytes < FALLEN_SHARE * growth_bytes:
        return False
    return not track.history.capacity_bytes


def _is_similar(precedent: Precedent, reached: Reached) -> bool:
    """Return whether the two runs initially held about the same amount of memory."""
    difference_bytes = abs(precedent.base_bytes - reached.base.floor_bytes)
    return difference_bytes <= max(SIMILAR_BASE_BYTES, SIMILAR_BASE_SHARE * precedent.base_bytes)


def end_run(track: Track) -> Precedent | None:
    """Return the precedent for the next run.

    Returns None after an alarm, or if memory was nearly full. A run that may have ended out of
    memory excuses no growth. Nor do the runs before it.
    """
    reached = track.reached
    if track.alarm is not None:
        return None
    blocks = track.history.rings[0].blocks if track.history.rings else ()
    if reached is None or not blocks:
        # This run was too short to prove anything, so the older precedent is kept.
        return track.precedent
    newest = blocks[-1]
    room_bytes = _find_room(track, newest)
    growth_bytes = newest.floor_bytes - reached.base.floor_bytes
    if room_bytes is not None and room_bytes < _find_least_room(growth_bytes):
        return None
    return settle_precedent(track, newest).precedent


def find_excused_bytes(track: Track) -> float:
    """Return the height up to which growth is excused, or 0 without a precedent.

    In the precedent's own run, growth is compared with the same hours of earlier days. In a later
    run, growth is compared with the earlier run after a similar time.
    """
    reached = track.reached
    if reached is None:
        return 0.0
    released_bytes = 0.0
    if reached.released_bytes:
        # Memory that was released before may be taken again.
        growth_bytes = reached.released_bytes - reached.base.floor_bytes
        released_bytes = reached.released_bytes + LEVEL_MARGIN_SHARE * growth_bytes
    return max(released_bytes, _find_precedent_bytes(track, reached))


def _find_precedent_bytes(track: Track, reached: Reached) -> float:
    """Return the height up to which an earlier run or day excuses growth, or 0 if there is none."""
    precedent = track.precedent
    if precedent is None or not _is_similar(precedent, reached):
        return 0.0
    hours = track.clock.now_seconds / HOUR_SECONDS
    if precedent.run_id == track.work.run_id:
        # Within a run, growth above the earlier level is new unless memory follows load.
        if not precedent.follows_load:
            return 0.0
        near = range(int(hours) - NEAR_HOURS, int(hours) + NEAR_HOURS + 1)
        growth_bytes = max(precedent.growth_bytes[hour % GROWTH_HOURS] for hour in near)
    else:
        # The compared hours are one and a half times this run's hours, plus the hour that has begun
        # and one more.
        reached_hours = int(SLOWER_FACTOR * hours) + 2
        growth_bytes = max(precedent.growth_bytes[:reached_hours])
    margin_share = LOAD_MARGIN_SHARE if precedent.follows_load else LEVEL_MARGIN_SHARE
    margin_bytes = margin_share * growth_bytes
    if precedent.room_bytes is not None:
        margin_bytes = min(margin_bytes, max(0.0, precedent.room_bytes - OUT_OF_MEMORY_BYTES) / 2)
    # The lower of the two initial values is used. The higher one may already include part of the
    # growth.
    base_bytes = min(precedent.base_bytes, reached.base.floor_bytes)
    return base_bytes + growth_bytes + margin_bytes
