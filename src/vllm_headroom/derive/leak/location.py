"""Does it grow in torch's tensors, in the allocator's fragments or outside torch?"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from typing import Final

from vllm_headroom.derive.leak.facts import Estimate
from vllm_headroom.derive.leak.inside import InsideTrack, Mark
from vllm_headroom.vocabulary import LeakLocation

PARTS: Final = 6
"""Of a leak's time, in each of which it must have grown; thirds mistook one simulated leak in ten."""

STEADY_SHARE: Final = 0.01
"""Steady growth of less than this share of what grew most is not what leaks."""

PLACES: Final = {
    LeakLocation.TENSORS: "tensors",
    LeakLocation.FRAGMENTATION: "what torch has reserved and cannot use",
    LeakLocation.OUTSIDE_TORCH: "what torch knows nothing of",
}
"""The places as sentences have them, after "in"."""

HELD: Final[dict[LeakLocation, Callable[[Mark], float]]] = {
    LeakLocation.TENSORS: lambda mark: mark.allocated_bytes,
    LeakLocation.FRAGMENTATION: lambda mark: mark.fragmented_bytes,
    LeakLocation.OUTSIDE_TORCH: lambda mark: mark.outside_bytes,
}


def location(found: Estimate | None, inside: InsideTrack | None) -> LeakLocation | None:
    """Return where it grows: where most was added in every sixth of the leak's time.

    What is used for the first time comes in steps, and a sixth without one does not count for it. Where next to
    nothing grew in every sixth, as when it leaks in lumps or has just begun, the whole counts. What demand at its
    highest leaves cached is no place: torch gives that back.
    """
    if found is None or inside is None or found.bytes_per_second <= 0:
        return None
    began = inside.clock - found.leaked_bytes / found.bytes_per_second
    marks = inside.marks[bisect_left(inside.marks, began, key=lambda mark: mark.seconds) :]
    marks = marks if len(marks) > PARTS else inside.marks[-PARTS - 1 :]
    if not marks:
        return None
    whole = {place: held(marks[-1]) - held(marks[0]) for place, held in HELD.items()}
    steady = {place: PARTS * _least_growth([held(mark) for mark in _ends(marks)]) for place, held in HELD.items()}
    most = max(steady, key=lambda place: steady[place])
    if steady[most] <= STEADY_SHARE * max(whole.values()):
        most = max(whole, key=lambda place: whole[place])
    return most if max(steady[most], whole[most]) > 0 else None


def _ends(marks: tuple[Mark, ...]) -> list[Mark]:
    """Return the marks between which the sixths of the time are; none where there are too few to say."""
    return [marks[round(part * (len(marks) - 1) / PARTS)] for part in range(PARTS + 1)] if len(marks) > PARTS else []


def _least_growth(held_bytes: list[float]) -> float:
    return min((after - before for before, after in pairwise(held_bytes)), default=0.0)
