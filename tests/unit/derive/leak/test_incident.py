"""One leak is one incident: it is held through pauses, and ends when its growth has ended or was given back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from msgspec.structs import replace

from tests.unit.derive.leak.stretches import HOUR, LEAK, RATE, follow, leak, readings, segments
from vllm_headroom.derive.leak.facts import Certainty, Observation
from vllm_headroom.units import MIB

NIGHT = (3 * HOUR, 9 * HOUR)


def work(seconds: float) -> float:
    """Return the requests finished, none of them in the night."""
    begins, ends = NIGHT
    return RATE * (min(seconds, begins) + max(0.0, seconds - ends))


def alarms(verdicts: tuple[Certainty, ...]) -> int:
    return sum(verdict is Certainty.LEAKING for verdict, _ in groupby(verdicts))


def test_a_leak_by_requests_is_one_alarm_over_an_idle_night() -> None:
    def seen() -> Iterator[Observation]:
        for observation in readings(lambda seconds: segments(LEAK * work(seconds)), 11):
            yield replace(observation, finished_total=float(int(work(observation.seconds))))

    course = follow(seen())

    assert alarms(course.verdicts) == 1
    assert course.verdicts[-1] is Certainty.LEAKING


def test_an_alarm_ends_when_nothing_has_grown_for_three_quarters_of_an_hour() -> None:
    course = follow(readings(lambda seconds: leak(min(seconds, 2 * HOUR)), 4))

    last_alarm_seconds = max(at for at, verdict in enumerate(course.verdicts) if verdict is Certainty.LEAKING) * 15.0
    assert alarms(course.verdicts) == 1
    assert 2.7 * HOUR < last_alarm_seconds < 2.9 * HOUR
    assert course.verdicts[-1] is Certainty.NONE


def test_steps_hours_apart_are_one_alarm() -> None:
    course = follow(readings(lambda seconds: 700 * MIB * int(seconds / (2 * HOUR)), 16))

    assert alarms(course.verdicts) == 1
    assert course.verdicts[-1] is Certainty.LEAKING


def test_a_leak_that_pauses_every_night_is_two_alarms_at_most() -> None:
    """Requests go on in the night. The first ends in it; from then on such a pause is a usual gap."""

    def by_day(seconds: float) -> float:
        days, since = divmod(seconds, 24 * HOUR)
        return segments((days * 8 * HOUR + min(since, 8 * HOUR)) * 0.15 * RATE * LEAK)

    course = follow(readings(by_day, 4 * 24))

    assert alarms(course.verdicts) == 2
    assert course.verdicts[-1] is Certainty.LEAKING


def test_many_small_rises_among_the_steps_do_not_end_it_between_them() -> None:
    """The usual gap is that of the rises that make the growth."""

    def shape(seconds: float) -> float:
        return 400 * MIB * int(seconds / 6_000) + segments(min(seconds, 3 * HOUR) * 2 * MIB / 60)

    course = follow(readings(shape, 14))

    assert alarms(course.verdicts) == 1
    assert course.verdicts[-1] is Certainty.LEAKING


def test_after_half_of_the_growth_was_given_back_there_is_no_alarm() -> None:
    def given_back(seconds: float) -> float:
        return leak(seconds) if seconds < 2 * HOUR else 0.4 * leak(2 * HOUR)

    assert follow(readings(given_back, 3.0)).verdicts[-1] is Certainty.NONE
