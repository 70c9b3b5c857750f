"""How much of what was given back of late may be taken again?"""

from __future__ import annotations

from vllm_headroom.derive.leak.facts import Point, Track


def swing(track: Track, held_bytes: float, pace: float) -> float:
    """Return how far above what is held now memory would be at its next height, at a pace of growth beneath.

    Memory that follows load, and the teeth of a collector, come back to where they were, and higher by what leaked
    since: out-of-memory is at the height, not in the valley that is seen now.
    """
    most = max(_swing(level.points, track.seconds, held_bytes, pace) for level in track.levels)
    if track.flush is None:
        return most
    flush = track.flush
    grown = held_bytes - flush.valley_bytes - pace * (track.seconds - flush.seconds)
    return max(most, flush.height_bytes - flush.valley_bytes - max(0.0, grown))


def _swing(points: tuple[Point, ...], now: float, held_bytes: float, pace: float) -> float:
    valley_bytes, valley_seconds, most = held_bytes, now, 0.0
    for point in reversed(points):
        if point.floor_bytes < valley_bytes:
            valley_bytes, valley_seconds = point.floor_bytes, point.seconds
        depth = point.floor_bytes - valley_bytes
        if depth > most:
            most = max(most, min(depth, point.floor_bytes - held_bytes + pace * (now - valley_seconds)))
    return most
