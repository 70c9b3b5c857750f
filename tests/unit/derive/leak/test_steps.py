"""The steps by which memory grew, what is left of them, and what their sizes say."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.unit.derive.leak.stretches import BASE, HOUR, TOTAL, Shape, follow, readings
from vllm_headroom.derive.leak.facts import MIB, Certainty, Step
from vllm_headroom.derive.leak.steps import NEWEST_STEPS, add_step, score_likeness


def seen(*held_mib: float, apart: float = 60.0) -> tuple[int, ...]:
    """Return the sizes of the steps, in MiB, of readings so far apart."""
    steps: tuple[Step, ...] = ()
    for number, (before, held) in enumerate(pairwise(held_mib), start=1):
        steps = add_step(steps, number * apart, before * MIB, held * MIB)
    return tuple(round((step.top_bytes - step.bottom_bytes) / MIB) for step in steps)


@pytest.mark.parametrize(
    ("held", "sizes"),
    [
        ((0, 100, 100, 400), (100, 300)),
        ((0, 20, 40, 60), ()),
        ((0, 100, 400, 250), (100, 150)),
        ((0, 100, 400, 110), (100,)),
        ((0, 100, 400, 0), ()),
        ((0, 100, 50, 350, 340), (50, 290)),
    ],
)
def test_a_step_is_a_large_rise_and_what_is_given_back_is_no_step(
    held: tuple[float, ...], sizes: tuple[int, ...]
) -> None:
    assert seen(*held) == sizes


def test_the_newest_steps_are_kept() -> None:
    assert len(seen(*range(0, 50 * 60, 50))) == NEWEST_STEPS


def weight(*sizes_mib: float, before: int = 1) -> float:
    steps = tuple(Step(number * HOUR, 0.0, size * MIB) for number, size in enumerate(sizes_mib, start=1))
    return score_likeness(steps, since=before * HOUR, least_bytes=30 * MIB)


def test_sizes_that_come_again_speak_for_a_leak_the_larger_the_more_and_records_against_one() -> None:
    assert weight(500, 530, 560, 600) == -3.0
    assert weight(500, 500, 500, 500) > 7.0
    assert 0 < weight(120, 121, 119, 120) < weight(500, 501, 499, 500)
    assert weight(60, 60, 60) == 0.0
    assert weight(500, 300, 400, 200) == 1.5
    assert weight(500, 20, 20) == 0.0
    assert weight(466, 468, 470, 472) == 0.0


def test_a_part_of_an_event_that_comes_again_in_a_later_one_speaks_for_a_leak_and_not_within_one() -> None:
    def events(*parts_mib: tuple[int, int]) -> float:
        steps: tuple[Step, ...] = ()
        for number, parts in enumerate(parts_mib):
            held = 0.0
            for part in parts:
                seconds = HOUR * number + 20.0 * len(steps)
                steps, held = (*steps, Step(seconds, held, held + part * MIB)), held + part * MIB
        return score_likeness(steps, since=HOUR / 2, least_bytes=30 * MIB)

    assert events((546, 684), (660, 684)) > 3.5
    assert events((546, 680), (660, 690)) == -1.0
    assert events((10, 11), (684, 684)) == -1.0


@pytest.mark.parametrize("minutes", [40.0, 75.0])
def test_steps_of_one_size_are_told_before_steps_of_sizes_between(minutes: float) -> None:
    def stairs(sizes: list[int]) -> Shape:
        return lambda seconds: MIB * sum(sizes[: int(seconds / (minutes * 60))])

    equal = follow(readings(stairs([400] * 20), 14)).first(Certainty.LEAKING)
    unequal = follow(readings(stairs([400, 310, 480, 350, 430, 370, 460, 330, 410] * 3), 14)).first(Certainty.LEAKING)

    assert equal is not None
    assert unequal is None or equal < unequal


def test_steps_of_any_size_are_told_once_no_further_one_finds_room() -> None:
    sizes = (1300, 1200, 1250, 1150, 1100)

    def stairs(seconds: float) -> float:
        return MIB * sum(sizes[: int(seconds / (1.5 * HOUR))])

    course = follow(readings(stairs, 14))
    alarm = course.first(Certainty.LEAKING)

    assert alarm is not None
    assert alarm > 5 * 1.5


@pytest.mark.parametrize(("kept", "verdict"), [(0.1, Certainty.NONE), (0.5, Certainty.LEAKING)])
def test_an_alarm_ends_when_the_allocator_gives_back_most_of_what_has_grown(kept: float, verdict: Certainty) -> None:
    leaked = TOTAL - BASE - 300 * MIB

    def shape(seconds: float) -> float:
        grown = min(leaked, seconds / (8 * HOUR) * leaked)
        return grown if seconds < 8.1 * HOUR else kept * grown

    course = follow(readings(shape, 8.5))

    assert course.verdicts[-100] is Certainty.LEAKING
    assert course.verdicts[-1] is verdict
