"""The witnesses: growth in a window of blocks, how often it rose, at what pace, in what shape, in what large steps."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import inf, log
from statistics import median
from typing import Final

from msgspec import Struct

from vllm_headroom.derive.leak.facts import (
    MIB,
    RISE_BYTES,
    Certainty,
    Point,
    Ring,
    Step,
    Track,
    count_folds,
)

LENGTHS: Final = (6, 8, 11, 15, 21, 30, 46, 61)
"""Blocks of the windows that are compared."""

LEAST_GROWTH_BYTES: Final = 48 * MIB
"""Least growth for a verdict: a few of the allocator's 20 MiB segments (c10 kLargeBuffer) are no leak."""

RECORDS: Final = 6.0
"""Independent sources of records and first uses. The n-th of exchangeable demands is a record with chance 1/n (Rényi),
and an event of log-uniform rarity is first seen at rate 1/n: so many sources give at most this times ln(n1/n0)."""

CHANCE_IN_A_LEAK, LEAST_CHANCE = 0.8, 0.10
"""Real benign steps come in clusters, so no rise is assumed to be rarer than this."""

USELESS_CHANCE: Final = 0.75
"""Blocks in which a rise is this likely anyway are no evidence: this covers the warm-up."""

LAST_SHARE, QUIET_SECONDS, QUIET_GAPS = 0.05, 1800.0, 1.5
"""Growth has ended after so long without a rise, and after so many of its usual gaps, in seconds and in requests."""


class Course(Struct, frozen=True):
    """A ring's points with what all its windows share: the floors kept, the highest floor until each, and the evidence.

    `rose` and `stayed` are the log likelihood ratios of a rise and of none in each block.
    """

    points: tuple[Point, ...]
    kept_bytes: tuple[float, ...]
    highest_bytes: tuple[float, ...]
    rose: tuple[float, ...]
    stayed: tuple[float, ...]


class Growth(Struct, frozen=True, kw_only=True):
    """The blocks of a window, from the one before it; the memory retained above all that was held before it.

    `rises` are those of its blocks, `typical_bytes` is the size of its steps if they were equal, `lasted` its length in
    seconds, `score` the log likelihood ratio of a leak against records and first uses.
    """

    points: tuple[Point, ...]
    kept_bytes: tuple[float, ...]
    rises: tuple[float, ...]
    grown_bytes: float
    typical_bytes: float
    lasted: float
    count: int
    score: float


def survey(ring: Ring, first: Point) -> Course | None:
    """Return the points of a ring after the first block; None where they grew too little for any verdict.

    A block in which, or before which, more requests ran at once than ever before is no evidence: load explains a rise,
    which shows in the floor of the next block.
    """
    points = ring.points
    kept = find_retained(points)
    oldest = bisect_left(points, first.seconds, key=lambda point: point.seconds)
    highest = tuple(
        accumulate((point.floor_bytes for point in points), max, initial=ring.highest_bytes)
    )[1:]
    if len(points) - oldest < LENGTHS[0] + 1 or kept[-1] - highest[oldest] < LEAST_GROWTH_BYTES:
        return None
    rose, stayed, load = [], [], first.load
    for one, two in pairwise(points[oldest:]):
        chance = max(RECORDS * count_folds(first, one, two), LEAST_CHANCE)
        useful = chance < USELESS_CHANCE and two.load <= load
        rose.append(log(CHANCE_IN_A_LEAK / chance) if useful else 0.0)
        stayed.append(log((1 - CHANCE_IN_A_LEAK) / (1 - chance)) if useful else 0.0)
        load = one.load
    return Course(points[oldest:], kept[oldest:], highest[oldest:], tuple(rose), tuple(stayed))


def cut_window(course: Course, begin: int) -> Growth:
    """Return the growth from a point on."""
    least = course.highest_bytes[begin]
    kept = tuple(max(least, floor) for floor in course.kept_bytes[begin:])
    rises = tuple([after - before for before, after in pairwise(kept)])
    rising, whole = [rise for rise in rises if rise >= RISE_BYTES], kept[-1] - kept[0]
    evidence = zip(rises, course.rose[begin:], course.stayed[begin:], strict=True)
    return Growth(
        points=course.points[begin:],
        kept_bytes=kept,
        rises=rises,
        grown_bytes=whole,
        typical_bytes=sum([rise * rise for rise in rising]) / whole,
        lasted=course.points[-1].seconds - course.points[begin].seconds,
        count=len(rising),
        score=sum([up if rise >= RISE_BYTES else down for rise, up, down in evidence]),
    )


def find_retained(points: tuple[Point, ...]) -> tuple[float, ...]:
    """Return the floors less what later floors gave back: running minima from the end."""
    return tuple(accumulate((point.floor_bytes for point in reversed(points)), min))[::-1]


def list_falls(track: Track) -> Iterator[tuple[Point, float]]:
    """Yield each point of the rings of which something is given back by now, and how much."""
    now_bytes = track.rings[0].points[-1].floor_bytes
    for points in (ring.points for ring in track.rings):
        for point, least in zip(points, find_retained(points), strict=True):
            if (fall := point.floor_bytes - min(least, now_bytes)) > 0:
                yield point, fall


def has_ended(grown: Growth) -> bool:
    """Return whether a window's growth has ended: its last twentieth took twice as long as at an even pace."""
    least = grown.kept_bytes[-1] - LAST_SHARE * grown.grown_bytes
    risen = grown.points[bisect_left(grown.kept_bytes, least)]
    count, seconds = (
        grown.grown_bytes / grown.typical_bytes,
        max(QUIET_SECONDS, 2 * LAST_SHARE * grown.lasted),
    )
    return is_over(grown.points[0], risen, grown.points[-1], count, (seconds, QUIET_GAPS))


def is_over(
    began: Point, risen: Point, now: Point, count: float, quiet: tuple[float, float]
) -> bool:
    """Return whether growth by so many rises, the last at `risen`, was quiet for these seconds and usual gaps.

    Idle time does not count.
    """
    seconds, gaps = quiet
    between = max(1.0, count - 1)
    gap, done = (
        (risen.seconds - began.seconds) / between,
        (risen.requests - began.requests) / between,
    )
    paused = now.seconds - risen.seconds > max(seconds, gaps * gap)
    return paused and now.requests - risen.requests >= gaps * done


EVEN_SHARE: Final = 0.45
"""The later half's least share of the growth, on the axis where it is larger."""

FIRST_QUARTER, LAST_QUARTER = 0.05, 0.10
"""Least shares of the first and last quarter: growth that began or ended within the stretch is not even."""


def weigh_pace(grown: Growth, first: Point) -> float:
    """Return the log likelihood ratio of growth at a constant rate against growth by folds of work.

    Records and first uses come at a constant or falling rate per e-fold of work, a leak by time or by requests:
    Poisson's law with steps of the typical size, or of the variance of steady rises by their mean, as these are of many
    steps each. One more step, the largest, is attributed to the time before: the window was chosen to begin with one.
    """
    opened, now = grown.points[0], grown.points[-1]
    before = max(0.0, grown.kept_bytes[0] - first.floor_bytes) + max(grown.rises)
    pace = (before + grown.grown_bytes) / count_folds(first, first, now)
    by_folds, least = log(before / count_folds(first, first, opened) / pace), -inf
    if (
        by_folds >= 0
    ):  # growth has slowed down: only the window's own is compared, and says nothing against a leak
        by_folds, least, pace = 0.0, 0.0, grown.grown_bytes / count_folds(first, opened, now)
    slow = slow_requests = 0.0
    for one, two, rise in zip(grown.points, grown.points[1:], grown.rises, strict=False):
        if rise > 0:
            folds = count_folds(first, one, two)
            slow += rise * log((two.seconds - one.seconds) / folds)
            slow_requests += rise * log(max(two.requests - one.requests, 1e-3) / folds)
    at_a_rate = log(grown.grown_bytes / grown.lasted / pace) + slow / grown.grown_bytes
    done = now.requests - opened.requests
    if done > 0:
        at_a_rate = max(
            at_a_rate, log(grown.grown_bytes / done / pace) + slow_requests / grown.grown_bytes
        )
    step_bytes = max(
        RISE_BYTES,
        grown.typical_bytes - (grown.grown_bytes / grown.count if is_steady(grown) else 0.0),
    )
    return max(least, (before * by_folds + grown.grown_bytes * at_a_rate) / step_bytes)


CLIP: Final = 3.0
"""A rise counts at most this many median rises: one large step must not make a trend."""


def clip_rises(grown: Growth, least_bytes: float = 0.0) -> list[float]:
    """Return the rises, each at most `CLIP` median ones, or so many bytes if that is more."""
    most = max(least_bytes, CLIP * median(rise for rise in grown.rises if rise >= RISE_BYTES))
    return [min(most, rise) for rise in grown.rises]


def is_even(grown: Growth) -> bool:
    """Return whether the growth has its shares in the later half and in the quarters, by requests or by busy time."""
    clipped, late, unceasing = clip_rises(grown), 0.0, False
    for axis in (
        [point.requests for point in grown.points],
        [point.busy_seconds for point in grown.points],
    ):
        length, shares = axis[-1] - axis[0], [0.0] * 4
        if length > 0:
            for before, after, rise in zip(axis, axis[1:], clipped, strict=False):
                shares[min(3, int(2 * (before + after - 2 * axis[0]) / length))] += rise / sum(
                    clipped
                )
            late = max(late, shares[2] + shares[3])
            unceasing |= (
                shares[0] >= FIRST_QUARTER and min(shares[1:3]) > 0 and shares[3] >= LAST_QUARTER
            )
    return unceasing and late >= EVEN_SHARE


def is_steady(grown: Growth) -> bool:
    """Return whether 11 blocks rose by nearly the same; variance is 0.8 of the squared mean and more at a warm-up."""
    is_whole = LENGTHS[2] <= grown.count == len(grown.rises)
    return is_whole and grown.typical_bytes * grown.count <= 1.3 * grown.grown_bytes


GROWING_SECONDS, LEAKING_SECONDS, DAY_SECONDS = 600.0, 3600.0, 86_400.0
"""Least length of a stretch for a warning and for an alarm, and a day. Bounded ramps (caches, LoRA slots) are linear
until they end: only time distinguishes them."""

HASTE, HASTE_SECONDS = 0.25, 180.0
"""An alarm may come after this share of the time left until out-of-memory, if that is sooner."""

PATIENCE, MOST_PATIENCE_SECONDS = 0.05, 12 * 3600.0
"""If out-of-memory is far, the alarm waits for this share of it, at most half a day: what is days away wakes nobody,
and slow ramps mostly end."""


def compute_patience(left: float | None) -> float:
    """Return how many seconds certain growth must have lasted, given the time left."""
    if left is None:
        return LEAKING_SECONDS
    late = min(max(PATIENCE * left, LEAKING_SECONDS), MOST_PATIENCE_SECONDS)
    return min(max(HASTE * left, HASTE_SECONDS), late)


LEAST_BYTES, LEAST_STEPS = 512 * MIB, 1.8
"""Least growth for a projection, and how many equal steps it must be worth: one step is no pace."""

ODDS, LEAST_ODDS = log(12), log(8)
"""Twelve to one that growth continues by time, and not by folds of work as before; for an alarm eight to one is
enough if the steps look like a leak's."""

SURE_OF_STEPS: Final = 9.0
"""For an alarm: the odds plus the steps' likeness to a leak."""

SURE_WHERE_FULL, ODDS_WHERE_FULL = 6.0, log(3)
"""If a step as large as the largest no longer fits, three to one: few engines with bounded growth fill up so far."""

ALIKE_BYTES, NEARLY_ALIKE, REPEATED_BYTES = 2 * MIB, 1.04, 96 * MIB
REPEATED, MOST_REPEATED, SMALLER, RECORD = 2.0, 6.0, 0.5, -1.0
"""The score of a repeated size, per e-fold above 96 MiB and at most; of one smaller than some before; and of one
above all before. Slots, graphs and kernels repeat too, but are smaller. Fitted to simulated days."""

STEP_SHARE: Final = 0.05
"""Steps of at least a twentieth of the growth are compared."""

YOUNG_SECONDS, LATE_SHARE = 4 * 3600.0, 2.0
"""No alarm so early, unless it lasted for twice the time left; no warning in its first half: caches fill evenly too."""

ROOM_SHARE, ENOUGH_BYTES = 0.25, 1536 * MIB
"""For an alarm, a quarter of the room must be gone, or so much that few caches are as large."""


def find_step_windows(course: Course) -> Iterator[Growth]:
    """Yield each window that begins with a step and is worth two at no new peak of load, the shortest first."""
    for begin in range(len(course.points) - 2, -1, -1):
        begins = course.kept_bytes[begin + 1] > course.kept_bytes[begin]
        if begins and course.kept_bytes[-1] - course.highest_bytes[begin] >= LEAST_BYTES:
            grown = cut_window(course, begin)
            loads = zip(grown.points, grown.points[1:], grown.rises, strict=False)
            level_bytes = sum([rise for before, now, rise in loads if now.load <= before.load])
            if level_bytes >= LEAST_STEPS * grown.typical_bytes:
                yield grown


def score_likeness(steps: tuple[Step, ...], since: float, least_bytes: float) -> float:
    """Return how much the sizes of the steps after a time, of at least so many bytes, indicate a leak.

    As a log likelihood ratio. Records exceed all before them: the allocator takes a new segment for a demand that fits
    into no cached one. A leak has one kind and size.
    """
    earlier, total = list[float](), 0.0
    for step in (step for step in steps if step.size_bytes >= least_bytes):
        size, most = step.size_bytes, max(earlier, default=0.0)
        is_again = size <= most and any(abs(size - other) <= ALIKE_BYTES for other in earlier)
        if step.seconds > since and is_again:
            total += min(MOST_REPEATED, max(0.0, REPEATED * log(size / REPEATED_BYTES)))
        elif step.seconds > since:
            total += SMALLER if size < most else RECORD if size > NEARLY_ALIKE * most else 0.0
        earlier.append(size)
    return total


def judge_steps(
    grown: Growth, track: Track, first: Point, room_bytes: float | None
) -> tuple[Certainty, float]:
    """Return the verdict on a window that begins with a step, and its evidence.

    Growing: it lasted for a quarter of the time left, at most a day. Leaking: steps at a pace that does not slow down,
    of repeated sizes, once a quarter of the room is gone; an unknown room is taken as what was held at first.
    """
    odds, lasted = weigh_pace(grown, first), grown.lasted
    room = first.floor_bytes if room_bytes is None else max(1.0, room_bytes)
    left = room / grown.grown_bytes * lasted
    is_full = room_bytes is not None and room <= max(grown.rises)
    enough = grown.grown_bytes >= min(ENOUGH_BYTES, ROOM_SHARE * (room + grown.grown_bytes))
    age = track.seconds - first.seconds
    old = age >= YOUNG_SECONDS or (room_bytes is not None and lasted >= LATE_SHARE * left)
    least_odds, least_sure = (
        (ODDS_WHERE_FULL, SURE_WHERE_FULL) if is_full else (LEAST_ODDS, SURE_OF_STEPS)
    )
    if odds >= least_odds and enough and old and lasted >= compute_patience(left):
        steps = tuple(step for step in track.steps if step.seconds > first.seconds)
        sure = odds + score_likeness(steps, grown.points[0].seconds, STEP_SHARE * grown.grown_bytes)
        if sure >= least_sure:
            return Certainty.LEAKING, sure
    growing = (
        odds >= ODDS and age >= YOUNG_SECONDS / 2 and left <= DAY_SECONDS and lasted >= left / 4
    )
    return Certainty.GROWING if growing else Certainty.NONE, odds
