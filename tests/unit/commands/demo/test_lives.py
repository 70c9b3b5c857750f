"""What the daemon reports about the engine's run in each scenario, over hours of simulated time without waiting."""

from __future__ import annotations

from functools import cache

import pytest

from tests.played import SAMPLE_SECONDS
from tests.samples import values
from tests.unit.commands.demo.test_verdicts import played, states
from vllm_headroom import catalog
from vllm_headroom.model import Sample

HOURS = 2.5


@cache
def hours(scenario: str) -> tuple[tuple[Sample, ...], ...]:
    return tuple(played(scenario, HOURS))


def state(samples: tuple[Sample, ...]) -> str:
    (state_label,) = (labels[0] for labels, value in values(samples, catalog.ENGINE_STATE).items() if value == 1)
    return state_label


def course(scenario: str) -> list[str]:
    """Return the states in their order, each once for as long as it lasts."""
    course_states: list[str] = []
    for samples in hours(scenario):
        if not course_states or course_states[-1] != state(samples):
            course_states.append(state(samples))
    return course_states


def test_a_healthy_engine_serves_all_the_time() -> None:
    assert course("healthy") == ["serving"]
    assert values(hours("healthy")[-1], catalog.ENGINE_RESTARTS) == {(): 0.0}


def test_an_engine_that_crashes_is_down_and_starts_again_and_each_crash_is_counted() -> None:
    crash_states = course("crash")
    last_samples = hours("crash")[-1]

    assert crash_states[:4] == ["serving", "down", "starting", "serving"]
    assert values(last_samples, catalog.ENGINE_EXITS)[("gone",)] == crash_states.count("down") > 3
    assert values(last_samples, catalog.ENGINE_RESTARTS)[()] == crash_states.count("starting")


def test_an_engine_that_hangs_is_stalled_until_it_goes_on() -> None:
    assert course("hang")[:4] == ["serving", "stalled", "serving", "stalled"]
    stalled = [samples for samples in hours("hang") if state(samples) == "stalled"]
    assert min(values(samples, catalog.ENGINE_PROGRESS_AGE)[()] for samples in stalled) == 60


def test_a_slow_start_is_starting_and_says_nothing_of_a_leak_before_it_serves() -> None:
    assert course("slow-start")[:2] == ["starting", "serving"]
    loading = [samples for samples in hours("slow-start") if state(samples) == "starting"]
    assert len(loading) * SAMPLE_SECONDS >= 720
    assert set().union(*map(states, loading)) == {"warming_up"}


def test_an_engine_that_sleeps_is_asleep_and_no_stall() -> None:
    assert course("sleep")[:4] == ["serving", "asleep", "serving", "asleep"]


@pytest.mark.parametrize("scenario", ["crash", "hang", "slow-start", "sleep"])
def test_no_run_of_any_kind_is_called_a_leak(scenario: str) -> None:
    all_states = set().union(*map(states, hours(scenario)))

    assert not all_states & {"growing", "leaking"}
