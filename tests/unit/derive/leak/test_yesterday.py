"""What an engine did while it was well, in its last run or yesterday, is no alarm the next time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import groupby

import pytest
from msgspec.structs import replace

from tests.samples import gpu, snapshot
from tests.unit.derive.leak.stretches import HOUR
from vllm_headroom import catalog
from vllm_headroom.derive.leak.facts import Certainty, Observation, Track, start_track
from vllm_headroom.derive.leak.leak import LeakMemory
from vllm_headroom.derive.leak.track import observe
from vllm_headroom.derive.verdicts import judge_snapshot, list_excused
from vllm_headroom.model import Sample, Values
from vllm_headroom.units import GIB, MIB

Growth = Callable[[float], float]
"""Hours since the start of a run to bytes on top of what was held at first."""

STEP = 30.0
BASE = 60 * GIB


def fill(size: float, hours: float) -> Growth:
    """Return a straight line to full, and nothing after it."""
    return lambda since: size * min(1.0, since / hours)


def play_run(
    growth: Growth, hours: float, *, begin: float, room: float, rate: Growth = lambda _since: 10.0, seed: int = 0
) -> Iterator[Observation]:
    """Yield a run's readings; `rate` is requests per second by the hours since the run began."""
    chance = random.Random(seed)  # noqa: S311 - it plays jitter
    finished = 0.0
    for number in range(int(hours * HOUR / STEP)):
        seconds = number * STEP
        finished += rate(seconds / HOUR) * STEP
        held_bytes = int(BASE + growth(seconds / HOUR) // (2 * MIB) * 2 * MIB)
        yield Observation(
            seconds=begin * HOUR + seconds + chance.uniform(0, 2),
            held_bytes=held_bytes,
            finished_total=float(int(finished)),
            running=float(int(3 * rate(seconds / HOUR))),
            run_id=f"{begin:.2f}",
            room_bytes=int(max(0.0, BASE + room - held_bytes)),
        )


def play_days(growth: Growth, days: int, *, room: float, hours: float = 22.0) -> Iterator[Observation]:
    """Yield the readings of an engine that is started again each morning and grows by the same law."""
    for day in range(days):
        yield from play_run(growth, hours, begin=24.0 * day, room=room, seed=day)


def judge(
    observations: Iterator[Observation], track: Track | None = None
) -> tuple[list[tuple[float, Certainty]], Track]:
    verdicts: list[tuple[float, Certainty]] = []
    for observation in observations:
        track = observe(track or start_track(observation.seconds), observation)
        verdicts.append((observation.seconds / HOUR, track.verdict))
    assert track is not None
    return verdicts, track


def list_alarms(verdicts: list[tuple[float, Certainty]]) -> list[float]:
    """Return the hours at which alarms begin."""
    runs = groupby(verdicts, key=lambda entry: entry[1] is Certainty.LEAKING)
    return [next(entries)[0] for is_leaking, entries in runs if is_leaking]


def follow_load(size: float, *, lag_hours: float, seed: int) -> tuple[Growth, Growth]:
    """Return memory that follows a daily load slowly, and the load; days differ by a tenth."""
    chance = random.Random(seed)  # noqa: S311 - it plays days
    peaks = [chance.uniform(0.92, 1.08) for _ in range(9)]

    def swing(hours: float) -> float:
        day = max(0.0, hours) / 24
        return peaks[int(day)] * (0.5 - 0.5 * math.cos(2 * math.pi * day)) ** 2

    minutes = [0.0]
    for minute in range(9 * 24 * 60):
        minutes.append(minutes[-1] + (swing(minute / 60) - minutes[-1]) / (60 * lag_hours))
    return (lambda hours: size * minutes[int(hours * 60)]), (lambda hours: 2 + 18 * swing(hours))


@pytest.mark.parametrize(("size", "hours", "room"), [(4 * GIB, 5.0, 6 * GIB), (1.5 * GIB, 3.0, 3 * GIB)])
def test_the_fill_of_each_morning_is_an_alarm_on_the_first_day_only(size: float, hours: float, room: float) -> None:
    verdicts, _ = judge(play_days(fill(size, hours), 4, room=room))

    assert [int(hour / 24) for hour in list_alarms(verdicts)] == [0]
    assert Certainty.GROWING in {verdict for hour, verdict in verdicts if hour > 24}


def test_the_sentence_on_the_second_morning_has_the_reason() -> None:
    observations = play_days(fill(4 * GIB, 5.0), 2, room=6 * GIB)
    _, track = judge(observation for observation in observations if observation.seconds < 27 * HOUR)
    of_gpu = gpu(index=0, uuid="GPU-a", total=80 * GIB, used=62 * GIB)
    excused = list_excused(LeakMemory(gpus={"GPU-a": track}))
    values = Values((Sample(catalog.LEAK_STATE, ("0", "GPU-a", "growing"), 1.0),))

    verdicts = judge_snapshot(snapshot(gpus=(of_gpu,)), values, excused=excused)

    assert excused == {"GPU-a"}
    (sentence,) = (verdict.sentence for verdict in verdicts if verdict.subject == "GPU 0")
    assert sentence == "GPU 0 grows, up to now no further than it has grown before without a leak."


@pytest.mark.parametrize("rate", [0.25, 0.5, 1.0])
def test_what_grows_on_beyond_yesterdays_level_is_an_alarm(rate: float) -> None:
    """The third day's fill is as ever, and goes on at `rate` GiB an hour where it used to end."""
    usual = fill(2 * GIB, 4.0)

    def leaking(since: float) -> float:
        return usual(since) + rate * GIB * max(0.0, since - 4.0)

    _, track = judge(play_days(usual, 2, room=8 * GIB))
    verdicts, _ = judge(play_run(leaking, 20.0, begin=48.0, room=8 * GIB), track)

    begin = list_alarms(verdicts)[0] - 48.0
    assert usual(begin) < leaking(begin) < usual(begin) + 1.5 * GIB
    assert verdicts[-1][1] is Certainty.LEAKING or leaking(20.0) > 8 * GIB


def test_a_leak_that_is_restarted_each_night_is_an_alarm_each_day() -> None:
    verdicts, _ = judge(play_days(lambda since: 0.25 * GIB * since, 4, room=8 * GIB))

    assert sorted({int(hour / 24) for hour in list_alarms(verdicts)}) == [0, 1, 2, 3]


def test_a_run_that_filled_the_card_excuses_nothing() -> None:
    """It stood at the limit for hours, and ended there."""
    verdicts, _ = judge(play_days(fill(4 * GIB, 8.0), 3, room=4 * GIB + 80 * MIB))

    assert sorted({int(hour / 24) for hour in list_alarms(verdicts)}) == [0, 1, 2]


def test_a_run_that_grows_three_times_as_fast_as_yesterday_is_an_alarm() -> None:
    _, track = judge(play_days(fill(4 * GIB, 12.0), 2, room=6 * GIB))
    verdicts, _ = judge(play_run(fill(4 * GIB, 3.0), 12.0, begin=48.0, room=6 * GIB), track)

    assert list_alarms(verdicts)


@pytest.mark.parametrize(("lag_hours", "seed"), [(1.0, 1), (2.0, 2), (3.0, 3)])
def test_memory_that_follows_load_slowly_is_no_alarm_from_the_second_day_on(lag_hours: float, seed: int) -> None:
    memory, load = follow_load(4 * GIB, lag_hours=lag_hours, seed=seed)

    verdicts, _ = judge(play_run(memory, 8 * 24.0, begin=0.0, room=7 * GIB, rate=load))

    assert [hour for hour in list_alarms(verdicts) if hour > 30] == []


@pytest.mark.parametrize("days", [0.5, 2.5])
def test_a_leak_beneath_memory_that_follows_load_is_an_alarm(days: float) -> None:
    """It begins after days of the same swing."""
    memory, load = follow_load(2 * GIB, lag_hours=2.0, seed=4)

    def leaking(hours: float) -> float:
        return memory(hours) + 0.1 * GIB * max(0.0, hours - 24 * days)

    verdicts, _ = judge(play_run(leaking, 24 * (days + 2.5), begin=0.0, room=8 * GIB, rate=load))

    assert verdicts[-1][1] is Certainty.LEAKING


@pytest.mark.parametrize(
    ("size", "period_minutes", "depth"),
    [(16 * GIB, 40, 0.2), (8 * GIB, 90, 0.15), (24 * GIB, 25, 0.25), (12 * GIB, 180, 0.2)],
)
def test_a_tier_that_is_full_and_breathes_is_no_alarm(size: float, period_minutes: float, depth: float) -> None:
    """It fills for some hours, and is then released in part and filled again."""
    full = fill(size, 3.0)
    chance = random.Random(int(period_minutes))  # noqa: S311 - it plays breaths
    depths = [depth * chance.uniform(0.7, 1.0) for _ in range(100)]

    def breathe(since: float) -> float:
        if since < 3.0:
            return full(since)
        breath, share = divmod((since - 3.0) * 60 / period_minutes, 1.0)
        return size * (1 - depths[int(breath)] * (0.5 - 0.5 * math.cos(2 * math.pi * share)))

    verdicts, _ = judge(play_run(breathe, 24.0, begin=0.0, room=60 * GIB))

    minutes = sum(verdict is Certainty.LEAKING for _, verdict in verdicts) * STEP / 60
    assert minutes < 250 + 2 * period_minutes
    assert verdicts[-1][1] is not Certainty.LEAKING


@pytest.mark.parametrize("released", [0.1, 0.3, 0.45])
def test_a_leak_of_which_a_part_is_released_at_times_stays_an_alarm(released: float) -> None:
    """Each four hours torch releases a part of its cache; beneath it the lows rise."""

    def sawed(since: float) -> float:
        leaked = 0.2 * GIB * since
        return leaked + released * GIB * (since % 4) / 4

    verdicts, _ = judge(play_run(sawed, 30.0, begin=0.0, room=8 * GIB))

    begin = list_alarms(verdicts)[0]
    assert {verdict for hour, verdict in verdicts if hour > begin} == {Certainty.LEAKING}


@pytest.mark.parametrize(("minutes", "step"), [(6.3, 5.0), (5.0, 5.0), (8.0, 15.0)])
def test_a_straight_line_to_full_within_minutes_is_an_alarm_from_its_third(minutes: float, step: float) -> None:
    room = 4 * GIB
    track = start_track(0.0)
    first_minutes = None
    for number in range(int(minutes * 60 / step)):
        seconds = number * step
        held_bytes = int(BASE + room * seconds / (minutes * 60))
        observation = Observation(
            seconds=seconds,
            held_bytes=held_bytes,
            finished_total=number * 4.0,
            running=min(256.0, number * 20.0),
            run_id="1",
            room_bytes=int(BASE + room - held_bytes),
        )
        track = observe(track, observation)
        if first_minutes is None and track.verdict is Certainty.LEAKING:
            first_minutes = seconds / 60

    assert first_minutes is not None
    assert 3 <= first_minutes <= max(3.6, 0.6 * minutes)


def test_an_alarm_has_its_time_left_after_each_sleep_though_a_cache_fills_again() -> None:
    """The cache that each sleep empties keeps memory below its old height for the hour that the engine is awake."""

    def sleep_hourly() -> Iterator[Observation]:
        observations = play_run(
            lambda since: 0.5 * GIB * since + 1.5 * GIB * min(1.0, since % 1.0), 12.0, begin=0.0, room=9 * GIB
        )
        for observation in observations:
            is_awake = observation.seconds % HOUR < 0.7 * HOUR
            held_bytes = observation.held_bytes if is_awake else 4 * GIB
            yield replace(observation, awake=is_awake, held_bytes=held_bytes)

    track = start_track(0.0)
    unknown = 0
    for observation in sleep_hourly():
        track = observe(track, observation)
        is_shown = observation.awake and track.presence.rested_seconds is None
        if track.alarm is not None and is_shown and track.estimate is None:
            unknown += 1

    assert track.alarm is not None
    assert unknown == 0
