"""Would the device fill up at the pace of the last hours, and is it a pace that records and first uses never reach?"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import log
from typing import Final

from msgspec import Struct

from vllm_headroom.derive.leak.evidence import folds
from vllm_headroom.derive.leak.facts import MIB, Point, Verdict
from vllm_headroom.derive.leak.records import are_records
from vllm_headroom.derive.leak.shape import OUT_OF_MEMORY_BYTES, Growth, retained

LEAST_BYTES: Final = 512 * MIB
LEAST_STEPS: Final = 2.5
"""Growth before a projection says anything, and how many equal steps it has to be worth: one step is no pace."""

ODDS: Final = log(12)
"""Twelve to one that the window goes on by time, and not by folds of work as the life before it did."""

YOUNG_SECONDS: Final = 5 * 3600.0
"""No alarm so early in a life: slots and caches fill as evenly as a leak, and many are full by then."""

DAY_SECONDS: Final = 86_400.0
GROWING_SHARE: Final = 0.25
LEAKING_SHARE: Final = 0.4
"""How long it has lasted, as a share of what is left: for a ticket, and for an alarm, well before half-way."""

LAST_SHARE: Final = 0.05
PAUSE_SECONDS: Final = 1800.0
PAUSE_GAPS: Final = 1.5
"""Growth has ended when no more than its last twentieth came for this long, and for so many of its steps' distances."""


class Life(Struct, frozen=True, kw_only=True):
    """What the window is held against: the block that work is counted from, the room that is left.

    `before` is what was said last.
    """

    first: Point
    room_bytes: float | None
    before: Verdict


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


def project(points: tuple[Point, ...], life: Life) -> tuple[Verdict, Growth | None]:
    """Return what the retained floors foretell, and the growth that does: of the surest windows the likeliest.

    Growing: the device would be full within a day. Leaking: the growth has lasted for two fifths of what is left, so
    that the alarm comes well before half-way, whatever the evidence by blocks says of a few large steps, and records do
    not explain it. Where nobody knows the room it is taken for as much as was held at first. Once there is an alarm,
    only its end counts.
    """
    floors, whole = retained(points), _folds(life.first, life.first, points[-1])
    best: tuple[Verdict, float, Window | None] = (Verdict.NONE, 0.0, None)
    for window in _windows(points, floors, life.first):
        odds = _odds(window, life.first, points[-1], whole)
        verdict = _said(window, odds, points[-1], life)
        if verdict > life.before and are_records(_rises(window, floors), window.grown_bytes):
            verdict = min(verdict, Verdict.GROWING)
        if verdict and (verdict, odds) > best[:2] and not _has_ended(window, points, floors, life):
            best = (verdict, odds, window)
    verdict, _, found = best
    return verdict, None if found is None else _growth(found, points, floors)


def _windows(points: tuple[Point, ...], floors: tuple[float, ...], first: Point) -> Iterator[Window]:
    """Yield each window of this life that begins with a step and is worth two, the shortest first."""
    highest = tuple(accumulate((point.floor_bytes for point in points), max))
    total = squares = largest = slow = 0.0
    for begin in range(len(points) - 2, 0, -1):
        opened, rise = points[begin - 1], floors[begin + 1] - floors[begin]
        if opened.seconds <= first.seconds:
            return
        if rise <= 0:
            continue
        total, squares, largest = total + rise, squares + rise * rise, max(largest, rise)
        slow += rise * log((points[begin].seconds - opened.seconds) / _folds(first, opened, points[begin]))
        grown = floors[-1] - highest[begin]
        if grown >= LEAST_BYTES and total * total >= LEAST_STEPS * squares:
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


def _said(window: Window, odds: float, now: Point, life: Life) -> Verdict:
    if life.before is Verdict.LEAKING:
        return Verdict.LEAKING
    if odds < ODDS:
        return Verdict.NONE
    room = life.first.floor_bytes if life.room_bytes is None else max(1.0, life.room_bytes - OUT_OF_MEMORY_BYTES)
    lasted = now.seconds - window.opened.seconds
    left = room / window.grown_bytes * lasted
    if lasted >= LEAKING_SHARE * left and now.seconds - life.first.seconds >= YOUNG_SECONDS:
        return Verdict.LEAKING
    return Verdict.GROWING if left <= DAY_SECONDS and lasted >= GROWING_SHARE * left else Verdict.NONE


def _growth(window: Window, points: tuple[Point, ...], floors: tuple[float, ...]) -> Growth:
    return Growth(
        points=points[window.begin :],
        retained_bytes=floors[window.begin :],
        rises=_rises(window, floors),
        total_bytes=window.grown_bytes,
        largest_share=window.largest_bytes / window.grown_bytes,
    )


def _rises(window: Window, floors: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(after - before for before, after in pairwise(floors[window.begin :]))
