"""Large steps of memory at a pace, and of sizes, that records and first uses of work never have."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import log
from typing import Final

from msgspec import Struct

from vllm_headroom.derive.leak.facts import MIB, Certainty, Point, Step, count_folds
from vllm_headroom.derive.leak.shape import OUT_OF_MEMORY_BYTES, Growth, compute_patience, find_retained

LEAST_STEP_BYTES: Final = 24 * MIB
"""More than a segment for small tensors, 20 MiB (c10 kLargeBuffer)."""

JOINED_SECONDS: Final = 60.0
"""Steps this close together are one event: a load or a batch allocates within a minute."""

NEWEST_STEPS: Final = 32

ALIKE_BYTES: Final = 2 * MIB
NEARLY_ALIKE: Final = 1.04
REPEATED_BYTES: Final = 96 * MIB
REPEATED, MOST_REPEATED, SMALLER, RECORD = 2.0, 6.0, 0.5, -1.0
"""The score of a repeated size, per e-fold above 96 MiB and at most; of one smaller than some before; and of one
above all before. Slots, graphs and kernels repeat too, but are smaller. Fitted to simulated days."""


def add_step(steps: tuple[Step, ...], seconds: float, before_bytes: float, held_bytes: float) -> tuple[Step, ...]:
    """Return the steps with the difference between two successive readings."""
    if held_bytes <= before_bytes:
        return _lower_steps(steps, held_bytes)
    if held_bytes - before_bytes < LEAST_STEP_BYTES:
        return steps
    return (*steps, Step(seconds, before_bytes, held_bytes))[-NEWEST_STEPS:]


def _lower_steps(steps: tuple[Step, ...], held_bytes: float) -> tuple[Step, ...]:
    """Return the steps without anything above what is held now."""
    while steps and steps[-1].top_bytes > held_bytes:
        last, steps = steps[-1], steps[:-1]
        if held_bytes - last.bottom_bytes >= LEAST_STEP_BYTES:
            return (*steps, Step(last.seconds, last.bottom_bytes, held_bytes))
    return steps


def score_likeness(steps: tuple[Step, ...], since: float, least_bytes: float) -> float:
    """Return how much the sizes of the events after a time, of at least so many bytes, indicate a leak.

    As a log likelihood ratio. Records exceed all before them: the allocator takes a new segment for a demand that fits
    into no cached one. A leak has one kind and size, or takes cached segments that are then allocated again in their
    sizes: so the parts of an event are compared with earlier ones too.
    """
    earlier: list[float] = []
    most = total = 0.0
    for event in _group_events(steps):
        size = event[-1].top_bytes - event[0].bottom_bytes
        if size < least_bytes:
            continue
        parts = {size, *(step.top_bytes - step.bottom_bytes for step in event)}
        if event[0].seconds > since:
            again = [part for part in parts if least_bytes <= part <= most and _is_among(part, earlier)]
            total += _score_repeated(max(again)) if again else _score_new(size, most)
        earlier += parts
        most = max(most, size)
    return total


def _group_events(steps: tuple[Step, ...]) -> list[list[Step]]:
    events: list[list[Step]] = []
    for step in steps:
        if events and step.seconds - events[-1][-1].seconds <= JOINED_SECONDS:
            events[-1].append(step)
        else:
            events.append([step])
    return events


def _is_among(size: float, earlier: list[float]) -> bool:
    return any(abs(size - other) <= ALIKE_BYTES for other in earlier)


def _score_repeated(size: float) -> float:
    return min(MOST_REPEATED, max(0.0, REPEATED * log(size / REPEATED_BYTES)))


def _score_new(size: float, most: float) -> float:
    if size < most:
        return SMALLER
    return RECORD if size > NEARLY_ALIKE * most else 0.0


LEAST_BYTES: Final = 512 * MIB
LEAST_STEPS: Final = 1.8
"""Least growth for a projection, and how many equal steps it must be worth: one step is no pace."""

ODDS, LEAST_ODDS = log(12), log(8)
"""Twelve to one that growth continues by time, and not by folds of work as before; for an alarm eight to one is
enough if the steps look like a leak's."""

SURE: Final = 7.5
"""For an alarm: the odds plus the steps' likeness to a leak."""

SURE_WHERE_FULL, ODDS_WHERE_FULL = 6.0, log(3)
"""If a step as large as the largest no longer fits, three to one: few engines with bounded growth fill up so far."""

SCARCE, MOST_LEFT = 0.7, 20.0
"""Added for each e-fold of the number of largest steps that still fit, up to 20."""

YOUNG_SECONDS: Final = 4 * 3600.0
"""No alarm so early in a run: slots and caches fill as evenly as a leak, and many are full by then."""

ROOM_SHARE: Final = 0.25
ENOUGH_BYTES: Final = 1536 * MIB
"""For an alarm, a quarter of the room must be gone, or so much that few caches are as large."""

STEP_SHARE: Final = 0.05
"""Steps of at least a twentieth of the growth are compared."""

DAY_SECONDS: Final = 86_400.0
GROWING_SHARE: Final = 0.25
"""For a warning: the time it has lasted, as a share of the time left."""

LAST_SHARE: Final = 0.05
PAUSE_SECONDS: Final = 1800.0
PAUSE_GAPS: Final = 1.5
"""Growth has ended when at most its last twentieth came in this time, and in so many distances of its steps."""


class WindowContext(Struct, frozen=True, kw_only=True):
    """What a window is compared with: the block from which work is counted, and the room left.

    `before` is the previous verdict, `flushed_seconds` when the allocator gave back its cache for lack of room: growth
    within the cache until then was invisible. Before `alike_seconds` load was lower.
    """

    first: Point
    room_bytes: float | None
    before: Certainty
    flushed_seconds: float = 0.0
    alike_seconds: float = 0.0


class Window(Struct, frozen=True, kw_only=True):
    """The last blocks: the first of them, the most held before, and the retained growth beyond that.

    A block's floor is what was held as it began, so `opened` is the end of the one before. `typical_bytes` is the size
    of its steps if they were equal; `slowness` the logarithm of the seconds per e-fold of work, where it grew.
    """

    begin: int
    opened: Point
    highest_bytes: float
    grown_bytes: float
    largest_bytes: float
    typical_bytes: float
    slowness: float


def project(points: tuple[Point, ...], steps: tuple[Step, ...], life: WindowContext) -> tuple[Certainty, Growth | None]:
    """Return the verdict by retained floors and steps, and the growth behind it: the best of the most certain windows.

    Growing: the device would be full within a day. Leaking: steps at a pace that does not slow down, with repeated
    rather than growing sizes, once a quarter of the room is gone, whatever the evidence by blocks. If the room is
    unknown it is taken as what was held at first. During an alarm only its end matters.
    """
    floors, whole = find_retained(points), _count_folds(life.first, life.first, points[-1])
    steps = tuple(step for step in steps if step.seconds > life.first.seconds)
    best: tuple[Certainty, float, Window | None] = (Certainty.NONE, 0.0, None)
    for window in _find_windows(points, floors, life):
        odds = _compute_odds(window, life.first, points[-1], whole)
        verdict, sure = _judge_window(window, odds, steps, points[-1], life)
        if verdict and (verdict, sure) > best[:2] and not _has_ended(window, points, floors, life):
            best = (verdict, sure, window)
    verdict, _, found = best
    return verdict, None if found is None else _build_growth(found, points, floors)


def _find_windows(points: tuple[Point, ...], floors: tuple[float, ...], life: WindowContext) -> Iterator[Window]:
    """Yield each window of this run that begins with a step and is worth two, the shortest first.

    One is enough after the cache was given back: earlier losses came from the cache, and no step was visible.
    """
    since = life.first.seconds if life.before is Certainty.LEAKING else max(life.first.seconds, life.alike_seconds)
    first, least = life.first, 1.0 if life.flushed_seconds > points[0].seconds else LEAST_STEPS
    highest = tuple(accumulate((point.floor_bytes for point in points), max))
    total = squares = largest = slow = 0.0
    for begin in range(len(points) - 2, 0, -1):
        opened, rise = points[begin - 1], floors[begin + 1] - floors[begin]
        if opened.seconds <= since:
            return
        if rise <= 0:
            continue
        total, squares, largest = total + rise, squares + rise * rise, max(largest, rise)
        slow += rise * log((points[begin].seconds - opened.seconds) / _count_folds(first, opened, points[begin]))
        grown = floors[-1] - highest[begin]
        if grown >= LEAST_BYTES and total * total >= least * squares:
            yield Window(
                begin=begin,
                opened=opened,
                highest_bytes=highest[begin],
                grown_bytes=grown,
                largest_bytes=largest,
                typical_bytes=squares / total,
                slowness=slow / total,
            )


def _count_folds(first: Point, before: Point, after: Point) -> float:
    """Return how many times the work done since the first block grew e-fold."""
    seconds, requests = first.seconds, first.requests
    return count_folds(
        (before.seconds - seconds, before.requests - requests), (after.seconds - seconds, after.requests - requests)
    )


def _has_ended(window: Window, points: tuple[Point, ...], floors: tuple[float, ...], life: WindowContext) -> bool:
    """Return whether growth has paused for long; an alarm stays while one more step may not fit."""
    if life.before is Certainty.LEAKING and life.room_bytes is not None and life.room_bytes <= window.largest_bytes:
        return False
    risen = points[bisect_left(floors, floors[-1] - LAST_SHARE * window.grown_bytes, lo=1) - 1].seconds
    risen = max(risen, life.flushed_seconds)
    gaps = max(1.0, window.grown_bytes / window.typical_bytes - 1)
    return points[-2].seconds - risen > max(PAUSE_SECONDS, PAUSE_GAPS * (risen - window.opened.seconds) / gaps)


def _compute_odds(window: Window, first: Point, now: Point, whole: float) -> float:
    """Return the log likelihood ratio of growth by time in the window against growth by all the folds of work.

    Records and first uses come at a constant or falling rate per e-fold of work, a leak by time: Poisson's law with
    equal steps. One more step, the largest, is attributed to the time before: the window was chosen to begin with a
    step.
    """
    before = max(0.0, window.highest_bytes - first.floor_bytes) + window.largest_bytes
    pace = (before + window.grown_bytes) / whole
    by_time = log(window.grown_bytes / (now.seconds - window.opened.seconds) / pace) + window.slowness
    by_folds = log(before / _count_folds(first, first, window.opened) / pace)
    return (before * by_folds + window.grown_bytes * by_time) / window.typical_bytes if by_folds < 0 else 0.0


def _judge_window(
    window: Window, odds: float, steps: tuple[Step, ...], now: Point, life: WindowContext
) -> tuple[Certainty, float]:
    room = life.first.floor_bytes if life.room_bytes is None else max(1.0, life.room_bytes - OUT_OF_MEMORY_BYTES)
    left_steps, lasted = room / window.largest_bytes, now.seconds - window.opened.seconds
    left = room / window.grown_bytes * lasted
    goes_on = life.before is Certainty.LEAKING
    is_full = life.room_bytes is not None and left_steps <= 1
    least_odds, least_sure = (ODDS_WHERE_FULL, SURE_WHERE_FULL) if is_full else (LEAST_ODDS, SURE)
    enough = window.grown_bytes >= min(ENOUGH_BYTES, ROOM_SHARE * (room + window.grown_bytes))
    old = now.seconds - life.first.seconds >= YOUNG_SECONDS
    if goes_on or (odds >= least_odds and enough and old and lasted >= compute_patience(left)):
        sizes = score_likeness(steps, window.opened.seconds, STEP_SHARE * window.grown_bytes)
        sure = odds + sizes - SCARCE * log(min(MOST_LEFT, max(1.0, left_steps)))
        if goes_on or sure >= least_sure:
            return Certainty.LEAKING, sure
    growing = odds >= ODDS and left <= DAY_SECONDS and lasted >= GROWING_SHARE * left
    return Certainty.GROWING if growing else Certainty.NONE, odds


def _build_growth(window: Window, points: tuple[Point, ...], floors: tuple[float, ...]) -> Growth:
    kept = floors[window.begin :]
    return Growth(
        points=points[window.begin :],
        retained_bytes=kept,
        rises=tuple(after - before for before, after in pairwise(kept)),
        total_bytes=window.grown_bytes,
        largest_share=window.largest_bytes / window.grown_bytes,
    )
