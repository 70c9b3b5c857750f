"""How long is left, when memory comes and goes on top of a leak; and when an alarm of large steps ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from tests.unit.derive.leak.stretches import BASE, HOUR, LEAK, STEP, TOTAL, Shape, leak, readings, segments
from vllm_headroom.derive.leak.facts import Certainty, Estimate, Track, start_track
from vllm_headroom.derive.leak.track import observe
from vllm_headroom.units import MIB

ROOM = TOTAL - BASE
HEIGHT = 800 * MIB
MINUTE = 60.0


def teeth(minutes: float) -> Shape:
    """Return a leak beneath what a collector lets grow and takes away."""
    return lambda seconds: leak(2 * seconds) + segments(HEIGHT * (seconds % (minutes * MINUTE)) / (minutes * MINUTE))


def busy_hours(seconds: float) -> float:
    """Return a leak beneath what two busy hours of three take."""
    return leak(2 * seconds) + (HEIGHT if seconds % (3 * HOUR) < 2 * HOUR else 0.0)


def followed(shape: Shape, hours: float) -> Iterator[tuple[float, Track]]:
    track: Track | None = None
    for observation in readings(shape, hours):
        track = observe(track or start_track(observation.seconds), observation)
        yield observation.seconds, track


def full(shape: Shape) -> float:
    """Return the seconds until what is held for the first time leaves no room."""
    return next(number * STEP for number in range(100_000) if shape(number * STEP) >= ROOM - 100 * MIB)


@pytest.mark.parametrize("shape", [teeth(20), teeth(90)], ids=["20 min", "90 min"])
def test_the_least_time_left_is_to_the_next_height_and_not_above_the_truth(shape: Shape) -> None:
    end = full(shape)
    estimates: list[tuple[float, Estimate]] = []
    for seconds, track in followed(shape, end / HOUR):
        if track.verdict is Certainty.LEAKING and end - seconds < 1.5 * HOUR:
            assert track.estimate is not None
            estimates.append((end - seconds, track.estimate))

    assert len(estimates) > 200
    late = [
        seconds_left
        for seconds_left, leak_estimate in estimates
        if (leak_estimate.oom_seconds_lower or 0.0) > seconds_left
    ]
    assert len(late) < 0.08 * len(estimates)


def test_the_time_left_does_not_vanish_where_an_hour_gives_back_what_was_held_on_top() -> None:
    alarmed = [
        track for _, track in followed(busy_hours, full(busy_hours) / HOUR) if track.verdict is Certainty.LEAKING
    ]

    assert len(alarmed) > 200
    assert all(track.estimate is not None and track.estimate.oom_seconds is not None for track in alarmed)


def test_the_least_time_left_without_swings_is_not_far_below_the_truth() -> None:
    end = full(leak)

    *_, (seconds, track) = followed(leak, 0.8 * end / HOUR)

    assert track.estimate is not None
    assert track.estimate.oom_seconds_lower == pytest.approx(end - seconds, rel=0.15)


def steps(seconds: float) -> float:
    return 256 * MIB * int(seconds / (40 * MINUTE))


def test_an_alarm_of_large_steps_goes_on_below_what_was_held_for_once() -> None:
    def once_more(seconds: float) -> float:
        return steps(seconds) + (1400 * MIB if 9 * HOUR < seconds < 9.3 * HOUR else 0.0)

    verdicts = {seconds: track.verdict for seconds, track in followed(once_more, 14)}

    assert {verdict for seconds, verdict in verdicts.items() if seconds > 9 * HOUR} == {Certainty.LEAKING}


def test_an_alarm_of_large_steps_ends_when_they_do() -> None:
    last_step_seconds = 10 * HOUR

    verdicts = {seconds: track.verdict for seconds, track in followed(lambda at: steps(min(at, last_step_seconds)), 13)}

    assert verdicts[last_step_seconds] is Certainty.LEAKING
    assert {verdict for seconds, verdict in verdicts.items() if seconds > last_step_seconds + 2.5 * HOUR} == {
        Certainty.NONE
    }


def test_an_alarm_of_steps_hours_apart_is_held_between_them() -> None:
    def far_apart(seconds: float) -> float:
        return 700 * MIB * int(seconds / (2 * HOUR))

    verdicts = {seconds: track.verdict for seconds, track in followed(far_apart, 17.95)}

    def between(hours: float) -> list[Certainty]:
        return [verdicts[hours * HOUR + minutes * MINUTE] for minutes in (35, 55, 75, 115)]

    assert {*between(10), *between(16)} == {Certainty.LEAKING}


def test_the_large_steps_of_the_first_hours_are_no_alarm() -> None:
    quick = {seconds: track.verdict for seconds, track in followed(lambda at: 2 * steps(1.5 * at), 2.9)}

    assert Certainty.LEAKING not in quick.values()
    assert Certainty.GROWING in quick.values()


def test_the_least_time_left_is_not_above_that_at_the_load_of_the_last_hour_after_an_idle_night() -> None:
    """As long a time back as is left goes over the night, in which next to nothing was asked for."""
    night, rate = 8 * HOUR, 10.0
    busy = [max(0.0, seconds - night) * rate for seconds in range(0, int(12 * HOUR), int(STEP))]
    track: Track | None = None
    estimates = []
    for observation, done in zip(readings(lambda at: leak(max(0.0, at - night)), 12), busy, strict=True):
        idle = 0.02 * min(observation.seconds, night)
        track = observe(track or start_track(0.0), replace(observation, finished_total=float(int(done + idle))))
        seconds_left = (TOTAL - (observation.held_bytes or 0)) / (rate * LEAK)
        if track.verdict is Certainty.LEAKING and track.estimate is not None:
            estimates.append((seconds_left, track.estimate.oom_seconds_lower or 0.0))

    assert len(estimates) > 100
    assert [
        (true_seconds, lower_seconds) for true_seconds, lower_seconds in estimates if lower_seconds > true_seconds
    ] == []


@pytest.mark.parametrize(("size", "hours"), [(700, 2.0), (1200, 3.0)])
def test_an_alarm_of_steps_hours_apart_says_what_time_is_left(size: int, hours: float) -> None:
    """Most pairs of readings between such steps see no slope at all."""

    def apart(seconds: float) -> float:
        return size * MIB * int(seconds / (hours * HOUR))

    alarmed = [track for _, track in followed(apart, full(apart) / HOUR) if track.verdict is Certainty.LEAKING]

    assert len(alarmed) > 200
    assert [track for track in alarmed if track.estimate is None or track.estimate.oom_seconds is None] == []


def test_steps_that_fill_a_small_room_within_hours_are_an_alarm_before_it_is_full() -> None:
    def kept(seconds: float) -> float:
        return 5_000 * MIB + 130 * MIB * int(max(0.0, seconds - 15 * MINUTE) / (9 * MINUTE))

    end = next(minute for minute in range(1, 400) if kept(minute * MINUTE) >= TOTAL - BASE) * MINUTE
    verdicts = {seconds: track.verdict for seconds, track in followed(kept, end / HOUR)}

    assert end < 2.5 * HOUR
    assert max(verdict for seconds, verdict in verdicts.items() if seconds < end - 10 * MINUTE) is Certainty.LEAKING


def test_the_same_steps_that_end_early_are_none() -> None:
    def slots(seconds: float) -> float:
        return 5_000 * MIB + 130 * MIB * min(5, int(max(0.0, seconds - 15 * MINUTE) / (9 * MINUTE)))

    assert {track.verdict for _, track in followed(slots, 4)} == {Certainty.NONE}
