"""An alarm, held until the growth behind it has ended or was given back."""

from math import inf
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import RISE_BYTES, Block, Certainty, LeakAlarm, Ring, Track
from vllm_headroom.derive.leak.windows import is_over
from vllm_headroom.units import DAY_SECONDS, GIB, MIB

HOLD_SECONDS: Final = 2700.0
"""An alarm is held for so long without a rise. Our choice."""

HOLD_GAPS: Final = 3.0
"""And for so many of the usual gaps between its rises."""

PAUSE_FACTOR: Final = 1.5
"""If an alarm came within a day after another, it is held for this multiple of what lay between:
the leak pauses."""

LARGE_BYTES: Final = 64 * MIB
"""A larger fall or rise is not the allocator's usual give and take."""

NEARLY_FULL_BYTES: Final = GIB
"""With less room than this torch's cache hides what grows: the alarm is held for longer, by as much
as the room is smaller, and may be given back whole."""

RETAINED_SHARE: Final = 0.5
"""An alarm ends when less than this share of its growth is left."""

RETAINED_BLOCKS: Final = 10
"""For so many of the shortest blocks, five minutes: a cache fills again after a sleep."""


def update_alarm(track: Track, alarm: LeakAlarm, newest: Block) -> Track:
    """Return the track with its alarm after a block, or without the alarm and its evidence.

    The alarm ends when nothing has risen for long, or most of its growth was given back.
    """
    if newest.floor_bytes >= alarm.newest_rise.floor_bytes + RISE_BYTES:
        return replace(track, alarm=_add_rise(alarm, newest))

    began = alarm.began
    newest_rise = alarm.newest_rise
    hold_factor = _compute_hold_factor(track, newest_rise)
    fall_bytes = newest_rise.floor_bytes - newest.floor_bytes
    retained_share = RETAINED_SHARE
    if hold_factor > 1.0:
        # torch's allocator gives back its cache, which hides the growth beneath.
        began = replace(began, floor_bytes=began.floor_bytes - max(0.0, fall_bytes))
        retained_share = 0.0
    grown_bytes = newest_rise.floor_bytes - began.floor_bytes
    retained_bytes = began.floor_bytes + retained_share * grown_bytes
    if fall_bytes > LARGE_BYTES and newest.floor_bytes >= retained_bytes:
        # Growth goes on beneath what was given back, and is compared with what is left.
        return replace(track, alarm=replace(alarm, began=began, newest_rise=newest))

    # The highest of five minutes: what a sleep emptied fills again.
    recent_blocks = track.history.rings[0].blocks[-RETAINED_BLOCKS:]
    is_retained = max(block.floor_bytes for block in recent_blocks) >= retained_bytes
    has_stopped = is_over(
        began,
        newest_rise,
        newest,
        step_count=grown_bytes**2 / alarm.sum_of_squares,  # as if all steps were equal
        quiet_seconds=_compute_quiet_seconds(track, began, hold_factor),
        quiet_gaps=hold_factor * HOLD_GAPS,
    )
    if is_retained and not has_stopped:
        return track
    return _end_alarm(track, newest_rise)


def _add_rise(alarm: LeakAlarm, newest: Block) -> LeakAlarm:
    rise_bytes = newest.floor_bytes - alarm.newest_rise.floor_bytes
    sum_of_squares = alarm.sum_of_squares + rise_bytes**2
    return replace(alarm, newest_rise=newest, sum_of_squares=sum_of_squares)


def _compute_hold_factor(track: Track, newest_rise: Block) -> float:
    """Return how many times longer than usual an alarm is held: 1 unless it is nearly full."""
    if not track.history.capacity_bytes:
        return 1.0
    room_bytes = track.history.capacity_bytes - newest_rise.floor_bytes
    return max(1.0, NEARLY_FULL_BYTES / max(1.0, room_bytes))


def _compute_quiet_seconds(track: Track, began: Block, hold_factor: float) -> float:
    """Return how long nothing must have risen before the alarm ends."""
    pause_seconds = inf
    if track.previous_alarm_seconds is not None:
        pause_seconds = began.seconds - track.previous_alarm_seconds
    quiet_seconds = hold_factor * HOLD_SECONDS
    if pause_seconds < DAY_SECONDS:
        quiet_seconds = max(quiet_seconds, PAUSE_FACTOR * pause_seconds)
    return quiet_seconds


def _end_alarm(track: Track, newest_rise: Block) -> Track:
    """Return the track without its alarm; evidence starts over at each ring's newest block."""
    rings = [
        Ring(blocks=ring.blocks[-1:], highest_bytes=newest_rise.floor_bytes)
        for ring in track.history.rings
    ]
    return replace(
        track,
        history=replace(track.history, rings=tuple(rings)),
        alarm=None,
        verdict=Certainty.NONE,
        previous_alarm_seconds=newest_rise.seconds,
    )
