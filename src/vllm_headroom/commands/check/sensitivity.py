"""What leak would the detector have seen in a series?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Final

from vllm_headroom.derive.leak.facts import MIB, Observation, Verdict
from vllm_headroom.trace.replay import tracks

STEP_BYTES: Final = 2 * MIB
"""An allocator takes no less at a time (cudaMalloc, torch's small pool), so a leak comes in steps of this."""

FAINTER, STRONGER = 4, 10
"""How often a leak is halved while it would still be seen, and doubled until it would be."""


def faintest(series: Sequence[Observation], bytes_per_request: float) -> float | None:
    """Return the faintest leak per request that would have been seen in this series, to a factor of two.

    The detector is fed the very readings with a steady leak added; what moved anyway in the later half counts towards
    it, since it may be a leak that was not seen, or hide one. Looks from `bytes_per_request` downwards when that would
    have been seen, else upwards; None when none would.
    """
    requests = [track.work.requests for track in tracks(series)]
    own = _drift(series, requests)
    if own is None:
        return None

    def sees(leak: float) -> bool:
        return leak > own and _sees(series, requests, leak - own)

    if not sees(bytes_per_request):
        stronger = (bytes_per_request * 2**power for power in range(1, STRONGER + 1))
        return next(filter(sees, stronger), None)
    for _ in range(FAINTER):
        if not sees(bytes_per_request / 2):
            break
        bytes_per_request /= 2
    return bytes_per_request


def _drift(series: Sequence[Observation], requests: Sequence[float]) -> float | None:
    """Return how far the floor of an eighth of the readings moved over half of them, up or down, per request."""
    eighth, half, last = len(series) // 8, len(series) // 2, len(series)
    before, after = (_floor(series[end - eighth : end]) for end in (half, last))
    done = sum(max(0.0, later - sooner) for sooner, later in pairwise(requests[half:]))
    return None if before is None or after is None or not done else abs(after - before) / done


def _floor(readings: Sequence[Observation]) -> int | None:
    return min((seen.held_bytes for seen in readings if seen.held_bytes is not None), default=None)


def _sees(series: Sequence[Observation], requests: Sequence[float], bytes_per_request: float) -> bool:
    """Tell whether a leak would have given an alarm, or an early warning that lasts."""
    last = Verdict.NONE
    for track in tracks(_leaking(series, requests, bytes_per_request)):
        last = track.verdict
        if last is Verdict.LEAKING:
            return True
    return last is Verdict.GROWING


def _leaking(
    series: Sequence[Observation], requests: Sequence[float], bytes_per_request: float
) -> Iterator[Observation]:
    for seen, done in zip(series, requests, strict=True):
        leaked = ceil(done * bytes_per_request / STEP_BYTES) * STEP_BYTES
        yield replace(
            seen,
            held_bytes=None if seen.held_bytes is None else seen.held_bytes + leaked,
            room_bytes=None if seen.room_bytes is None else seen.room_bytes - leaked,
        )
