"""What is a leak and what is not, rule by rule."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.json import encode
from msgspec.structs import replace

from tests.unit.derive.leak.stretches import (
    BASE,
    HOUR,
    LEAK,
    RATE,
    STEP,
    TOTAL,
    Shape,
    changed,
    flat,
    follow,
    leak,
    readings,
    records,
    segments,
)
from vllm_headroom.derive.leak.facts import OUT_OF_MEMORY_BYTES, Certainty, Observation, Track, start_track
from vllm_headroom.derive.leak.inside import sharpen_track
from vllm_headroom.derive.leak.leak import find_leak_state
from vllm_headroom.derive.leak.track import RING_BLOCKS, is_warming_up, observe
from vllm_headroom.units import MIB
from vllm_headroom.vocabulary import LeakState


def test_flat_memory_warms_up_and_is_never_anything_else_than_quiet() -> None:
    early, late = follow(readings(flat, 0.05)), follow(readings(flat, 6))

    assert is_warming_up(early.track)
    assert not is_warming_up(late.track)
    assert late.worst is Certainty.NONE


def test_a_steady_leak_is_growing_within_half_an_hour_and_leaking_within_an_hour_and_a_half() -> None:
    course = follow(readings(leak, 3))

    growing, leaking = course.first(Certainty.GROWING), course.first(Certainty.LEAKING)
    assert growing is not None
    assert leaking is not None
    assert growing < 0.5
    assert leaking < 1.4
    assert course.verdicts[-1] is Certainty.LEAKING


def test_the_alarm_says_how_fast_by_what_how_much_and_how_long_is_left() -> None:
    course = follow(readings(leak, 3))
    alarm, at = course.alarm, course.first(Certainty.LEAKING)
    assert alarm is not None
    assert at is not None

    assert alarm.bytes_per_second == pytest.approx(RATE * LEAK, rel=0.05)
    assert alarm.lower < RATE * LEAK < alarm.upper
    assert alarm.bytes_per_request == pytest.approx(LEAK, rel=0.05)
    assert alarm.by_requests
    assert alarm.leaked_bytes == pytest.approx(at * HOUR * RATE * LEAK, rel=0.2)
    expected_seconds = (TOTAL - BASE - at * HOUR * RATE * LEAK - OUT_OF_MEMORY_BYTES) / (RATE * LEAK)
    assert alarm.oom_seconds == pytest.approx(expected_seconds, rel=0.05)
    assert alarm.oom_seconds_lower is not None
    assert alarm.oom_seconds_lower < expected_seconds


def test_a_leak_by_time_goes_on_while_nothing_is_served_and_is_distinguished() -> None:
    quiet = (replace(observation, finished_total=1000.0) for observation in readings(leak, 3))

    course = follow(quiet)

    assert course.verdicts[-1] is Certainty.LEAKING
    assert course.alarm is not None
    assert not course.alarm.by_requests
    assert course.alarm.bytes_per_request is None


@pytest.mark.parametrize("seed", range(2))
def test_records_of_random_demand_are_not_a_leak(seed: int) -> None:
    assert follow(readings(records(seed, 12), 12)).worst is Certainty.NONE


@pytest.mark.parametrize("step", [20 * MIB, 300 * MIB, 2000 * MIB])
def test_one_large_step_is_not_a_leak(step: int) -> None:
    assert follow(readings(lambda seconds: step if seconds > 2 * HOUR else 0, 6)).worst is Certainty.NONE


def test_a_few_first_uses_are_not_a_leak() -> None:
    uses = (0.7, 1.1, 1.8, 2.4, 3.9)

    course = follow(readings(lambda seconds: 20 * MIB * sum(seconds > use * HOUR for use in uses), 6))

    assert course.worst is Certainty.NONE


def test_growth_below_the_least_amount_is_not_a_leak() -> None:
    assert follow(readings(lambda seconds: segments(seconds * 1000), 10)).worst is Certainty.NONE


def test_a_fast_bounded_fill_is_at_most_growing_and_is_forgotten() -> None:
    course = follow(readings(lambda seconds: segments(min(seconds, 2400) / 2400 * 900 * MIB, 20 * MIB), 4))

    assert course.worst is not Certainty.LEAKING
    assert course.verdicts[-1] is Certainty.NONE


def test_memory_that_follows_load_is_not_a_leak() -> None:
    def tide(seconds: float) -> float:
        return segments(1500 * MIB * abs((seconds / HOUR) % 4 - 2) / 2)

    assert follow(readings(tide, 16)).verdicts[-1] is not Certainty.LEAKING


def test_a_leak_beneath_a_sawtooth_is_found() -> None:
    course = follow(readings(lambda seconds: leak(seconds) + segments(seconds % 900 / 900 * 300 * MIB), 8))

    assert course.verdicts[-1] is Certainty.LEAKING


def test_a_collectors_teeth_alone_are_not_a_leak() -> None:
    course = follow(readings(lambda seconds: segments(seconds % 900 / 900 * 300 * MIB), 8))

    assert course.worst is not Certainty.LEAKING
    assert course.verdicts[-1] is Certainty.NONE


@pytest.mark.parametrize("life", ["2", None])
def test_a_restart_starts_over(life: str | None) -> None:
    first_course = follow(readings(leak, 2))
    assert first_course.verdicts[-1] is Certainty.LEAKING
    again = changed(readings(flat, 1, start=2 * HOUR), lambda _: True, run_id=life)

    second = follow(again, first_course.track)

    assert set(second.verdicts) == {Certainty.NONE}


def asleep_since(hours: float, minutes: float) -> list[Observation]:
    return [
        Observation(seconds=hours * HOUR + 15 * turn, held_bytes=BASE // 10, finished_total=72000.0, awake=False)
        for turn in range(int(minutes * 4))
    ]


def awake_again(shape: Shape, since_hours: float, hours: float) -> Iterator[Observation]:
    """Yield readings that go on counting from what was finished before a sleep."""
    for observation in readings(shape, hours, start=since_hours * HOUR):
        yield replace(observation, finished_total=72000.0 + (observation.finished_total or 0.0), awake=True)


def test_a_sleep_is_asleep_and_a_leak_that_it_gave_back_is_none_within_minutes() -> None:
    sleeping = follow(asleep_since(2, 10), follow(readings(leak, 2)).track)
    assert find_leak_state(sleeping.track, is_known=True, is_settled=True) is LeakState.ASLEEP

    woken = follow(awake_again(flat, 2.2, 1), sleeping.track)

    assert set(woken.verdicts[int(420 / STEP) :]) == {Certainty.NONE}


def test_an_alarm_goes_on_while_what_a_sleep_emptied_fills_again() -> None:
    sleeping = follow(asleep_since(2, 10), follow(readings(leak, 2)).track)
    woken = follow(awake_again(lambda seconds: leak(2 * HOUR) if seconds >= 210 else 0.0, 2.2, 0.5), sleeping.track)

    assert set(woken.verdicts) == {Certainty.LEAKING}


def test_a_leak_that_a_sleep_did_not_give_back_is_still_one() -> None:
    sleeping = follow(asleep_since(2, 10), follow(readings(leak, 2)).track)

    woken = follow(awake_again(lambda seconds: leak(2 * HOUR + seconds), 2.2, 1), sleeping.track)

    assert set(woken.verdicts) == {Certainty.LEAKING}


def test_an_alarm_is_held_over_a_sleep_that_vllm_does_not_report_and_has_no_figures_in_it() -> None:
    unseen = (replace(observation, awake=None, running=0.0) for observation in asleep_since(2, 60))
    sleeping = follow(unseen, follow(readings(leak, 2)).track)

    assert find_leak_state(sleeping.track, is_known=True, is_settled=True) is LeakState.LEAKING
    assert sharpen_track(sleeping.track, None, None).estimate is None

    woken = follow(awake_again(lambda seconds: leak(2 * HOUR + seconds), 3, 0.5), sleeping.track)

    assert set(woken.verdicts) == {Certainty.LEAKING}
    assert woken.track.estimate is not None


def test_a_leak_is_found_over_a_sleep_every_eight_minutes() -> None:
    def rests(observation: Observation) -> bool:
        return observation.seconds % 480 >= 360

    course = follow(changed(readings(leak, 4), rests, held_bytes=BASE // 10, awake=False))

    assert course.verdicts[-1] is Certainty.LEAKING


BACKUP = 20_000 * MIB
HELD_BY_HOST = 5_000 * MIB


def host_over_sleeps(hours: float, *, stays: bool) -> Iterator[Observation]:
    """Yield a host's readings: each sleep backs up the weights, and leaves 900 MiB more of the process."""
    for turn in range(int(hours * HOUR / STEP)):
        seconds = turn * STEP
        sleeps, since = divmod(seconds, 1.3 * HOUR)
        asleep = since >= 1.1 * HOUR
        backed_up = asleep or (sleeps > 0 and (stays or since < STEP))
        yield Observation(
            seconds=seconds,
            held_bytes=HELD_BY_HOST + int(sleeps) * 900 * MIB + (BACKUP if backed_up else 0),
            finished_total=(sleeps * 1.1 + min(since / HOUR, 1.1)) * HOUR * 3,
            run_id="1",
            awake=not asleep,
            room_bytes=30_000 * MIB,
        )


@pytest.mark.parametrize("stays", [True, False], ids=["in torch's pinned cache", "given back by the wake"])
def test_what_each_sleep_leaves_on_the_host_is_found_beside_the_backup_of_the_weights(*, stays: bool) -> None:
    track: Track | None = None
    leak_states: list[LeakState] = []
    for observation in host_over_sleeps(18, stays=stays):
        track = observe(track or start_track(0.0), observation)
        leak_states.append(find_leak_state(track, is_known=True, is_settled=True))

    assert LeakState.LEAKING in leak_states
    assert set(leak_states[leak_states.index(LeakState.LEAKING) :]) <= {LeakState.LEAKING, LeakState.ASLEEP}


def test_an_engine_that_loads_its_weights_after_a_long_sleep_keeps_its_evidence() -> None:
    sleeping = follow(asleep_since(2, 60), follow(readings(leak, 2)).track)
    loading = (replace(observation, held_bytes=BASE // 3) for observation in awake_again(flat, 3, 0.05))

    woken = follow(
        awake_again(lambda seconds: leak(2 * HOUR + seconds), 3.05, 1), follow(loading, sleeping.track).track
    )

    assert set(woken.verdicts) == {Certainty.LEAKING}


def test_an_engine_that_lost_half_its_memory_for_good_is_watched_again() -> None:
    first_course = follow(readings(flat, 1))
    smaller = [
        Observation(
            seconds=HOUR + 15 * turn,
            held_bytes=int(BASE * 0.3 + leak(15 * turn)),
            finished_total=36000 + 150.0 * turn,
            run_id="1",
            room_bytes=9_000 * MIB,
        )
        for turn in range(4 * 240)
    ]

    assert follow(smaller, first_course.track).verdicts[-1] is Certainty.LEAKING


def test_a_job_that_comes_and_goes_where_it_cannot_be_distinguished_changes_nothing() -> None:
    def runs(observation: Observation) -> bool:
        return observation.seconds % 2400 < 600

    alone = changed(readings(leak, 4), lambda _: True, neighbours=1)
    shared_observations = (
        replace(observation, held_bytes=(observation.held_bytes or 0) + 900 * MIB, neighbours=2)
        if runs(observation)
        else observation
        for observation in alone
    )

    assert follow(shared_observations).verdicts[-1] is Certainty.LEAKING


def test_a_neighbour_that_stays_starts_over_where_it_cannot_be_distinguished() -> None:
    course = follow(changed(readings(leak, 2), lambda _: True, neighbours=1))
    assert course.verdicts[-1] is Certainty.LEAKING
    joined = (
        replace(observation, seconds=observation.seconds + 2 * HOUR, held_bytes=BASE + 2000 * MIB, neighbours=2)
        for observation in readings(flat, 1.2)
    )

    later_course = follow((replace(observation, finished_total=72000.0) for observation in joined), course.track)

    assert later_course.verdicts[0] is Certainty.LEAKING
    assert later_course.verdicts[-1] is Certainty.NONE


def test_a_leak_is_found_through_gaps_of_both_sides() -> None:
    def gap(observation: Observation) -> bool:
        return 1800 < observation.seconds < 3000

    blind = changed(readings(leak, 3), gap, held_bytes=None)
    deaf = changed(readings(leak, 3), gap, finished_total=None, run_id=None)

    assert follow(blind).verdicts[-1] is Certainty.LEAKING
    assert follow(deaf).verdicts[-1] is Certainty.LEAKING


def test_a_gap_without_a_counter_is_not_taken_for_growth_without_work() -> None:
    deaf = changed(
        readings(records(7, 10), 10),
        lambda observation: 4 * HOUR < observation.seconds < 6 * HOUR,
        finished_total=None,
        run_id=None,
    )

    assert follow(deaf).worst is Certainty.NONE


def test_a_clock_that_jumps_back_costs_no_verdict() -> None:
    course = follow(readings(leak, 2))
    last_seconds = course.track.clock.snapshot_seconds
    back = [
        replace(
            observation,
            seconds=last_seconds - 5000 + observation.seconds,
            held_bytes=int(BASE + leak(2 * HOUR + observation.seconds)),
        )
        for observation in readings(flat, 0.2)
    ]

    assert set(follow([replace(observation, finished_total=None) for observation in back], course.track).verdicts) == {
        Certainty.LEAKING
    }


def test_a_leak_that_ends_is_no_longer_one() -> None:
    course = follow(readings(lambda seconds: leak(min(seconds, 2 * HOUR)), 8))

    assert course.worst is Certainty.LEAKING
    assert course.verdicts[-1] is Certainty.NONE
    assert course.track.estimate is None


def test_when_the_device_is_nearly_full_the_alarm_comes_earlier() -> None:
    near = (
        replace(observation, room_bytes=int(700 * MIB - leak(observation.seconds)))
        for observation in readings(leak, 1.3)
    )

    alarm_hours = follow(near).first(Certainty.LEAKING)

    assert alarm_hours is not None
    assert alarm_hours < 0.75


MOST_BYTES = 32 * 1024


def test_memory_is_bounded_whatever_the_uptime() -> None:
    track = follow(readings(leak, 72)).track

    assert max(len(ring.blocks) for ring in track.history.rings) == RING_BLOCKS
    assert len(encode(track)) < MOST_BYTES


@given(st.lists(st.integers(0, 2000), min_size=500, max_size=700))
@settings(max_examples=20, deadline=None)
def test_memory_that_never_grows_never_alarms(drops: list[int]) -> None:
    fallen = [sum(drops[: number + 1]) * 1024 for number in range(len(drops))]
    observations = list(readings(flat, len(drops) * 15 / HOUR))

    course = follow(
        replace(observation, held_bytes=BASE - fall) for observation, fall in zip(observations, fallen, strict=False)
    )

    assert course.worst is Certainty.NONE


@given(offset=st.integers(-30_000, 3_000))
@settings(max_examples=10, deadline=None)
def test_adding_a_constant_changes_nothing(offset: int) -> None:
    high_water = records(1, 2)
    observations = list(readings(lambda seconds: leak(seconds) + high_water(seconds), 2))
    moved = (
        replace(observation, held_bytes=(observation.held_bytes or 0) + offset * MIB) for observation in observations
    )

    assert follow(moved).verdicts == follow(observations).verdicts


@pytest.mark.parametrize(("stretch", "memory_factor"), [(0.5, 1), (1, 4), (2, 4)])
def test_a_leak_stays_one_and_a_flat_line_stays_one_on_other_scales(stretch: float, memory_factor: int) -> None:
    def scaled(shape: str) -> Certainty:
        observations = readings(leak if shape == "leak" else flat, 4)
        return follow(
            replace(
                observation,
                seconds=observation.seconds * stretch,
                held_bytes=(observation.held_bytes or 0) * memory_factor,
                room_bytes=(observation.room_bytes or 0) * memory_factor,
            )
            for observation in observations
        ).verdicts[-1]

    assert scaled("leak") is Certainty.LEAKING
    assert scaled("flat") is Certainty.NONE


def test_a_rest_begins_below_half_of_the_memory_and_ends_at_four_fifths() -> None:
    """A reading between the two changes nothing: an engine near one limit would rest at every other reading."""
    shares = {1.0: False, 0.6: False, 0.5: False, 0.45: True, 0.6001: True, 0.79: True, 0.8: False, 0.7: False}
    track = start_track(0.0)
    rests = []
    for number, share in enumerate((1.0, *shares)):
        track = observe(
            track,
            Observation(seconds=number * STEP, held_bytes=int(share * BASE), finished_total=number * 150.0, run_id="1"),
        )
        rests.append(track.presence.rested_seconds is not None)

    assert rests[1:] == list(shares.values())
