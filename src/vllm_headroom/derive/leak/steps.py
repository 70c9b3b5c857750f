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
"""The least growth of a window that is judged by its large steps."""

LEAST_STEPS: Final = 1.8
"""The growth of a window must be at least this many times its typical step: a single step shows no
pace."""


def find_step_windows(survey: RingSurvey) -> Iterator[Growth]:
    """Yield each window that begins with a rise and has the growth of about two large steps.

    The shortest window comes first. Of the growth, rises in blocks with a new peak of load do not
    count: load explains them. Nothing is yielded where no window is large enough.
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
"""A repeated size below this is no evidence: slots, graphs and kernels repeat too, but are
smaller."""

REPEATED_ODDS: Final = 2.0
"""What a step of a repeated size adds to the log odds, for each e-fold above `REPEATED_BYTES`.
Fitted to simulated days, as are the next three constants."""

MOST_REPEATED_ODDS: Final = 6.0
"""The most that a step of a repeated size adds to the log odds."""

SMALLER_ODDS: Final = 0.5
"""What a step adds to the log odds that is smaller than the largest before it."""

RECORD_ODDS: Final = -1.0
"""What a step adds to the log odds that is larger than all before it."""


def score_likeness(steps: tuple[Step, ...], since_seconds: float, least_bytes: float) -> float:
    """Return what the sizes of the steps add to the odds of a leak, as a log likelihood ratio.

    Benign steps are records, larger than all before them: the allocator takes a new segment for a
    demand that fits into no cached one. The steps of a leak are of one kind and size. Only steps of
    at least `least_bytes` are compared, and only those after `since_seconds` add to the result.
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
    """Return what one step adds: as a repeated size, as a smaller one, as a record, or nothing."""
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
"""The least log odds of the pace for a warning: twelve to one that growth comes by time or
requests, and not by e-folds of work."""

LEAKING_ODDS: Final = log(8)
"""The least log odds of the pace for an alarm: eight to one is enough if the sizes of the steps are
like a leak's."""

SURE_OF_STEPS: Final = 9.0
"""The least sum, for an alarm, of the log odds of the pace and of the sizes of the steps."""

LEAKING_ODDS_WHERE_FULL: Final = log(3)
"""In place of LEAKING_ODDS where a step as large as the largest no longer fits: few engines with
bounded growth fill the memory so far."""

SURE_OF_STEPS_WHERE_FULL: Final = 6.0
"""In place of SURE_OF_STEPS in the same case."""

COMPARED_SHARE: Final = 0.05
"""The sizes of steps below this share of the growth are not compared."""

YOUNG_SECONDS: Final = 4 * HOUR_SECONDS
"""There is no alarm before this time since the origin, and no warning before half of it: caches
fill evenly too."""

LATE_SHARE: Final = 2.0
"""Growth that lasted for this multiple of the time left is an alarm even earlier, and whatever load
does: two thirds of the room are gone."""

ROOM_SHARE: Final = 0.25
"""For an alarm, the growth must have taken this share of the room, or ENOUGH_BYTES if that is
less."""

ENOUGH_BYTES: Final = 1536 * MIB
"""Few caches are as large as this."""

WARNING_SHARE: Final = 0.25
"""A warning comes once growth has lasted for this share of the time left."""


def judge_steps(
    growth: Growth, track: Track, origin: Block, room_bytes: float | None
) -> tuple[Certainty, float]:
    """Return the verdict on a window that begins with a step, and its evidence as log odds.

    GROWING means that the pace does not slow down, and that growth has lasted for a quarter of the
    time left, which is at most a day. LEAKING means that besides, the sizes of the steps repeat,
    and enough of the room is gone. Where the room is unknown, it is assumed to be as large as the
    memory that was held at first.
    """
    odds = weigh_pace(growth, origin)
    grown_bytes = growth.grown_bytes
    lasted_seconds = growth.lasted_seconds
    age_seconds = track.clock.now_seconds - origin.seconds
    # Where the room is unknown, memory is assumed to be full when it has doubled.
    assumed_room_bytes = origin.floor_bytes if room_bytes is None else max(1.0, room_bytes)
    left_seconds = assumed_room_bytes / grown_bytes * lasted_seconds

    # Caches fill in steps too, but few take so much, and most early in a run.
    enough_bytes = min(ENOUGH_BYTES, ROOM_SHARE * (assumed_room_bytes + grown_bytes))
    is_late = room_bytes is not None and lasted_seconds >= LATE_SHARE * left_seconds
    # A step as large as the largest no longer fits: less evidence is enough, because bounded growth
    # rarely gets so far.
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
