"""Load that is higher than ever before makes its own demands: what grows with it is no leak."""

from __future__ import annotations

from math import exp

import pytest
from msgspec.structs import replace

from tests.unit.derive.leak.stretches import BASE, HOUR, TOTAL, Course, Shape, changed, follow, leak, readings, segments
from vllm_headroom.derive.leak.facts import Certainty
from vllm_headroom.units import MIB

DOUBLED = 6 * HOUR
STEP_HOURS = 0.6
STEP_BYTES = 900 * MIB


def steps(step_count: int) -> Shape:
    """Return so many steps, 36 minutes apart, of which the first comes as long after the load."""
    return lambda seconds: STEP_BYTES * max(0, min(step_count, int((seconds - DOUBLED) / HOUR / STEP_HOURS)))


def follow_load(shape: Shape, hours: float, running: float) -> Course:
    """Follow memory under 80 requests at once, and under so many from the sixth hour on."""
    observations = changed(readings(shape, hours), lambda _: True, running=80.0)
    return follow(changed(observations, lambda observation: observation.seconds >= DOUBLED, running=running))


def test_the_first_large_steps_of_a_doubled_load_are_no_alarm_and_at_a_level_load_they_are_one() -> None:
    assert follow_load(steps(4), 10.0, 80.0).worst is Certainty.LEAKING
    assert follow_load(steps(4), 10.0, 119.0).worst is Certainty.LEAKING
    assert follow_load(steps(4), 10.0, 161.0).worst < Certainty.LEAKING


def test_steps_before_and_after_a_higher_load_count_together() -> None:
    observations = changed(readings(lambda seconds: 5 / 9 * steps(4)(seconds), 9.0), lambda _: True, running=80.0)
    higher = DOUBLED + 2.5 * STEP_HOURS * HOUR

    course = follow(changed(observations, lambda observation: observation.seconds >= higher, running=110.0))

    assert course.worst is Certainty.LEAKING


def test_steps_that_go_on_at_a_doubled_load_are_an_alarm() -> None:
    alarm = follow_load(steps(7), 12.0, 161.0).first(Certainty.LEAKING)

    assert alarm is not None
    assert alarm * HOUR - DOUBLED < 5.5 * HOUR


def test_just_after_load_doubled_growth_proves_as_little_as_after_a_start() -> None:
    def late(seconds: float) -> float:
        return leak(max(0.0, seconds - DOUBLED))

    level, doubled = (follow_load(late, 7.0, running).first(Certainty.GROWING) for running in (80.0, 161.0))

    assert level is not None
    assert doubled is not None
    assert 1 / 60 < doubled - level < 0.2


def test_a_warm_up_before_load_doubled_still_counts_against_an_alarm() -> None:
    """Else a host's heap is a leak whenever load has doubled."""

    def warm_up(seconds: float) -> float:
        return segments(2_000 * MIB * (1 - exp(-seconds / HOUR / 0.3)) + 40 * MIB * max(0.0, seconds / HOUR - 2))

    def first_alarm(running: float) -> float | None:
        observations = changed(readings(warm_up, 14.0), lambda _: True, running=80.0)
        return follow(
            changed(observations, lambda observation: observation.seconds >= 2 * HOUR, running=running)
        ).first(Certainty.LEAKING)

    level, doubled = first_alarm(80.0), first_alarm(161.0)

    assert level is not None
    assert doubled is not None
    assert doubled >= level


def climbing(seconds: float) -> float:
    """Return requests that run at once: 90 until the second hour, then 90 more within eight."""
    return 90.0 + int(90 * min(1.0, max(0.0, seconds / HOUR - 2) / 8))


def each_of(requests: int, size: int) -> Shape:
    """Return steps of a size, one for so many requests that run at once more than at first."""
    return lambda seconds: size * ((climbing(seconds) - 90) // requests)


@pytest.mark.parametrize(("requests", "size"), [(3, 120 * MIB), (1, 20 * MIB)], ids=["large steps", "small ones"])
def test_what_grows_with_each_new_peak_of_load_is_no_alarm_and_at_a_level_load_it_is_one(
    requests: int, size: int
) -> None:
    observations = tuple(readings(each_of(requests, size), 10.0))

    assert follow(replace(observation, running=90.0) for observation in observations).worst is Certainty.LEAKING
    assert (
        follow(replace(observation, running=climbing(observation.seconds)) for observation in observations).worst
        < Certainty.LEAKING
    )


def test_a_leak_beneath_load_that_climbs_is_an_alarm_once_load_is_level() -> None:
    observations = (replace(observation, running=climbing(observation.seconds)) for observation in readings(leak, 12.0))

    assert follow(observations).worst is Certainty.LEAKING


def test_equal_chunks_that_fill_a_small_card_for_hours_are_an_alarm_whatever_load_does() -> None:
    """A driver's chunk each quarter of an hour, while ever more requests run: no block proves anything by itself."""

    def chunks(seconds: float) -> float:
        return TOTAL - BASE - 864 * MIB + 32 * MIB * (seconds // 960)

    observations = (
        replace(observation, running=20.0 + observation.seconds // 960) for observation in readings(chunks, 7.0)
    )

    alarm = follow(observations).first(Certainty.LEAKING)

    assert alarm is not None
    assert alarm < 5.0
