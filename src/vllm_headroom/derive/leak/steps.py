"""Leaks in a few large steps: their windows, their sizes, and the verdict on them."""

from collections.abc import Iterator
from itertools import pairwise
from math import log
from typing import Final

from vllm_headroom.derive.leak.evidence import compute_patience, weigh_pace
from vllm_headroom.derive.leak.facts import Block, Certainty, Step, Track
from vllm_headroom.derive.leak.windows import Growth, RingSurvey, cut_window
from vllm_headroom.units import DAY_SECONDS, HOUR_SECONDS, MIB

LEAST_STEPS_BYTES: Final = 512 * MIB
"""Least growth of a window of steps, for a projection."""

LEAST_STEPS: Final = 1.8
"""How many equal steps it must be worth: one step is no pace."""


def find_step_windows(survey: RingSurvey) -> Iterator[Growth]:
    """Yield each window that begins with a step and is worth two of them, the shortest first.

    Rises with a new peak of load do not count: load explains them.
    """
    # Backwards from the newest block, so that the shortest window comes first.
    for begin in range(len(survey.blocks) - 2, -1, -1):
        begins_with_step = survey.retained_bytes[begin + 1] > survey.retained_bytes[begin]
        grown_bytes = survey.retained_bytes[-1] - survey.highest_bytes[begin]
        if begins_with_step and grown_bytes >= LEAST_STEPS_BYTES:
            growth = cut_window(survey, begin)
            if _sum_at_level_load(growth) >= LEAST_STEPS * growth.typical_step_bytes:
                yield growth


def _sum_at_level_load(growth: Growth) -> float:
    """Return the bytes of the rises in blocks without a new peak of load."""
    rises = zip(pairwise(growth.blocks), growth.rises_bytes, strict=True)
    return sum(
        [
            rise_bytes
            for (previous, block), rise_bytes in rises
            if block.peak_running <= previous.peak_running
        ]
    )


SAME_SIZE_BYTES: Final = 2 * MIB
"""Steps that differ by at most the allocator's smallest step are of one size."""

RECORD_RATIO: Final = 1.04
"""A step is a record if it is larger than the largest before it by more than this ratio."""

REPEATED_BYTES: Final = 96 * MIB
"""A repeated size is evidence from here on. Slots, graphs and kernels repeat too, but are
smaller."""

REPEATED_ODDS: Final = 2.0
"""What a repeated size adds to the odds, per e-fold above `REPEATED_BYTES`. Fitted to simulated
days, as are the three that follow."""

MOST_REPEATED_ODDS: Final = 6.0
"""What a repeated size adds at most."""

SMALLER_ODDS: Final = 0.5
"""What a step adds that is smaller than some before it."""

RECORD_ODDS: Final = -1.0
"""What a step adds that is larger than all before it."""


def score_likeness(steps: tuple[Step, ...], since_seconds: float, least_bytes: float) -> float:
    """Return what the sizes of the steps add to the odds of a leak, as a log likelihood ratio.

    Records exceed all before them: the allocator takes a new segment for a demand that fits into no
    cached one. A leak has one kind and size. Only steps of at least so many bytes are compared, and
    only those after a time count.
    """
    odds = 0.0
    earlier_bytes: list[float] = []
    for step in steps:
        if step.size_bytes < least_bytes:
            continue
        if step.seconds > since_seconds:
            odds += _weigh_size(step.size_bytes, earlier_bytes)
        earlier_bytes.append(step.size_bytes)
    return odds


def _weigh_size(size_bytes: float, earlier_bytes: list[float]) -> float:
    largest_bytes = max(earlier_bytes, default=0.0)
    if size_bytes <= largest_bytes:  # a new largest size is no repetition
        for other_bytes in earlier_bytes:
            if abs(size_bytes - other_bytes) <= SAME_SIZE_BYTES:
                folds = log(size_bytes / REPEATED_BYTES)
                return min(MOST_REPEATED_ODDS, max(0.0, REPEATED_ODDS * folds))
    if size_bytes < largest_bytes:
        return SMALLER_ODDS
    if size_bytes > RECORD_RATIO * largest_bytes:
        return RECORD_ODDS
    return 0.0


GROWING_ODDS: Final = log(12)
"""Twelve to one that growth continues by time, and not by folds of work as before: a warning."""

LEAKING_ODDS: Final = log(8)
"""For an alarm eight to one is enough if the steps look like a leak's."""

SURE_OF_STEPS: Final = 9.0
"""For an alarm: the odds plus the steps' likeness to a leak."""

LEAKING_ODDS_WHERE_FULL: Final = log(3)
"""If a step as large as the largest no longer fits, three to one: few engines with bounded growth
fill up so far."""

SURE_OF_STEPS_WHERE_FULL: Final = 6.0
"""The odds plus the likeness in that case."""

COMPARED_SHARE: Final = 0.05
"""Steps of at least a twentieth of the growth are compared."""

YOUNG_SECONDS: Final = 4 * HOUR_SECONDS
"""No alarm so early, and no warning in its first half: caches fill evenly too."""

LATE_SHARE: Final = 2.0
"""Growth that lasted for this multiple of the time left is an alarm even when young, and whatever
load does: two thirds of the room are gone."""

ROOM_SHARE: Final = 0.25
"""For an alarm, a quarter of the room must be gone."""

ENOUGH_BYTES: Final = 1536 * MIB
"""Or so much that few caches are as large."""

WARNING_SHARE: Final = 0.25
"""A warning comes after this share of the time left."""


def judge_steps(
    growth: Growth, track: Track, origin: Block, room_bytes: float | None
) -> tuple[Certainty, float]:
    """Return the verdict on a window that begins with a step, and its evidence as log odds.

    Growing: it lasted for a quarter of the time left, at most a day. Leaking: steps at a pace that
    does not slow down, of repeated sizes, once a quarter of the room is gone. An unknown room is
    taken as what was held at first.
    """
    odds = weigh_pace(growth, origin)
    grown_bytes = growth.grown_bytes
    lasted_seconds = growth.lasted_seconds
    age_seconds = track.clock.now_seconds - origin.seconds
    # Without a known room, memory is full when it has doubled.
    assumed_room_bytes = origin.floor_bytes if room_bytes is None else max(1.0, room_bytes)
    left_seconds = assumed_room_bytes / grown_bytes * lasted_seconds

    # Caches fill in steps too, but few take so much, and most early in a run.
    enough_bytes = min(ENOUGH_BYTES, ROOM_SHARE * (assumed_room_bytes + grown_bytes))
    is_late = room_bytes is not None and lasted_seconds >= LATE_SHARE * left_seconds
    # The largest step no longer fits: less evidence is enough, because bounded growth rarely gets
    # so far.
    is_full = room_bytes is not None and assumed_room_bytes <= max(growth.rises_bytes)
    leaking_odds = LEAKING_ODDS_WHERE_FULL if is_full else LEAKING_ODDS
    sure_odds = SURE_OF_STEPS_WHERE_FULL if is_full else SURE_OF_STEPS
    may_be_leak = odds >= leaking_odds and grown_bytes >= enough_bytes
    has_lasted = lasted_seconds >= compute_patience(left_seconds)
    if may_be_leak and has_lasted and (age_seconds >= YOUNG_SECONDS or is_late):
        # Scored last, because it compares all pairs of steps.
        steps = tuple(step for step in track.history.steps if step.seconds > origin.seconds)
        likeness = score_likeness(steps, growth.blocks[0].seconds, COMPARED_SHARE * grown_bytes)
        if odds + likeness >= sure_odds:
            return Certainty.LEAKING, odds + likeness

    # A warning needs the pace alone, and that the device would be full within a day.
    is_soon = left_seconds <= DAY_SECONDS and lasted_seconds >= WARNING_SHARE * left_seconds
    if odds >= GROWING_ODDS and age_seconds >= YOUNG_SECONDS / 2 and is_soon:
        return Certainty.GROWING, odds
    return Certainty.NONE, odds
