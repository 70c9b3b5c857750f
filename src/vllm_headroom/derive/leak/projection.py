"""Would the device fill up at the pace of the last hours, and has that pace lasted?"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from vllm_headroom.derive.leak.estimate import late_slope
from vllm_headroom.derive.leak.evidence import folds
from vllm_headroom.derive.leak.facts import MIB, Point, Verdict
from vllm_headroom.derive.leak.shape import OUT_OF_MEMORY_BYTES, Growth, retained

LEAST_BYTES: Final = 512 * MIB
"""Growth before a projection says anything: it is for steps that are few and large."""

LEAST_RISES: Final = 3
RISE_SHARE: Final = 0.05
LARGEST_SHARE: Final = 0.40
"""Rises of at least a twentieth of the growth count; one that is more than this share of it makes it no pace."""

THIRD_SHARE: Final = 0.15
LATE_SHARES: Final = (0.30, 0.80)
"""The least share of each third, and the share of the later half, by requests or by time."""

LAST_SHARE: Final = 0.15
LATE_PACE: Final = 0.5
"""A verdict begins only while growth goes on: the last quarter has this share, and for an alarm the slope of the later
half is at least so much of the pace."""

FASTER_THAN_RECORDS: Final = 4.0
"""Growth per e-fold of the life's work, against that before the window: records and first uses never speed up."""

WARM_SECONDS: Final = 1800.0
"""The window begins this long after the life, at least."""

YOUNG_SECONDS: Final = 3.5 * 3600.0
"""No alarm so early in a life: its first hours have a few large steps of their own."""

DAY_SECONDS: Final = 86_400.0
GROWING_SHARE: Final = 0.25
LEAKING_SHARE: Final = 0.7
HELD_SHARE: Final = 0.35
"""How long it has lasted, as a share of what is left: for a ticket, for an alarm, and for that to go on."""

PAUSE_SECONDS: Final = 2700.0
PAUSE_GAPS: Final = 1.5
"""Growth has ended when nothing has risen for this long, and for so many times the usual distance of the rises."""

WINDOWS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What the window is held against: its first block, the room that is left.

    `before` is what was said last.
    """

    first: Point
    room_bytes: float | None
    before: Verdict


def project(points: tuple[Point, ...], life: Life) -> tuple[Verdict, Growth | None]:
    """Return what the retained floors foretell, and the growth that does.

    Growing: the device would be full within a day. Leaking: the growth has lasted for seven tenths of what is left, so
    that the alarm comes before half-way, whatever the evidence by blocks says of a few large steps. Where nobody knows
    the room it is taken for as much as was held at first.
    """
    if len(points) < WINDOWS:
        return Verdict.NONE, None
    floors = retained(points)
    best: tuple[Verdict, Growth | None] = (Verdict.NONE, None)
    for begin in range(0, len(points) - WINDOWS // 2, max(1, len(points) // WINDOWS)):
        grown = _window(points[begin:], floors[begin:], life)
        verdict = Verdict.NONE if grown is None else _said(grown, life)
        if verdict > best[0]:
            best = (verdict, grown)
    return best


def _said(grown: Growth, life: Life) -> Verdict:
    room = life.first.floor_bytes if life.room_bytes is None else max(1.0, life.room_bytes - OUT_OF_MEMORY_BYTES)
    lasted = grown.points[-1].seconds - grown.points[0].seconds
    left = room / grown.total_bytes * lasted
    on = life.before is Verdict.LEAKING
    share = HELD_SHARE if on else LEAKING_SHARE
    old = grown.points[-1].seconds - life.first.seconds >= YOUNG_SECONDS
    if old and lasted >= share * left and (on or _keeps_pace(grown, lasted)):
        said = Verdict.LEAKING
    else:
        said = Verdict.GROWING if left <= DAY_SECONDS and lasted >= GROWING_SHARE * left else Verdict.NONE
    last = grown.retained_bytes[-1] - grown.retained_bytes[-1 - len(grown.points) // 4]
    return said if last >= LAST_SHARE * grown.total_bytes else min(said, life.before)


def _keeps_pace(grown: Growth, lasted: float) -> bool:
    slope = late_slope([point.seconds for point in grown.points], grown.retained_bytes)
    return slope * lasted >= LATE_PACE * grown.total_bytes


def _window(points: tuple[Point, ...], floors: tuple[float, ...], life: Life) -> Growth | None:
    """Return the growth of a window if it is a pace: several rises, even, late in the life and not slowing down."""
    total = floors[-1] - floors[0]
    if total < LEAST_BYTES or points[0].seconds - life.first.seconds < WARM_SECONDS:
        return None
    rises = tuple(after - before for before, after in pairwise(floors))
    when = [point.seconds for point, rise in zip(points[1:], rises, strict=True) if rise >= RISE_SHARE * total]
    if len(when) < LEAST_RISES or _has_ended(when, points[-1].seconds):
        return None
    if life.before is not Verdict.LEAKING and not _is_pace(points, floors, max(rises) / total, life):
        return None
    return Growth(
        points=points, retained_bytes=floors, rises=rises, total_bytes=total, largest_share=max(rises) / total
    )


def _has_ended(rises: list[float], now: float) -> bool:
    apart = median(later - sooner for sooner, later in pairwise(rises))
    return now - rises[-1] > max(PAUSE_SECONDS, PAUSE_GAPS * apart)


def _is_pace(points: tuple[Point, ...], floors: tuple[float, ...], largest_share: float, life: Life) -> bool:
    """Return whether the growth is even and outpaces the life before; once there is an alarm, only its end counts."""
    if largest_share > LARGEST_SHARE:
        return False
    even = _even([point.requests for point in points], floors) or _even([point.seconds for point in points], floors)
    return even and _outpaces(points, floors, life)


def _even(places: list[float], floors: tuple[float, ...]) -> bool:
    """Return whether each third and the later half have their share on an axis, on which these are the places."""
    at = [_reached(places, floors, share) for share in (1 / 3, 1 / 2, 2 / 3)]
    total = floors[-1] - floors[0]
    thirds = (at[0] - floors[0], at[2] - at[0], floors[-1] - at[2])
    late = (floors[-1] - at[1]) / total
    return min(thirds) >= THIRD_SHARE * total and LATE_SHARES[0] <= late <= LATE_SHARES[1]


def _reached(places: list[float], floors: tuple[float, ...], share: float) -> float:
    """Return the floor at a share of the way from the first place to the last."""
    where = places[0] + share * (places[-1] - places[0])
    return max(floor for place, floor in zip(places, floors, strict=True) if place <= where)


def _outpaces(points: tuple[Point, ...], floors: tuple[float, ...], life: Life) -> bool:
    first = life.first
    opened, ended = (
        (point.seconds - first.seconds, point.requests - first.requests) for point in (points[0], points[-1])
    )
    inside = (floors[-1] - floors[0]) / folds(opened, ended)
    before = (floors[0] - first.floor_bytes) / folds((0.0, 0.0), opened)
    return inside >= FASTER_THAN_RECORDS * before
