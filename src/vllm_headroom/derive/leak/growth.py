"""The growth in a window of blocks: what was retained above all that was held before, and how often it rose."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import exp, log
from statistics import median
from typing import Final

from msgspec import Struct

from vllm_headroom.derive.leak.facts import MIB, RISE_BYTES, Point, Ring, count_folds

LENGTHS: Final = (6, 8, 11, 15, 21, 30, 46, 61)
"""Blocks of the windows that are compared."""

LEAST_RISES: Final = 6
"""Least rises for a verdict: fewer are indistinguishable from first uses of kernels."""

LEAST_GROWTH_BYTES: Final = 48 * MIB
"""Least growth for a verdict: a few of the allocator's 20 MiB segments (c10 kLargeBuffer) are no leak."""

CLIP: Final = 3.0
"""A rise counts at most this many median rises: one large step must not make a trend."""

RECORDS: Final = 6.0
"""Independent sources of records and first uses: the chance of one in a block is at most this times ln(n1/n0)."""

CHANCE_IN_A_LEAK: Final = 0.8
LEAST_CHANCE: Final = 0.10
"""Real benign steps come in clusters, so no rise is assumed to be rarer than this."""

BACKGROUND_PER_SECOND: Final = 0.15 / 3600
USELESS_CHANCE: Final = 0.75
"""Blocks in which a rise is this likely anyway are no evidence: this covers the warm-up."""

LAST_SHARE: Final = 0.05
QUIET_SECONDS, QUIET_GAPS = 1800.0, 1.5
"""Growth has ended after so long without a rise, and after so many of its usual gaps, in seconds and in requests."""


class Course(Struct, frozen=True):
    """A ring's points with what all its windows share: the floors kept, the highest floor until each, and the evidence.

    `folds` are the e-folds of work of each block, `rose` and `stayed` the log likelihood ratios of a rise and of none.
    """

    points: tuple[Point, ...]
    kept_bytes: tuple[float, ...]
    highest_bytes: tuple[float, ...]
    folds: tuple[float, ...]
    rose: tuple[float, ...]
    stayed: tuple[float, ...]


class Growth(Struct, frozen=True, kw_only=True):
    """The blocks of a window, from the one before it; the memory retained above all that was held before it.

    `rises` are those of its blocks, `total_bytes` is their sum if none counts more than CLIP medians, `typical_bytes`
    the size of its steps if they were equal, `score` the log likelihood ratio of a leak against records and first uses.
    """

    points: tuple[Point, ...]
    folds: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    rises: tuple[float, ...]
    clipped: tuple[float, ...]
    total_bytes: float
    typical_bytes: float
    count: int
    score: float

    @property
    def grown_bytes(self) -> float:
        """The growth, with all of each rise."""
        return self.kept_bytes[-1] - self.kept_bytes[0]

    @property
    def lasted(self) -> float:
        """The length of the window in seconds."""
        return self.points[-1].seconds - self.points[0].seconds


def survey(ring: Ring, first: Point) -> Course | None:
    """Return the points of a ring after the first block; None where they grew too little for any verdict.

    A block in which, or before which, more requests ran at once than ever before is no evidence: load explains a rise,
    which shows in the floor of the next block.
    """
    points = ring.points
    kept = tuple(accumulate((point.floor_bytes for point in reversed(points)), min))[::-1]
    oldest = bisect_left(points, first.seconds, key=lambda point: point.seconds)
    highest = tuple(accumulate((point.floor_bytes for point in points), max, initial=ring.highest_bytes))[1:]
    if len(points) - oldest < LENGTHS[0] + 1 or kept[-1] - highest[oldest] < LEAST_GROWTH_BYTES:
        return None
    folds, rose, stayed, load = [], [], [], first.load
    for one, two in pairwise(points[oldest:]):
        folds.append(count_folds(first, one, two))
        chance = compute_chance(folds[-1], two.seconds - one.seconds)
        useful = chance < USELESS_CHANCE and two.load <= load
        rose.append(log(CHANCE_IN_A_LEAK / chance) if useful else 0.0)
        stayed.append(log((1 - CHANCE_IN_A_LEAK) / (1 - chance)) if useful else 0.0)
        load = one.load
    return Course(points[oldest:], kept[oldest:], highest[oldest:], tuple(folds), tuple(rose), tuple(stayed))


def cut_window(course: Course, begin: int) -> Growth:
    """Return the growth from a point on."""
    least = course.highest_bytes[begin]
    kept = tuple(max(least, floor) for floor in course.kept_bytes[begin:])
    rises = tuple([after - before for before, after in pairwise(kept)])
    rising = [rise for rise in rises if rise >= RISE_BYTES]
    most = CLIP * median(rising or [0.0])
    clipped = tuple([min(most, rise) for rise in rises]) if max(rises) > most else rises
    whole = kept[-1] - kept[0]
    evidence = zip(rises, course.rose[begin:], course.stayed[begin:], strict=True)
    return Growth(
        points=course.points[begin:],
        folds=course.folds[begin:],
        kept_bytes=kept,
        rises=rises,
        clipped=clipped,
        total_bytes=sum(clipped),
        typical_bytes=sum([rise * rise for rise in rising]) / whole,
        count=len(rising),
        score=sum([up if rise >= RISE_BYTES else down for rise, up, down in evidence]),
    )


def compute_chance(folds: float, seconds: float) -> float:
    """Return the chance that a healthy engine's floor rises in a block.

    The n-th of exchangeable demands is a record with chance 1/n (Rényi), and an event of log-uniform rarity is first
    seen at rate 1/n, so J sources give at most J ln(n1/n0); idle processes age by time instead.
    """
    return max(RECORDS * folds, LEAST_CHANCE, 1.0 - exp(-BACKGROUND_PER_SECOND * seconds))


def find_windows(course: Course) -> Iterator[Growth]:
    """Yield each window that grew enough for a verdict, the longest first."""
    for length in reversed(LENGTHS):
        begin = len(course.points) - 1 - length
        if begin < 0 or course.kept_bytes[-1] - course.highest_bytes[begin] < LEAST_GROWTH_BYTES:
            continue
        found = cut_window(course, begin)
        if found.count >= LEAST_RISES:
            yield found


def has_ended(grown: Growth) -> bool:
    """Return whether a window's growth has ended: at most its last twentieth came since."""
    least = grown.kept_bytes[-1] - LAST_SHARE * grown.grown_bytes
    risen = grown.points[bisect_left(grown.kept_bytes, least)]
    count = grown.grown_bytes / grown.typical_bytes
    return is_over(grown.points[0], risen, grown.points[-1], count, (QUIET_SECONDS, QUIET_GAPS))


def is_over(began: Point, risen: Point, now: Point, count: float, quiet: tuple[float, float]) -> bool:
    """Return whether growth by so many rises, the last at `risen`, was quiet for these seconds and usual gaps.

    Idle time does not count.
    """
    seconds, gaps = quiet
    between = max(1.0, count - 1)
    gap, done = (risen.seconds - began.seconds) / between, (risen.requests - began.requests) / between
    paused = now.seconds - risen.seconds > max(seconds, gaps * gap)
    return paused and now.requests - risen.requests >= gaps * done
