"""How long growth must have lasted before anything is said, and what of the device counts as left."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, log, pi, sin

import pytest
from msgspec.structs import replace

from tests.unit.derive.leak.stretches import BASE, HOUR, RATE, Course, Shape, follow, readings, segments
from vllm_headroom.derive.leak import judge
from vllm_headroom.derive.leak.facts import Certainty, Observation
from vllm_headroom.units import GIB, MIB

QUIET = 3 * HOUR
DAY = 24 * HOUR


def on_a_device(shape: Shape, hours: float, room_bytes: float) -> Iterator[Observation]:
    """Yield the readings on a device that has so much left at first."""
    for observation in readings(shape, hours):
        assert observation.held_bytes is not None
        yield replace(observation, room_bytes=int(room_bytes - (observation.held_bytes - BASE)))


@pytest.mark.parametrize("full_after_seconds", [HOUR, 100 * HOUR], ids=["soon full", "not soon full"])
@pytest.mark.parametrize("rate", [MIB / 2, 2 * MIB], ids=["fast", "faster"])
def test_growth_after_quiet_hours_is_nothing_before_ten_minutes_however_fast(
    rate: float, full_after_seconds: float
) -> None:
    def shape(seconds: float) -> float:
        return segments(max(0.0, seconds - QUIET) * rate)

    course = follow(on_a_device(shape, QUIET / HOUR + 0.5, full_after_seconds * rate))
    first_growing_hours = course.first(Certainty.GROWING)

    assert first_growing_hours is not None
    assert first_growing_hours * HOUR >= QUIET + 600


def test_the_last_100_mib_are_no_time_that_is_left() -> None:
    rate = MIB / 2
    course = follow(on_a_device(lambda seconds: segments(seconds * rate), 0.5, HOUR * rate))
    at = course.first(Certainty.LEAKING)

    assert at is not None
    assert course.alarm is not None
    assert course.alarm.oom_seconds is not None
    assert HOUR - at * HOUR - course.alarm.oom_seconds == pytest.approx(100 * MIB / rate, rel=0.6)


def test_the_last_100_mib_do_not_put_an_alarm_off() -> None:
    """Growth that slows down is an alarm only once it has lasted longer than what is left."""
    room_bytes = 400 * MIB

    def slowing(seconds: float) -> float:
        return segments(300 * MIB * (seconds / HOUR) ** 0.6)

    at = follow(on_a_device(slowing, 1.0, room_bytes)).first(Certainty.LEAKING)

    assert at is not None
    assert room_bytes - slowing(at * HOUR) > slowing(at * HOUR)


def test_where_the_room_lasts_for_days_an_even_fill_of_hours_is_a_warning_and_what_goes_on_an_alarm() -> None:
    rate = MIB / 4

    def fill(seconds: float) -> float:
        return segments(min(seconds, 8 * HOUR) * rate)

    def told(shape: Shape) -> Course:
        return follow(on_a_device(shape, 12.0, 200 * HOUR * rate))

    assert told(fill).worst is Certainty.GROWING
    at = told(lambda seconds: segments(seconds * rate)).first(Certainty.LEAKING)
    assert at is not None
    assert at > 9


def test_an_hour_of_uneven_growth_is_a_warning_where_an_hour_of_a_straight_line_is_an_alarm() -> None:
    """Both take 6 MiB a minute on average and have room for 14 hours. The uneven one comes and goes each hour."""
    rate = 0.1 * MIB

    def in_waves(seconds: float) -> float:
        return segments(rate * (seconds - 0.8 * HOUR / (2 * pi) * sin(2 * pi * seconds / HOUR)))

    def find_alarm(shape: Shape) -> float:
        at = follow(on_a_device(shape, 6.0, 14 * HOUR * rate)).first(Certainty.LEAKING)
        assert at is not None
        return at

    assert find_alarm(lambda seconds: segments(rate * seconds)) < 1.5
    assert find_alarm(in_waves) > 1.9


def test_a_cache_that_fills_ever_more_slowly_is_a_warning_and_a_leak_beneath_it_an_alarm() -> None:
    """The room is unknown: only the shape of the whole run distinguishes the two."""

    def fill(seconds: float) -> float:
        return 4096 * (2 * GIB * (1 - exp(-seconds / (5 * HOUR))) // 4096)

    def follow_host(shape: Shape) -> Course:
        return follow(replace(observation, room_bytes=None) for observation in readings(shape, 14.0))

    assert follow_host(fill).worst is Certainty.GROWING
    assert follow_host(lambda seconds: fill(seconds) + 50_000 * seconds).worst is Certainty.LEAKING


def test_growth_by_the_logarithm_of_swinging_work_is_no_alarm_where_each_rise_is_small() -> None:
    """Host memory grows by pages: after a day a logarithm adds less within half a minute than a segment has."""

    def finished(seconds: float) -> float:
        return 2 * RATE * (seconds - 0.9 * sin(2 * pi * seconds / DAY) * DAY / (2 * pi))

    def by_folds(seconds: float) -> float:
        return 100 * MIB * log(1 + finished(seconds) / 1000)

    def seen(shape: Shape) -> Iterator[Observation]:
        for observation in on_a_device(shape, 72.0, 20_000 * MIB):
            yield replace(observation, finished_total=float(int(finished(observation.seconds))))

    assert follow(seen(by_folds)).worst < Certainty.LEAKING
    assert follow(seen(lambda seconds: by_folds(seconds) + 1500 * finished(seconds))).worst is Certainty.LEAKING


def drip(seconds: float) -> float:
    """Return 60 MiB an hour."""
    return segments(seconds / HOUR * 60 * MIB)


def test_growth_at_an_even_pace_has_not_ended_however_long_its_window() -> None:
    """The last twentieth of twelve hours takes 36 minutes."""
    at = follow(on_a_device(drip, 14.0, 50 * 1024 * MIB)).first(Certainty.LEAKING)

    assert at is not None
    assert 12.0 < at < 13.0


@pytest.mark.parametrize(
    ("pace", "days", "worst"),
    [(4.0, 25, Certainty.LEAKING), (4.0, 40, Certainty.GROWING), (7.0, 40, Certainty.LEAKING)],
)
def test_what_is_full_in_more_than_a_month_must_be_surer(
    pace: float, days: int, worst: Certainty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "weigh_pace", lambda *_: pace)

    assert follow(on_a_device(drip, 14.0, days * 24 * 60 * MIB)).worst is worst


@pytest.mark.parametrize("filled_mib", [1000, 3000])
def test_steady_growth_is_an_alarm_however_much_more_the_warm_up_took(filled_mib: int) -> None:
    """A cache fills within an hour; 20 MiB an hour leak, with room for two weeks. Only the growth since is compared."""

    def warmed_up(seconds: float) -> float:
        return segments(filled_mib * MIB * (1 - exp(-seconds / 600)) + 20 * MIB * seconds / HOUR)

    assert follow(readings(warmed_up, 20, rate=0.5)).verdicts[-1] is Certainty.LEAKING
