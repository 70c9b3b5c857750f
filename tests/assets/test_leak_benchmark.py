"""A part of `make bench-leak`, small enough for every run: the detector's figures on traces whose truth is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from statistics import median
from typing import Any, Final

import generate
import pytest
import score

from vllm_headroom.commands.replay.answer import document
from vllm_headroom.model import Snapshot
from vllm_headroom.trace.parse import snapshots
from vllm_headroom.trace.replay import Watch

INTERVAL_SECONDS: Final = 15.0
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

    assert judged["found"]
    assert judged["false"] == judged["early_false"] == 0


@with_and_without_attribution
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ORDINARY)
def test_what_is_no_leak_neither_grows_nor_leaks(name: str, seed: int, *, attributed: bool) -> None:
    judged = verdict(name, seed, attributed=attributed)

    assert judged["false"] == judged["early_false"] == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_neighbour_that_attribution_tells_apart_is_no_leak(seed: int) -> None:
    judged = verdict("sibling_arrives", seed)

    assert judged["false"] == judged["early_false"] == 0


def test_the_alarm_comes_before_much_has_leaked() -> None:
    judged = [verdict("leak_req_12.8", seed, hours=STEADY_HOURS) for seed in MORE_SEEDS]

    assert median(each["mb"] for each in judged) <= 650
    assert max(each["mb"] for each in judged) <= 1100
    assert median(each["early_mb"] for each in judged) <= 150


def test_the_rate_is_right_and_its_interval_covers_the_truth() -> None:
    judged = [verdict(name, seed, hours=STEADY_HOURS) for name in STEADY for seed in MORE_SEEDS]
    covered = [each[f"{which}_covered"] for each in judged for which in ("first_leaking", "last_leaking")]

    assert median(each["first_leaking_rate_error"] for each in judged) <= 0.07
    assert median(each["last_leaking_rate_error"] for each in judged) <= 0.07
    assert sum(covered) / len(covered) >= 0.95


@cache
def verdict(name: str, seed: int, *, hours: float = HOURS, attributed: bool = True) -> dict[str, Any]:
    """Return the scorer's judgement of what replay says of a trace."""
    trace = generate.make(name, seed, HOURS_OF.get(name, hours), INTERVAL_SECONDS)
    watch = Watch()
    for snapshot in usable(snapshots(line.encode() for line in generate.lines(trace, attributed))):
        watch.step(snapshot)
    judged: dict[str, Any] = score.judge(trace, document(watch))
    return judged


def usable(past: Iterable[object]) -> Iterator[Snapshot]:
    for each in past:
        assert isinstance(each, Snapshot), each
        yield each
