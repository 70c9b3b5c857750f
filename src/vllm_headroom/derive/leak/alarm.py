"""An alarm, held until the growth behind it has ended or was given back."""

from math import inf
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import RISE_BYTES, Block, Certainty, LeakAlarm, Ring, Track
from vllm_headroom.derive.leak.windows import is_over
from vllm_headroom.units import DAY_SECONDS, GIB, MIB

HOLD_SECONDS: Final = 2700.0
"""Our choice: an alarm ends only after this time without a rise."""

HOLD_GAPS: Final = 3.0
"""An alarm ends only after this many of the usual gaps between its rises without a rise."""

PAUSE_FACTOR: Final = 1.5
"""If an alarm began within a day after the last rise of another one, the leak pauses: the alarm is
held for at least this many times that pause."""

LARGE_BYTES: Final = 64 * MIB
"""A larger fall or rise is not the allocator's usual give and take."""

NEARLY_FULL_BYTES: Final = GIB
"""With less room than this, torch's cache hides growth: the alarm is held for as many times longer
as the room is smaller, and does not end when all its growth is given back."""

RETAINED_SHARE: Final = 0.5
"""An alarm ends when less than this share of its growth is still held."""

RETAINED_BLOCKS: Final = 10
"""Of this many of the shortest blocks, five minutes, the highest counts: after a sleep a cache
fills again."""


def update_alarm(track: Track, alarm: LeakAlarm, newest: Block) -> Track:
    """Return the track with its alarm updated by the newest block, or without the alarm.

    The alarm ends when nothing has risen for long, or when most of its growth was given back. Then
    the evidence starts over too.
    """
    if newest.floor_bytes >= alarm.newest_rise.floor_bytes + RISE_BYTES:
        return replace(track, alarm=_add_rise(alarm, newest))

    began = alarm.began
    newest_rise = alarm.newest_rise
    hold_factor = _compute_hold_factor(track, newest_rise)
    fall_bytes = newest_rise.floor_bytes - newest.floor_bytes
    retained_share = RETAINED_SHARE
    if hold_factor > 1.0:
        # Nearly full: torch's allocator gives back its cache, which does not mean that the growth
        # was given back.
        began = replace(began, floor_bytes=began.floor_bytes - max(0.0, fall_bytes))
        retained_share = 0.0
    grown_bytes = newest_rise.floor_bytes - began.floor_bytes
    retained_bytes = began.floor_bytes + retained_share * grown_bytes
    if fall_bytes > LARGE_BYTES and newest.floor_bytes >= retained_bytes:
        # More was given back than usual, but the leak may go on: the next rise counts from here.
        return replace(track, alarm=replace(alarm, began=began, newest_rise=newest))

    # The highest of five minutes: after a sleep, memory is taken again within minutes.
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
    """Return how many times longer than usual an alarm is held; 1 unless memory is nearly full."""
    if not track.history.capacity_bytes:
        return 1.0
    room_bytes = track.history.capacity_bytes - newest_rise.floor_bytes
    return max(1.0, NEARLY_FULL_BYTES / max(1.0, room_bytes))


def _compute_quiet_seconds(track: Track, began: Block, hold_factor: float) -> float:
    """Return for how many seconds nothing must have risen before the alarm ends."""
    pause_seconds = inf
    if track.previous_alarm_seconds is not None:
        pause_seconds = began.seconds - track.previous_alarm_seconds
    quiet_seconds = hold_factor * HOLD_SECONDS
    if pause_seconds < DAY_SECONDS:
        quiet_seconds = max(quiet_seconds, PAUSE_FACTOR * pause_seconds)
    return quiet_seconds


def _end_alarm(track: Track, newest_rise: Block) -> Track:
    """Return the track without its alarm; the evidence starts over at each ring's newest block."""
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
