"""What leak would the detector have seen in a series?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Final

from vllm_headroom.derive.leak.facts import MIB, Observation, Track, Verdict
from vllm_headroom.derive.leak.track import observe

STEP_BYTES: Final = 2 * MIB
"""An allocator takes no less at a time (cudaMalloc, torch's small pool), so a leak comes in steps of this."""

STRONGER: Final = 10
"""How often a leak is doubled until it would be seen."""

Reading = tuple[Observation, float]
"""What the detector was told, and the requests that had finished by then as it counts them."""


def seen_from(readings: Sequence[Reading], bytes_per_request: float) -> float | None:
    """Return the leak per request that would have been seen: this one, or else the first of its doubles, or None.

    The detector is fed the very readings with a steady leak added; what moved anyway in the later half counts towards
    it, since it may be a leak that was not seen, or hide one.
    """
    own = _drift(readings)
    if own is None:
        return None
    leaks = (bytes_per_request * 2**power for power in range(STRONGER + 1))
    return next((leak for leak in leaks if leak > own and _sees(readings, leak - own)), None)


def _drift(readings: Sequence[Reading]) -> float | None:
    """Return how far the floor of an eighth of the readings moved over half of them, up or down, per request."""
    eighth, half, last = len(readings) // 8, len(readings) // 2, len(readings)
    before, after = (_floor(readings[end - eighth : end]) for end in (half, last))
    done = sum(max(0.0, later - sooner) for (_, sooner), (_, later) in pairwise(readings[half:]))
    return None if before is None or after is None or not done else abs(after - before) / done


def _floor(readings: Sequence[Reading]) -> int | None:
    return min((seen.held_bytes for seen, _ in readings if seen.held_bytes is not None), default=None)


def _sees(readings: Sequence[Reading], bytes_per_request: float) -> bool:
    """Tell whether a leak would have given an alarm, or an early warning that lasts."""
    track = Track(clock=readings[0][0].seconds)
    for seen, done in readings:
        track = observe(track, _leaking(seen, ceil(done * bytes_per_request / STEP_BYTES) * STEP_BYTES))
        if track.verdict is Verdict.LEAKING:
            return True
    return track.verdict is Verdict.GROWING


def _leaking(seen: Observation, leaked_bytes: int) -> Observation:
    return replace(
        seen,
        held_bytes=None if seen.held_bytes is None else seen.held_bytes + leaked_bytes,
        room_bytes=None if seen.room_bytes is None else seen.room_bytes - leaked_bytes,
    )
