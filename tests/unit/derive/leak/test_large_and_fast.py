"""Leaks that evidence by blocks is too slow for: a few large steps, and growth of minutes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from tests.unit.derive.leak.stretches import BASE, HOUR, TOTAL, Shape, changed, follow, leak, readings, segments
from vllm_headroom.derive.leak.facts import Certainty, Observation
from vllm_headroom.units import MIB

MINUTE = 60.0
FAST = 10e6
"""Bytes per second: the room is full in eleven minutes."""


def steps(size: int, minutes: float) -> Shape:
    return lambda seconds: segments(size) * int(seconds / (minutes * MINUTE))


def every_5_seconds(shape: Shape, hours: float) -> Iterator[Observation]:
    for number in range(int(hours * 720)):
        held_bytes = int(BASE + shape(number * 5.0))
        yield Observation(
            seconds=number * 5.0,
            held_bytes=held_bytes,
            finished_total=number * 50.0,
            run_id="1",
            room_bytes=max(0, TOTAL - held_bytes),
        )


def since(hours: float, shape: Shape) -> Shape:
    return lambda seconds: shape(max(0.0, seconds - hours * HOUR))


@pytest.mark.parametrize(
    ("size", "minutes", "highest_share"), [(256 * MIB, 40, 0.5), (512 * MIB, 75, 0.5), (1536 * MIB, 150, 0.75)]
)
def test_a_few_large_steps_are_a_leak_between_1_5_gib_and_half_the_room_or_at_the_third(
    size: int, minutes: float, highest_share: float
) -> None:
    course = follow(readings(steps(size, minutes), 15))

    alarm_hours = course.first(Certainty.LEAKING)

    assert alarm_hours is not None
    assert 0.23 < steps(size, minutes)(alarm_hours * HOUR) / (TOTAL - BASE) < highest_share


def test_the_interval_of_a_leak_in_large_steps_does_not_reach_below_zero() -> None:
    course = follow(readings(steps(512 * MIB, 75), 15))

    assert course.alarm is not None
    assert 0 <= course.alarm.lower < 512 * MIB / (75 * MINUTE) < course.alarm.upper


@pytest.mark.parametrize("noise", [0, MIB // 2])
def test_equal_steps_of_a_gigabyte_are_a_leak_at_the_third_though_they_come_a_little_rarer(noise: int) -> None:
    """Also where it moves a little from reading to reading, as a process's memory does."""
    when = [sum(1.5**earlier for earlier in range(number + 1)) for number in range(4)]

    def stairs(seconds: float) -> float:
        return 954 * MIB * sum(seconds > hour * HOUR for hour in when) + noise * (seconds // 15 % 2)

    course = follow(readings(stairs, 10))

    alarm_hours = course.first(Certainty.LEAKING)
    assert alarm_hours is not None
    assert when[2] < alarm_hours < when[2] + 0.5


def test_large_steps_that_become_rarer_are_not_a_leak() -> None:
    when = [0.1 * 3.0**number for number in range(5)]

    course = follow(readings(lambda seconds: 500 * MIB * sum(seconds > hour * HOUR for hour in when), 15))

    assert course.worst is not Certainty.LEAKING


def test_a_leak_in_large_steps_stays_an_alarm_when_load_doubles() -> None:
    course = follow(
        replace(observation, running=10.0 if observation.seconds < 10 * HOUR else 25.0)
        for observation in readings(steps(300 * MIB, 40), 13)
    )

    alarm_start = course.verdicts.index(Certainty.LEAKING)
    assert alarm_start * 15.0 < 10 * HOUR
    assert set(course.verdicts[alarm_start:]) == {Certainty.LEAKING}


def test_steps_that_each_outgrow_the_last_are_records_and_no_leak_and_equal_ones_are() -> None:
    sizes = [MIB * size for size in (20, 440, 450, 486, 508, 516, 550, 556, 602)]

    def stairs(sizes: list[int]) -> Shape:
        return lambda seconds: sum(sizes[: int(seconds / (75 * MINUTE))])

    records = follow(readings(stairs(sizes), 12))
    leak = follow(readings(stairs([sizes[0], *[486 * MIB] * 8]), 12))

    assert records.worst is Certainty.GROWING
    assert leak.worst is Certainty.LEAKING


def test_slots_that_fill_up_to_a_fifth_of_the_room_are_not_a_leak() -> None:
    def slots(seconds: float) -> float:
        return min(1300 * MIB, steps(256 * MIB, 40)(seconds))

    course = follow(readings(slots, 15))

    assert course.worst is not Certainty.LEAKING
    assert course.verdicts[-1] is Certainty.NONE


def test_two_unequal_jumps_after_hours_without_growth_are_no_pace() -> None:
    def jumps(seconds: float) -> float:
        return 400 * MIB * (seconds > 9 * HOUR) + 2600 * MIB * (seconds > 11 * HOUR)

    assert follow(readings(jumps, 14)).worst is Certainty.NONE


def test_memory_that_was_given_back_and_is_taken_again_in_large_steps_is_no_growth() -> None:
    def taken_again(seconds: float) -> float:
        once = 3000 * MIB * (0.5 * HOUR < seconds < 8 * HOUR)
        return once + min(3000 * MIB, steps(500 * MIB, 25)(max(0.0, seconds - 8 * HOUR)))

    assert follow(readings(taken_again, 14)).worst is Certainty.NONE


def test_large_steps_that_end_within_the_first_hours_of_a_run_are_not_a_leak() -> None:
    def slots(seconds: float) -> float:
        return min(2560 * MIB, steps(512 * MIB, 30)(seconds))

    assert follow(readings(slots, 8)).worst is Certainty.GROWING


@pytest.mark.parametrize("ramp", [30.0, 120.0, 280.0])
def test_a_start_and_a_wake_are_not_taken_for_fast_growth(ramp: float) -> None:
    def start(seconds: float) -> float:
        return -0.4 * BASE * max(0.0, 1 - seconds / ramp)

    def wake(seconds: float) -> float:
        return start(seconds - HOUR) if seconds > HOUR else 0.0

    assert follow(every_5_seconds(start, 0.5)).worst is Certainty.NONE
    assert follow(every_5_seconds(wake, 1.5)).worst is Certainty.NONE


@pytest.mark.parametrize(("rate", "highest_share"), [(5e6, 0.5), (8e6, 0.55), (16e6, 0.95)])
def test_a_heavy_leak_from_the_start_on_is_an_alarm_before_the_card_is_full(rate: float, highest_share: float) -> None:
    full_after = (TOTAL - BASE) / rate

    course = follow(every_5_seconds(lambda seconds: seconds * rate, full_after / HOUR))

    assert Certainty.LEAKING in course.verdicts
    assert course.verdicts.index(Certainty.LEAKING) * 5.0 < highest_share * full_after
    assert course.alarm is not None
    assert course.alarm.bytes_per_second == pytest.approx(rate, rel=0.05)


def test_a_warm_up_that_takes_half_of_the_room_is_none_though_each_block_rises() -> None:
    lumps = 30, 30, 900, 30, 30, 200, 30, 600, 30, 30, 700, 30, 30, 400, 30, 300

    def warm_up(seconds: float) -> float:
        return MIB * sum(lumps[: int(seconds / 30)])

    assert follow(every_5_seconds(warm_up, 1)).worst is Certainty.NONE


def test_a_rise_that_slows_down_is_not_fast_growth() -> None:
    def fill(seconds: float) -> float:
        return 1500 * MIB * (1 - float(0.5 ** (max(0.0, seconds - HOUR) / 10)))

    assert follow(every_5_seconds(fill, 1.2)).worst is Certainty.NONE


def test_segments_taken_at_random_times_are_first_uses_and_no_fast_growth() -> None:
    when = [3615.0 + delay_seconds for delay_seconds in (0, 15, 35, 60, 70, 155, 170, 175, 185, 200, 255, 260)]

    def full_card(seconds: float) -> float:
        return TOTAL - BASE - 700 * MIB + 20 * MIB * sum(seconds >= segment_seconds for segment_seconds in when)

    assert follow(every_5_seconds(full_card, 1.1)).worst is Certainty.NONE


def test_fast_growth_in_the_lumps_of_what_it_displaces_is_a_leak_within_minutes() -> None:
    lumps = 448, 90, 0, 0, 356, 0, 0, 224, 0, 80, 0, 84, 0, 0, 88, 18, 544, 224, 0, 0, 112, *[0, 224] * 2, *[0] * 5

    def lumpy(seconds: float) -> float:
        return MIB * sum(lumps[number % len(lumps)] for number in range(int(max(0.0, seconds - HOUR) / 5)))

    course = follow(every_5_seconds(lumpy, 1.08))

    assert Certainty.LEAKING in course.verdicts
    assert course.verdicts.index(Certainty.LEAKING) * 5.0 <= HOUR + 240


def test_an_alarm_is_held_when_the_allocator_gives_back_its_cache_before_the_end() -> None:
    full = TOTAL - BASE

    def flushed(seconds: float) -> float:
        grown = leak(2 * seconds) + 1500 * MIB
        return grown if grown < full - 300 * MIB else grown - 1200 * MIB

    hours = (full - 300 * MIB - 1500 * MIB) / (2 * 128_000) / HOUR
    course = follow(readings(flushed, hours + 1))

    alarm_start = next(number for number, verdict in enumerate(course.verdicts) if verdict is Certainty.LEAKING)
    assert set(course.verdicts[alarm_start:]) == {Certainty.LEAKING}
    assert course.track.estimate is not None
    assert course.track.estimate.oom_seconds is not None
    assert course.track.estimate.bytes_per_second == pytest.approx(256_000, rel=0.7)


def test_a_neighbour_that_takes_the_room_makes_no_leak_of_a_little_growth() -> None:
    squeezed = (
        replace(
            observation,
            room_bytes=max(0, int(TOTAL - (observation.held_bytes or 0) - 0.05 * MIB * observation.seconds)),
        )
        for observation in readings(lambda seconds: segments(min(seconds, 4 * HOUR) / HOUR * 30 * MIB), 12)
    )

    assert follow(squeezed).verdicts[-1] is not Certainty.LEAKING


def test_growth_is_found_although_the_requests_of_two_servers_answer_in_turn() -> None:
    def first(observation: Observation) -> bool:
        return int(observation.seconds / 15) % 2 == 0

    course = follow(changed_total(readings(leak, 3), lambda observation: 0.53 if first(observation) else 0.47))

    assert course.verdicts[-1] is Certainty.LEAKING


def test_a_counter_that_was_reset_within_one_run_does_not_begin_it_again() -> None:
    observations = list(readings(leak, 3))
    at = observations[len(observations) // 2].finished_total or 0.0
    reset = changed(observations[len(observations) // 2 :], lambda _: True)
    later_observations = (
        replace(observation, finished_total=(observation.finished_total or 0.0) - at) for observation in reset
    )

    course = follow([*observations[: len(observations) // 2], *later_observations])

    alarm_start = course.verdicts.index(Certainty.LEAKING)
    assert set(course.verdicts[alarm_start:]) == {Certainty.LEAKING}
    assert course.track.work.requests_per_second == pytest.approx(10.0, rel=0.1)


def changed_total(observations: Iterator[Observation], share: object) -> Iterator[Observation]:
    for observation in observations:
        yield replace(observation, finished_total=round((observation.finished_total or 0.0) * share(observation)))  # type: ignore[operator]


def test_an_alarm_waits_the_longer_the_more_of_the_growth_is_single_large_steps() -> None:
    def stepped(seconds: float) -> float:
        return leak(seconds) + 300 * MIB * int(seconds / (HOUR / 3))

    alone, beneath = (follow(readings(shape, 4)).first(Certainty.LEAKING) for shape in (leak, stepped))

    assert alone is not None
    assert beneath is not None
    assert alone <= beneath < 2 * alone


def test_one_large_demand_early_in_a_leak_does_not_put_the_alarm_off() -> None:
    """A long prompt takes 300 MiB after 18 minutes: unless rises are clipped, the later half lacks its share."""

    def shape(seconds: float) -> float:
        return leak(seconds) + (300 * MIB if seconds > 0.3 * HOUR else 0)

    alone, beneath = (follow(readings(growth_shape, 1.5)).first(Certainty.LEAKING) for growth_shape in (leak, shape))

    assert alone is not None
    assert beneath == alone


def test_one_large_rise_does_not_bring_the_end_nearer() -> None:
    """Else 90 MiB an hour with 4 GiB of room would be an alarm after a single demand of 2,400 MiB."""

    def shape(seconds: float) -> float:
        return segments(seconds * 90 * MIB / HOUR) + (2_400 * MIB if seconds > 1.2 * HOUR else 0)

    assert Certainty.LEAKING not in follow(readings(shape, 2.5)).verdicts


def test_the_slowest_tooth_of_a_sawtooth_is_no_leak_in_steps() -> None:
    """A collector runs every quarter of an hour, and once late; it gives back more each time than the growth."""

    def shape(seconds: float) -> float:
        late = seconds - 8 * HOUR
        return segments(late * 0.9 * MIB if 0 <= late < HOUR else seconds % 900 * 3.4 * MIB, 256 * MIB)

    assert Certainty.LEAKING not in follow(readings(shape, 9.2)).verdicts[int(1.5 * HOUR / 15) :]
