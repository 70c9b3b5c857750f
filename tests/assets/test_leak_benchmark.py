"""A part of `make bench-leak`, small enough for every run: the detector's figures on traces whose truth is known."""

from __future__ import annotations

import json
from functools import cache
from statistics import median
from typing import Any, Final

import generate
import judge
import pytest
import traces

from vllm_headroom.vocabulary import LeakState
from vllm_headroom_tools.history import LeakReplay
from vllm_headroom_tools.trace import parse_trace

INTERVAL_SECONDS: Final = 30.0
DENSE_SECONDS: Final = 15.0
"""For figures of how soon and how exact, and for the one benign trace on which an early warning was once seen."""

HOURS: Final = 6.0
HOURS_OF: Final = {"leak_restarts": 19.0, "leak_late_onset": 18.0}
"""The generator restarts that engine every six hours, and that leak begins after 8 to 14."""

SEEDS: Final = (0, 1)
LEAKS: Final = (
    "leak_req_12.8",
    "leak_time_100000",
    "leak_req_diurnal",
    "leak_sawtooth",
    "leak_restarts",
    "leak_late_onset",
)
ORDINARY: Final = (
    "flat",
    "staircase_saturating",
    "diurnal_memfollows",
    "burst_highwater",
    "sleep_wake",
    "restart_mid",
    "nvml_gaps_stale",
)

STEADY: Final = ("leak_req_12.8", "leak_req_51.2", "leak_time_100000", "leak_time_500000", "leak_time_2000000")
"""At constant load and fast enough that the alarm comes within three hours."""

STEADY_HOURS: Final = 3.0
MORE_SEEDS: Final = tuple(range(5))
"""A median needs more traces than a verdict on each."""

with_and_without_attribution = pytest.mark.parametrize("attributed", [True, False], ids=["attributed", "unattributed"])


@with_and_without_attribution
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_found_and_not_before_it_began(name: str, seed: int, *, attributed: bool) -> None:
    judged = verdict(name, seed, attributed=attributed)

    assert judged["found"], "a card fills whoever holds its memory"
    assert judged["early_mb"] > 0
    assert judged["false"] == judged["early_false"] == 0


@with_and_without_attribution
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ORDINARY)
def test_what_is_no_leak_neither_leaks_nor_grows(name: str, seed: int, *, attributed: bool) -> None:
    judged = verdict(name, seed, attributed=attributed)

    assert judged["false"] == judged["early_false"] == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_neighbour_that_attribution_tells_apart_is_no_leak(seed: int) -> None:
    judged = verdict("sibling_arrives", seed)

    assert judged["false"] == judged["early_false"] == 0


def test_the_alarm_comes_before_much_has_leaked() -> None:
    judged = [verdict("leak_req_12.8", seed, hours=STEADY_HOURS) for seed in MORE_SEEDS]

    assert median(judgement["mb"] for judgement in judged) <= 650
    assert max(judgement["mb"] for judgement in judged) <= 1100
    assert median(judgement["early_mb"] for judgement in judged) <= 150


def test_the_rate_is_right_and_its_interval_covers_the_truth() -> None:
    judged = [verdict(name, seed, hours=STEADY_HOURS) for name in STEADY for seed in MORE_SEEDS]
    covered = [judgement[f"{moment}_covered"] for judgement in judged for moment in ("first", "last")]

    assert median(judgement["first_error"] for judgement in judged) <= 0.07
    assert median(judgement["last_error"] for judgement in judged) <= 0.07
    assert sum(covered) / len(covered) >= 0.95


MECHANISMS: Final = {"leak_fast_each_second": 2, "leak_small_card": 6, "leak_learning": 3, "leak_host_requests": 6}
MECHANISMS_AT_REST: Final = ("ok_quiet", "ok_learning", "ok_uncounted", "ok_host")
"""Of the simulator of mechanisms, which knows its own hours: a few that are quick. It samples every 5 seconds, or each
second; a sixth of a day's samples, as far apart as those above, takes a sixth of the time."""


@pytest.mark.parametrize(("name", "every"), MECHANISMS.items(), ids=MECHANISMS)
def test_a_leak_beneath_a_real_allocator_is_found_and_held_to_the_end(name: str, every: int) -> None:
    judged = judge.judge(simulated(name, every))

    assert judged["found"]
    assert judged["false"] == 0
    assert judged["held"] in (True, None)


@pytest.mark.parametrize("name", MECHANISMS_AT_REST)
def test_what_an_allocator_does_by_itself_is_no_leak(name: str) -> None:
    assert judge.judge(simulated(name, 6))["false"] == 0


def test_files_that_were_split_and_joined_are_judged_as_one() -> None:
    recording = write_recording()
    middle = len(recording) // 2
    joined = [*recording[:middle], recording[0], *recording[middle:]]

    (course,), (again,) = (replay_lines(lines).gpus for lines in (recording, joined))

    assert course[2].leaking
    assert (again[2].leaking, again[2].growing) == (course[2].leaking, course[2].growing)


def test_an_engine_that_never_answers_gets_no_verdict() -> None:
    header, *samples = write_recording()
    silent = [json.dumps(json.loads(line) | {"engines": None}).encode() for line in samples]

    ((_, _, course),) = replay_lines([header, *silent]).gpus

    assert course.state is LeakState.WARMING_UP
    assert not course.leaking
    assert not course.growing


def test_the_simulator_is_the_same_for_the_same_seed_and_keeps_a_third_out_of_tuning() -> None:
    first_simulation, again = (traces.simulated("leak_each_minute", 3) for _ in range(2))

    assert first_simulation == again
    assert first_simulation.samples != traces.simulated("leak_each_minute", 4).samples
    names = traces.NAMES["mechanisms"]
    assert len(names) >= 60
    assert sum(map(traces.is_held_out, names)) == len(names) // 3


def simulated(name: str, every: int) -> traces.Labelled:
    """Return a trace with every so many-th of its samples."""
    trace = traces.simulated(name, 0)
    return traces.Labelled(trace.samples[::every], trace.truth)


def write_recording() -> list[bytes]:
    trace = generate.make("leak_req_12.8", 0, STEADY_HOURS, DENSE_SECONDS)
    return [line.encode() for line in generate.lines(trace)]


def replay_lines(lines: list[bytes]) -> LeakReplay:
    watch = LeakReplay()
    for snapshot in parse_trace(lines):
        watch.step(snapshot)
    return watch


@cache
def verdict(name: str, seed: int, *, hours: float = HOURS, attributed: bool = True) -> dict[str, Any]:
    """Return the scorer's judgement of what the detector reports about a trace."""
    interval = DENSE_SECONDS if name == "staircase_saturating" or hours == STEADY_HOURS else INTERVAL_SECONDS
    trace = traces.generated(name, seed, HOURS_OF.get(name, hours), interval, attributed=attributed)
    judged: dict[str, Any] = judge.judge(trace)
    return judged
