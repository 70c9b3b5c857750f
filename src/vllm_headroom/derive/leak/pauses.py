"""Stretches in which nothing is compared: sleeps, stops and neighbours; what was learned is kept over short ones."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.evidence import THRESHOLDS
from vllm_headroom.derive.leak.facts import Level, Run, Track
from vllm_headroom.derive.leak.fast import QUIET_SECONDS

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
