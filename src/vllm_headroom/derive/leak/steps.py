"""The step witness: large steps at a pace, and of sizes, that records and first uses of work never have."""

from collections.abc import Iterator
from math import log
from typing import Final

from vllm_headroom.derive.leak.facts import MIB, Certainty, Point, Step, Track
from vllm_headroom.derive.leak.growth import Course, Growth, cut_window
from vllm_headroom.derive.leak.witnesses import compute_patience, weigh_pace

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

ALIKE_LOAD: Final = 0.85
"""Load below this share of the peak is no precedent for the present."""

DAY_SECONDS: Final = 86_400.0
GROWING_SHARE: Final = 0.25
"""For a warning: the time it has lasted, as a share of the time left."""


def find_step_windows(course: Course, load: float) -> Iterator[Growth]:
    """Yield each window that begins with a step, at a load like the highest, and is worth two, the shortest first."""
    total = squares = 0.0
    for begin in range(len(course.points) - 2, -1, -1):
        if course.points[begin].load < ALIKE_LOAD * load:
            return
        rise = course.kept_bytes[begin + 1] - course.kept_bytes[begin]
        total, squares = total + rise, squares + rise * rise
        grown = course.kept_bytes[-1] - course.highest_bytes[begin]
        if rise > 0 and grown >= LEAST_BYTES and total * total >= LEAST_STEPS * squares:
            yield cut_window(course, begin)


def judge_steps(grown: Growth, track: Track, first: Point, room_bytes: float | None) -> tuple[Certainty, float]:
    """Return the verdict on a window that begins with a step, and its evidence.

    Growing: the device would be full within a day. Leaking: steps at a pace that does not slow down, with repeated
    rather than growing sizes, once a quarter of the room is gone. If the room is unknown it is taken as what was held
    at first.
    """
    odds, lasted = weigh_pace(grown, first), grown.lasted
    room = first.floor_bytes if room_bytes is None else max(1.0, room_bytes)
    left_steps, left = room / max(grown.rises), room / grown.grown_bytes * lasted
    is_full = room_bytes is not None and left_steps <= 1
    least_odds, least_sure = (ODDS_WHERE_FULL, SURE_WHERE_FULL) if is_full else (LEAST_ODDS, SURE)
    enough = grown.grown_bytes >= min(ENOUGH_BYTES, ROOM_SHARE * (room + grown.grown_bytes))
    old = track.seconds - first.seconds >= YOUNG_SECONDS
    if odds >= least_odds and enough and old and lasted >= compute_patience(left):
        steps = tuple(step for step in track.steps if step.seconds > first.seconds)
        sizes = score_likeness(steps, grown.points[0].seconds, STEP_SHARE * grown.grown_bytes)
        sure = odds + sizes - SCARCE * log(min(MOST_LEFT, max(1.0, left_steps)))
        if sure >= least_sure:
            return Certainty.LEAKING, sure
    growing = odds >= ODDS and left <= DAY_SECONDS and lasted >= GROWING_SHARE * left
    return Certainty.GROWING if growing else Certainty.NONE, odds
