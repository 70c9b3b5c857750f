"""Does memory grow by large steps at a pace, and of sizes, that records and first uses of work never have?"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import log
from typing import Final

from msgspec import Struct

from vllm_headroom.derive.leak.facts import MIB, Point, Step, Verdict, folds
from vllm_headroom.derive.leak.shape import OUT_OF_MEMORY_BYTES, Growth, patience, retained

LEAST_STEP_BYTES: Final = 24 * MIB
"""More than a segment for small tensors, 20 MiB (c10 kLargeBuffer)."""

JOINED_SECONDS: Final = 60.0
"""Steps so close to each other are one event: what one load or one batch takes comes within a minute."""

NEWEST_STEPS: Final = 32

ALIKE_BYTES: Final = 2 * MIB
NEARLY_ALIKE: Final = 1.04
REPEATED_BYTES: Final = 96 * MIB
REPEATED, MOST_REPEATED, SMALLER, RECORD = 2.0, 6.0, 0.5, -1.0
"""What a size that comes again says, for each e-fold above 96 MiB and at most; one smaller than some before; and one
above all before. Slots, graphs and kernels are alike too, but smaller. Fitted to simulated days."""


def stepped(steps: tuple[Step, ...], seconds: float, before_bytes: float, held_bytes: float) -> tuple[Step, ...]:
    """Return the steps with the difference between two readings that follow each other."""
    if held_bytes <= before_bytes:
        return _given_back(steps, held_bytes)
    if held_bytes - before_bytes < LEAST_STEP_BYTES:
        return steps
    return (*steps, Step(seconds, before_bytes, held_bytes))[-NEWEST_STEPS:]


def _given_back(steps: tuple[Step, ...], held_bytes: float) -> tuple[Step, ...]:
    """Return what is left of the steps: nothing above what is held now."""
    while steps and steps[-1].top_bytes > held_bytes:
        last, steps = steps[-1], steps[:-1]
        if held_bytes - last.bottom_bytes >= LEAST_STEP_BYTES:
            return (*steps, Step(last.seconds, last.bottom_bytes, held_bytes))
    return steps


def likeness(steps: tuple[Step, ...], since: float, least_bytes: float) -> float:
    """Return how much the sizes of the events after a time, of so many bytes at least, speak for a leak.

    As a log likelihood ratio. Records outgrow all before them: the allocator takes a new segment for a demand that fits
    into none that it kept. What leaks is of one kind and one size, or takes the place of segments that are then
    taken again, each in the size that it had: so the parts of an event are compared too, with those of earlier ones.
    """
    earlier: list[float] = []
    most = total = 0.0
    for event in _events(steps):
        size = event[-1].top_bytes - event[0].bottom_bytes
        if size < least_bytes:
            continue
        parts = {size, *(step.top_bytes - step.bottom_bytes for step in event)}
        if event[0].seconds > since:
            again = [part for part in parts if least_bytes <= part <= most and _is_among(part, earlier)]
            total += _repeated(max(again)) if again else _new(size, most)
        earlier += parts
        most = max(most, size)
    return total


def _events(steps: tuple[Step, ...]) -> list[list[Step]]:
    events: list[list[Step]] = []
    for step in steps:
        if events and step.seconds - events[-1][-1].seconds <= JOINED_SECONDS:
            events[-1].append(step)
        else:
            events.append([step])
    return events


def _is_among(size: float, earlier: list[float]) -> bool:
    return any(abs(size - other) <= ALIKE_BYTES for other in earlier)


def _repeated(size: float) -> float:
    return min(MOST_REPEATED, max(0.0, REPEATED * log(size / REPEATED_BYTES)))


def _new(size: float, most: float) -> float:
    if size < most:
        return SMALLER
    return RECORD if size > NEARLY_ALIKE * most else 0.0


LEAST_BYTES: Final = 512 * MIB
LEAST_STEPS: Final = 1.8
"""Growth before a projection says anything, and how many equal steps it has to be worth: one step is no pace."""

ODDS, LEAST_ODDS = log(12), log(8)
"""Twelve to one that the window goes on by time, and not by folds of work as the life before it did; for an alarm eight
to one do, where the steps look like a leak's."""

SURE: Final = 7.5
"""For an alarm: the odds with the likeness of the steps to a leak's."""

SURE_WHERE_FULL, ODDS_WHERE_FULL = 6.0, log(3)
"""And where no step as large as the largest finds room any more, three to one: few engines fill so far whose growth is
bounded."""

SCARCE, MOST_LEFT = 0.7, 20.0
"""And so much more for each e-fold of the number of largest steps that fit into what is left, up to 20."""

YOUNG_SECONDS: Final = 4 * 3600.0
"""No alarm so early in a life: slots and caches fill as evenly as a leak, and many are full by then."""

ROOM_SHARE: Final = 0.25
ENOUGH_BYTES: Final = 1536 * MIB
"""For an alarm, a quarter of the room that there was has to be gone, or so much that few caches are as large."""

STEP_SHARE: Final = 0.05
"""Steps of at least a twentieth of the growth are compared."""

DAY_SECONDS: Final = 86_400.0
GROWING_SHARE: Final = 0.25
"""How long it has lasted, as a share of what is left, for a warning."""

LAST_SHARE: Final = 0.05
PAUSE_SECONDS: Final = 1800.0
PAUSE_GAPS: Final = 1.5
"""Growth has ended when no more than its last twentieth came for this long, and for so many of its steps' distances."""


class Life(Struct, frozen=True, kw_only=True):
    """What the window is held against: the block that work is counted from, the room that is left.

    `before` is what was said last, `flushed_seconds` when the allocator gave back its cache for want of room: what grew
    within the cache until then was not seen. Before `alike_seconds` load was lower.
    """

    first: Point
    room_bytes: float | None
    before: Verdict
    flushed_seconds: float = 0.0
    alike_seconds: float = 0.0


class Window(Struct, frozen=True, kw_only=True):
    """The last blocks: the first of them, what was held at most before, and the growth beyond that, which stayed.

    A block's floor is what was held as it began, so `opened` is the end of the one before. `typical_bytes` is the size
    of its steps, were they equal; `slowness` the logarithm of the seconds that an e-fold of work took, where it grew.
    """

    begin: int
    opened: Point
    highest_bytes: float
    grown_bytes: float
    largest_bytes: float
    typical_bytes: float
    slowness: float


def project(points: tuple[Point, ...], steps: tuple[Step, ...], life: Life) -> tuple[Verdict, Growth | None]:
    """Return what the retained floors and the steps foretell, and the growth that does: of the surest windows the best.

    Growing: the device would be full within a day. Leaking: steps at a pace that does not slow down, of sizes that come
    again rather than outgrow each other, when a quarter of the room is gone, whatever the evidence by blocks says.
    Where nobody knows the room it is taken for as much as was held at first. Once there is an alarm, only its end
    counts.
    """
    floors, whole = retained(points), _folds(life.first, life.first, points[-1])
    steps = tuple(step for step in steps if step.seconds > life.first.seconds)
    best: tuple[Verdict, float, Window | None] = (Verdict.NONE, 0.0, None)
    for window in _windows(points, floors, life):
        odds = _odds(window, life.first, points[-1], whole)
        verdict, sure = _said(window, odds, steps, points[-1], life)
        if verdict and (verdict, sure) > best[:2] and not _has_ended(window, points, floors, life):
            best = (verdict, sure, window)
    verdict, _, found = best
    return verdict, None if found is None else _growth(found, points, floors)


def _windows(points: tuple[Point, ...], floors: tuple[float, ...], life: Life) -> Iterator[Window]:
    """Yield each window of this life that begins with a step and is worth two, the shortest first.

    One is enough when the cache has been given back: what was lost before was taken from it, and no step was seen.
    """
    since = life.first.seconds if life.before is Verdict.LEAKING else max(life.first.seconds, life.alike_seconds)
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
        slow += rise * log((points[begin].seconds - opened.seconds) / _folds(first, opened, points[begin]))
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


def _folds(first: Point, before: Point, after: Point) -> float:
    """Return how many times the work done since the first block grew e-fold."""
    seconds, requests = first.seconds, first.requests
    return folds(
        (before.seconds - seconds, before.requests - requests), (after.seconds - seconds, after.requests - requests)
    )


def _has_ended(window: Window, points: tuple[Point, ...], floors: tuple[float, ...], life: Life) -> bool:
    """Return whether growth has paused for long; an alarm does not end where one more step may find no room."""
    if life.before is Verdict.LEAKING and life.room_bytes is not None and life.room_bytes <= window.largest_bytes:
        return False
    risen = points[bisect_left(floors, floors[-1] - LAST_SHARE * window.grown_bytes, lo=1) - 1].seconds
    risen = max(risen, life.flushed_seconds)
    gaps = max(1.0, window.grown_bytes / window.typical_bytes - 1)
    return points[-2].seconds - risen > max(PAUSE_SECONDS, PAUSE_GAPS * (risen - window.opened.seconds) / gaps)


def _odds(window: Window, first: Point, now: Point, whole: float) -> float:
    """Return the log likelihood ratio of growth by time in the window against growth by all the folds of work.

    Records and first uses come at a constant rate per e-fold of work, or a falling one, a leak by time: Poisson's law,
    the steps taken as equal. One more of them, the largest, is granted to the life before: a window that begins with a
    step was chosen so.
    """
    before = max(0.0, window.highest_bytes - first.floor_bytes) + window.largest_bytes
    pace = (before + window.grown_bytes) / whole
    by_time = log(window.grown_bytes / (now.seconds - window.opened.seconds) / pace) + window.slowness
    by_folds = log(before / _folds(first, first, window.opened) / pace)
    return (before * by_folds + window.grown_bytes * by_time) / window.typical_bytes if by_folds < 0 else 0.0


def _said(window: Window, odds: float, steps: tuple[Step, ...], now: Point, life: Life) -> tuple[Verdict, float]:
    """Return the verdict of a window, and how sure it is."""
    room = life.first.floor_bytes if life.room_bytes is None else max(1.0, life.room_bytes - OUT_OF_MEMORY_BYTES)
    left_steps, lasted = room / window.largest_bytes, now.seconds - window.opened.seconds
    left = room / window.grown_bytes * lasted
    goes_on = life.before is Verdict.LEAKING
    is_full = life.room_bytes is not None and left_steps <= 1
    least_odds, least_sure = (ODDS_WHERE_FULL, SURE_WHERE_FULL) if is_full else (LEAST_ODDS, SURE)
    enough = window.grown_bytes >= min(ENOUGH_BYTES, ROOM_SHARE * (room + window.grown_bytes))
    old = now.seconds - life.first.seconds >= YOUNG_SECONDS
    if goes_on or (odds >= least_odds and enough and old and lasted >= patience(left)):
        sizes = likeness(steps, window.opened.seconds, STEP_SHARE * window.grown_bytes)
        sure = odds + sizes - SCARCE * log(min(MOST_LEFT, max(1.0, left_steps)))
        if goes_on or sure >= least_sure:
            return Verdict.LEAKING, sure
    growing = odds >= ODDS and left <= DAY_SECONDS and lasted >= GROWING_SHARE * left
    return Verdict.GROWING if growing else Verdict.NONE, odds


def _growth(window: Window, points: tuple[Point, ...], floors: tuple[float, ...]) -> Growth:
    kept = floors[window.begin :]
    return Growth(
        points=points[window.begin :],
        retained_bytes=kept,
        rises=tuple(after - before for before, after in pairwise(kept)),
        total_bytes=window.grown_bytes,
        largest_share=window.largest_bytes / window.grown_bytes,
    )
