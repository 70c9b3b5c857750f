"""Growth too fast for blocks: a minute of readings that only rise."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import MIB, RISE_BYTES, THRESHOLDS, BlockLevel, Estimate, FastRise, Point, Track
from vllm_headroom.derive.leak.shape import OUT_OF_MEMORY_BYTES

APART_SECONDS: Final = 5.0
APART_MOST_SECONDS: Final = 90.0
READINGS: Final = 12
"""Rises that are compared, with these limits on the seconds between them: 55 s at the default interval."""

FEWEST_READINGS: Final = 6
LEAST_SECONDS: Final = 50.0
FAST_SECONDS: Final = 600.0
STILL_FAST_SECONDS: Final = 3600.0
"""The device would be full within the first; an alarm continues while it would be within the second."""

STEP_BYTES: Final = 20 * MIB
"""The true amount is known to one of the allocator's segments."""

QUIET_SECONDS: Final = 300.0
"""For this long after a start or a wake nothing counts: returning memory is even and fast."""

SURGE: Final = 1.5
"""If this many times as many requests as usual finished within minutes, load explains the growth."""

LASTS_SECONDS: Final = 120.0
UNEVEN_SHARE: Final = 0.5
"""The most its thirds may differ, as a share of the pace: so fast a leak is even, a first burst is not."""

STRAIGHT_SHARE: Final = 0.05
"""The most a reading may be off an even pace, as a share of the growth, beside one segment: first uses are random."""

LUMPY_SECONDS: Final = 120.0
LUMP_SHARE: Final = 0.3
"""A leak takes cached segments, which are then allocated again: if all readings are rises, each at most this share
of the growth, over two minutes, one may be off by the largest."""


def follow_rise(run: FastRise, now: Point) -> FastRise:
    """Return the rise with one more reading; unchanged if it adds nothing."""
    if not run.points:
        return replace(run, points=(now,))
    last = run.points[-1]
    rose, apart = now.floor_bytes >= last.floor_bytes + RISE_BYTES, now.seconds - last.seconds
    if now.floor_bytes < last.floor_bytes or (rose and apart > APART_MOST_SECONDS):
        return replace(run, points=(now,))
    return replace(run, points=(*run.points, now)[-READINGS:]) if rose and apart >= APART_SECONDS else run


def estimate_fast(run: FastRise, room_bytes: float, rate: float, *, on: bool) -> Estimate | None:
    """Return the growth rate; None unless growth is even, unrelated to load, and would soon fill the room.

    `rate` is requests per second, averaged over minutes; `on` is whether the alarm is active.
    """
    first, last = run.points[0], run.points[-1]
    lasted, grown = last.seconds - first.seconds, last.floor_bytes - first.floor_bytes
    if len(run.points) < FEWEST_READINGS or lasted < LEAST_SECONDS or grown <= 0:
        return None
    surges = last.requests - first.requests > SURGE * rate * lasted
    room = max(0.0, room_bytes - OUT_OF_MEMORY_BYTES)
    soon = room * lasted <= grown * (STILL_FAST_SECONDS if on else FAST_SECONDS)
    pace = grown / lasted
    if not soon or surges or not _is_straight(run.points, pace):
        return None
    paces = _measure_paces(run.points)
    half_width = max(paces) - min(paces) + STEP_BYTES / lasted
    if half_width > UNEVEN_SHARE * pace:
        return None
    return Estimate(
        bytes_per_second=pace,
        lower=pace - half_width,
        upper=pace + half_width,
        bytes_per_request=None,
        by_requests=False,
        leaked_bytes=grown,
        pace=pace,
        fastest=pace + half_width,
        oom_seconds=room / pace,
        oom_seconds_lower=room / (pace + half_width),
    )


def _is_straight(points: tuple[Point, ...], pace: float) -> bool:
    """Return whether no reading is far off the line from the first to the last."""
    first, last = points[0], points[-1]
    grown = last.floor_bytes - first.floor_bytes
    most = STEP_BYTES + STRAIGHT_SHARE * grown
    largest = max(after.floor_bytes - before.floor_bytes for before, after in pairwise(points))
    lasted = last.seconds - first.seconds
    if len(points) == READINGS and lasted >= LUMPY_SECONDS and largest <= LUMP_SHARE * grown:
        most = max(most, largest)
    return all(abs(p.floor_bytes - first.floor_bytes - pace * (p.seconds - first.seconds)) <= most for p in points)


def _measure_paces(points: tuple[Point, ...]) -> list[float]:
    """Return the pace of each third."""
    last = len(points) - 1
    ends = [points[place] for place in (0, last // 3, 2 * last // 3, last)]
    return [
        (after.floor_bytes - before.floor_bytes) / (after.seconds - before.seconds) for before, after in pairwise(ends)
    ]


REST_SHARE: Final = 0.5
WAKE_SHARE: Final = 0.8
"""Half of the memory gone is a sleep or a stop; it is back at four fifths. Between them nothing is decided."""

REST_MOST_SECONDS: Final = 1800.0
"""An engine awake that holds half of its earlier memory for this long needs no more."""


CROWDED_MOST_SECONDS: Final = 3600.0
"""A neighbour that stays longer belongs to the device; one that leaves earlier changes nothing."""


def update_neighbours(track: Track, neighbours: int | None) -> Track:
    """Return the track, paused while another process is on the device, and restarted if it stays."""
    if not neighbours or neighbours == track.neighbours:
        return track if track.crowded_since is None else replace(track, crowded_since=None)
    if track.neighbours is None or neighbours < track.neighbours:
        anchor = track.anchor_seconds if track.neighbours is None else None
        return replace(track, neighbours=neighbours, anchor_seconds=anchor, crowded_since=None)
    if track.crowded_since is None:
        return _pause(replace(track, crowded_since=track.seconds))
    if track.seconds - track.crowded_since < CROWDED_MOST_SECONDS:
        return track
    return replace(track, neighbours=neighbours, anchor_seconds=None, crowded_since=None)


def _pause(track: Track) -> Track:
    """Return the track without its open block, so that a pause never falls within a block."""
    if not track.levels:
        return track
    levels = (replace(track.levels[0], block=None), *track.levels[1:])
    return replace(track, run=FastRise(quiet_until=track.run.quiet_until), levels=levels, held_bytes=None)


def anchor_track(track: Track) -> Track:
    """Return the track at the start of a new stretch of comparable readings."""
    return Track(
        clock=track.clock,
        seconds=track.seconds,
        work=track.work,
        peaks=track.peaks,
        asleep=track.asleep,
        neighbours=track.neighbours,
        anchor_seconds=track.seconds,
        anchor_requests=track.work.requests,
        levels=(BlockLevel(),) * len(THRESHOLDS),
        run=FastRise(quiet_until=track.seconds + QUIET_SECONDS),
    )


def update_rest(track: Track, held_bytes: int) -> Track:
    """Return the track, resting while the engine sleeps or has released its memory.

    Its evidence is kept: the same process continues with what it did not give back.
    """
    if track.anchor_seconds is None:
        track = anchor_track(track)
    if track.resting_since is None:
        if track.asleep or held_bytes < REST_SHARE * track.top_bytes:
            return _pause(replace(track, resting_since=track.seconds))
        return track
    if track.asleep:
        return track
    if held_bytes >= WAKE_SHARE * track.top_bytes:
        return replace(track, resting_since=None, run=FastRise(quiet_until=track.seconds + QUIET_SECONDS))
    return anchor_track(track) if track.seconds - track.resting_since >= REST_MOST_SECONDS else track
