"""Growth so fast that blocks would come too late: a minute of readings that only rise."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import MIB, RISE_BYTES, THRESHOLDS, Estimate, Level, Point, Run, Track
from vllm_headroom.derive.leak.shape import OUT_OF_MEMORY_BYTES

APART_SECONDS: Final = 5.0
APART_MOST_SECONDS: Final = 90.0
READINGS: Final = 12
"""Rises that are compared, at least and at most so many seconds apart: 55 s of them at the default interval."""

FEWEST_READINGS: Final = 6
LEAST_SECONDS: Final = 50.0
FAST_SECONDS: Final = 600.0
STILL_FAST_SECONDS: Final = 3600.0
"""The device would be full within this; an alarm goes on while it would be within that."""

STEP_BYTES: Final = 20 * MIB
"""The true amount is known to one of the allocator's segments."""

QUIET_SECONDS: Final = 300.0
"""So long after a start or a wake nothing counts: memory that comes back is even and fast."""

SURGE: Final = 1.5
"""Where so many times as many requests were finished as usual within minutes, load explains it."""

LASTS_SECONDS: Final = 120.0
UNEVEN_SHARE: Final = 0.5
"""Of the pace, how far its thirds may be apart: so fast a leak is even, the marks of a first burst are not."""

STRAIGHT_SHARE: Final = 0.05
"""Of the growth, how far a reading may be off an even pace, beside one segment: first uses come at random times."""

LUMPY_SECONDS: Final = 120.0
LUMP_SHARE: Final = 0.3
"""What leaks takes the place of what is cached, whose segments are then taken anew: where all readings are rises, of at
most so large a share of the growth, over two minutes, one may be off by the largest of them."""


def followed(run: Run, now: Point) -> Run:
    """Return the run with one more reading; the same where it adds nothing."""
    if not run.points:
        return replace(run, points=(now,))
    last = run.points[-1]
    rose, apart = now.floor_bytes >= last.floor_bytes + RISE_BYTES, now.seconds - last.seconds
    if now.floor_bytes < last.floor_bytes or (rose and apart > APART_MOST_SECONDS):
        return replace(run, points=(now,))
    return replace(run, points=(*run.points, now)[-READINGS:]) if rose and apart >= APART_SECONDS else run


def fast(run: Run, room_bytes: float, rate: float, *, on: bool) -> Estimate | None:
    """Return how fast it grows; None unless it grows evenly, not with the load, and would soon fill the room.

    `rate` is that of the requests, averaged over minutes. `on`: the alarm is up.
    """
    first, last = run.points[0], run.points[-1]
    lasted, grown = last.seconds - first.seconds, last.floor_bytes - first.floor_bytes
    if len(run.points) < FEWEST_READINGS or lasted < LEAST_SECONDS or grown <= 0:
        return None
    surges = last.requests - first.requests > SURGE * rate * lasted
    room = max(0.0, room_bytes - OUT_OF_MEMORY_BYTES)
    soon = room * lasted <= grown * (STILL_FAST_SECONDS if on else FAST_SECONDS)
    pace = grown / lasted
    if not soon or surges or not _straight(run.points, pace):
        return None
    paces = _paces(run.points)
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


def _straight(points: tuple[Point, ...], pace: float) -> bool:
    """Return whether no reading is far off the line from the first to the last."""
    first, last = points[0], points[-1]
    grown = last.floor_bytes - first.floor_bytes
    most = STEP_BYTES + STRAIGHT_SHARE * grown
    largest = max(after.floor_bytes - before.floor_bytes for before, after in pairwise(points))
    lasted = last.seconds - first.seconds
    if len(points) == READINGS and lasted >= LUMPY_SECONDS and largest <= LUMP_SHARE * grown:
        most = max(most, largest)
    return all(abs(p.floor_bytes - first.floor_bytes - pace * (p.seconds - first.seconds)) <= most for p in points)


def _paces(points: tuple[Point, ...]) -> list[float]:
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
"""An engine that holds half of what it did for this long while awake holds what it needs now."""


CROWDED_MOST_SECONDS: Final = 3600.0
"""A neighbour that stays for this long belongs to the card; one that goes sooner leaves things as they were."""


def crowded(track: Track, neighbours: int | None) -> Track:
    """Return the track waiting while another process is on the card, and begun anew when it stays."""
    if not neighbours or neighbours == track.neighbours:
        return track if track.crowded_since is None else replace(track, crowded_since=None)
    if track.neighbours is None or neighbours < track.neighbours:
        anchor = track.anchor_seconds if track.neighbours is None else None
        return replace(track, neighbours=neighbours, anchor_seconds=anchor, crowded_since=None)
    if track.crowded_since is None:
        return _paused(replace(track, crowded_since=track.seconds))
    if track.seconds - track.crowded_since < CROWDED_MOST_SECONDS:
        return track
    return replace(track, neighbours=neighbours, anchor_seconds=None, crowded_since=None)


def _paused(track: Track) -> Track:
    """Return the track without the block it was gathering, so that what follows a pause is not compared within it."""
    if not track.levels:
        return track
    levels = (replace(track.levels[0], block=None), *track.levels[1:])
    return replace(track, run=Run(quiet_until=track.run.quiet_until), levels=levels, held_bytes=None)


def anchored(track: Track) -> Track:
    """Return the track at the beginning of a new stretch of comparable readings."""
    return Track(
        clock=track.clock,
        seconds=track.seconds,
        work=track.work,
        peaks=track.peaks,
        asleep=track.asleep,
        neighbours=track.neighbours,
        anchor_seconds=track.seconds,
        anchor_requests=track.work.requests,
        levels=(Level(),) * len(THRESHOLDS),
        run=Run(quiet_until=track.seconds + QUIET_SECONDS),
    )


def rested(track: Track, held_bytes: int) -> Track:
    """Return the track resting while the engine sleeps or has let go of its memory.

    What was learned is kept over it: the same process goes on with what it did not give back.
    """
    if track.anchor_seconds is None:
        track = anchored(track)
    if track.resting_since is None:
        if track.asleep or held_bytes < REST_SHARE * track.top_bytes:
            return _paused(replace(track, resting_since=track.seconds))
        return track
    if track.asleep:
        return track
    if held_bytes >= WAKE_SHARE * track.top_bytes:
        return replace(track, resting_since=None, run=Run(quiet_until=track.seconds + QUIET_SECONDS))
    return anchored(track) if track.seconds - track.resting_since >= REST_MOST_SECONDS else track
