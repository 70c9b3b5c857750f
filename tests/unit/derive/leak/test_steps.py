"""The steps by which memory grew, what is left of them, and what their sizes say."""

from __future__ import annotations

import pytest

from tests.unit.derive.leak.stretches import BASE, HOUR, STEP, TOTAL, Shape, follow, readings
from vllm_headroom.derive.leak.facts import Block, Certainty, MemoryStep, Observation, Ring
from vllm_headroom.derive.leak.growth_evidence import find_step_windows, score_likeness, survey_ring
from vllm_headroom.derive.leak.track import NEWEST_STEPS
from vllm_headroom.units import MIB


@pytest.mark.parametrize(
    ("held_mib", "sizes"),
    [
        ((0, 100, 100, 400), (100, 300)),
        ((0, 20, 40, 60), ()),
        ((0, 100, 400, 250), (100, 150)),
        ((0, 100, 400, 120), (100,)),
        ((0, 100, 400, 60, 400), (60, 340)),
        ((0, 100, 400, 0), ()),
        (tuple(range(0, 50 * 60, 50)), (50,) * NEWEST_STEPS),
    ],
)
def test_a_step_is_what_was_not_given_back_of_a_large_rise_and_the_newest_are_kept(
    held_mib: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    observations = (Observation(seconds=60.0 * at, held_bytes=BASE + mib * MIB) for at, mib in enumerate(held_mib))

    assert tuple(round(step.size_bytes / MIB) for step in follow(observations).track.history.steps) == sizes


def test_a_step_of_what_a_sleep_gave_back_is_none_of_memory_that_comes_again() -> None:
    """Else torch's cache, filled again after each sleep, has the sizes of a leak."""
    steps_mib = [(0, True), (500, True), (0, False), (100, True), (600, True)]
    observations = [
        Observation(seconds=60.0 * at, held_bytes=BASE + mib * MIB, awake=up) for at, (mib, up) in enumerate(steps_mib)
    ]

    assert [round(step.size_bytes / MIB) for step in follow(observations).track.history.steps] == [100, 500]


def test_what_fills_again_what_was_held_before_is_no_second_step() -> None:
    """Two steps of 900 MiB, of which the first only reaches what was held before the valley."""

    def windows(before_mib: int) -> int:
        floors = [before_mib, *[0] * 8, 900, 1_800]
        blocks = tuple(Block(at * 960.0, at * 960.0, at * 960.0, mib * MIB) for at, mib in enumerate(floors, start=1))
        survey = survey_ring(Ring(blocks=blocks), blocks[0])
        return 0 if survey is None else len(tuple(find_step_windows(survey)))

    assert windows(0) == 1
    assert windows(900) == 0


def weight(*sizes_mib: float, since_hours: int = 1) -> float:
    steps = tuple(MemoryStep(number * HOUR, size * MIB, 0.0) for number, size in enumerate(sizes_mib, start=1))
    return score_likeness(steps, since_seconds=since_hours * HOUR, least_bytes=30 * MIB)


def test_sizes_that_come_again_speak_for_a_leak_the_larger_the_more_and_records_against_one() -> None:
    assert weight(500, 530, 560, 600) == -3.0
    assert weight(500, 500, 500, 500) > 7.0
    assert 0 < weight(120, 121, 119, 120) < weight(500, 501, 499, 500)
    assert weight(60, 60, 60) == 0.0
    assert weight(500, 300, 400, 200) == 1.5
    assert weight(500, 20, 20) == 0.0
    assert weight(466, 468, 470, 472) == 0.0


@pytest.mark.parametrize("minutes", [40.0, 75.0])
def test_steps_of_one_size_are_reported_before_steps_of_sizes_between(minutes: float) -> None:
    def stairs(sizes: list[int]) -> Shape:
        return lambda seconds: MIB * sum(sizes[: int(seconds / (minutes * 60))])

    equal = follow(readings(stairs([400] * 20), 14)).first(Certainty.LEAKING)
    unequal = follow(readings(stairs([400, 310, 480, 350, 430, 370, 460, 330, 410] * 3), 14)).first(Certainty.LEAKING)

    assert equal is not None
    assert unequal is None or equal < unequal


def test_steps_of_any_size_are_reported_once_no_further_one_finds_room() -> None:
    sizes = (1300, 1200, 1250, 1150, 1100)

    def stairs(seconds: float) -> float:
        return MIB * sum(sizes[: int(seconds / (1.5 * HOUR))])

    course = follow(readings(stairs, 14))
    alarm = course.first(Certainty.LEAKING)

    assert alarm is not None
    assert alarm > 5 * 1.5


@pytest.mark.parametrize(
    ("left_mib", "kept_ratio", "hours", "verdict"),
    [
        pytest.param(2000, 0.02, 8.5, Certainty.NONE, id="nearly all is given back"),
        pytest.param(2000, 0.1, 9.0, Certainty.NONE, id="most is given back, and nothing rises"),
        pytest.param(2000, 0.6, 8.5, Certainty.LEAKING, id="less than half"),
        pytest.param(300, -0.05, 8.5, Certainty.LEAKING, id="a full card gives back its cache"),
        pytest.param(300, -0.05, 9.5, Certainty.NONE, id="and nothing has grown since"),
        pytest.param(2000, 1.0, 9.5, Certainty.NONE, id="nothing grows"),
        pytest.param(20, 1.0, 16.0, Certainty.LEAKING, id="nothing grows on a card without room"),
    ],
)
def test_an_alarm_ends_when_most_is_given_back_and_on_a_full_card_when_nothing_grows_for_long(
    left_mib: int, kept_ratio: float, hours: float, verdict: Certainty
) -> None:
    leaked = TOTAL - BASE - left_mib * MIB

    def shape(seconds: float) -> float:
        grown = min(leaked, seconds / (8 * HOUR) * leaked)
        return grown if seconds < 8.1 * HOUR else kept_ratio * grown

    course = follow(readings(shape, hours))

    assert course.verdicts[int(8 * HOUR / STEP)] is Certainty.LEAKING
    assert course.verdicts[-1] is verdict
