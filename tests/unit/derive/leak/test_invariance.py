"""What must not change a verdict: units, clocks, gaps, doubles, jitter, an engine that says nothing, two that do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

import pytest
from msgspec.structs import replace

from tests.unit.derive.leak.stretches import HOUR, Shape, flat, follow, leak, readings, records, segments
from vllm_headroom.derive.leak.facts import Certainty, Observation
from vllm_headroom.derive.leak.leak import Tracks, keep_recent
from vllm_headroom.units import MIB

Change = Callable[[Iterable[Observation]], Iterator[Observation]]
HOURS = 4.0


def lumps(seconds: float) -> float:
    return 400 * MIB * int(seconds / 2400) + segments(seconds * 10_000)


def slow(seconds: float) -> float:
    return segments(seconds * 30_000)


SHAPES: dict[str, tuple[Shape, Certainty]] = {
    "leak": (leak, Certainty.LEAKING),
    "flat": (flat, Certainty.NONE),
    "records": (records(3, HOURS), Certainty.NONE),
    "lumps": (lumps, Certainty.LEAKING),
}


def shifted(observations: Iterable[Observation]) -> Iterator[Observation]:
    return (replace(observation, seconds=observation.seconds + 1.7e9) for observation in observations)


def scaled(observations: Iterable[Observation]) -> Iterator[Observation]:
    """Tell MiB as if they were MB."""
    for observation in observations:
        held_bytes, room = (
            round((amount or 0) * MIB / 1e6) for amount in (observation.held_bytes, observation.room_bytes)
        )
        yield replace(observation, held_bytes=held_bytes, room_bytes=room)


def doubled(observations: Iterable[Observation]) -> Iterator[Observation]:
    return (repeated_observation for observation in observations for repeated_observation in (observation, observation))


def thinned(observations: Iterable[Observation]) -> Iterator[Observation]:
    chance = random.Random(7)  # noqa: S311 - it plays a bad network
    return (observation for observation in observations if chance.random() > 0.3)


def jittered(observations: Iterable[Observation], seed: int = 8) -> Iterator[Observation]:
    chance = random.Random(seed)  # noqa: S311 - it plays a driver that rounds
    return (
        replace(observation, held_bytes=(observation.held_bytes or 0) + chance.choice((-2, 0, 2)) * MIB)
        for observation in observations
    )


def silent(observations: Iterable[Observation]) -> Iterator[Observation]:
    return (replace(observation, finished_total=None, run_id=None) for observation in observations)


def in_turn(observations: Iterable[Observation]) -> Iterator[Observation]:
    """Let two servers answer in turn, one that began later and has done a little less."""
    chance = random.Random(9)  # noqa: S311 - it plays a load balancer
    for observation in observations:
        later = replace(observation, run_id="2", finished_total=0.9 * (observation.finished_total or 0.0))
        yield chance.choice((observation, later))


def misdated(observations: Iterable[Observation]) -> Iterator[Observation]:
    """Give one reading in a hundred the date of another century."""
    for number, observation in enumerate(observations):
        wild = 4e9 if number % 200 else 0.0
        yield replace(observation, seconds=wild) if number % 100 == 99 else observation


CHANGES: tuple[Change, ...] = (shifted, scaled, doubled, thinned, jittered, silent, in_turn, misdated)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", SHAPES)
def test_the_verdict_is_the_same(name: str, change: Change) -> None:
    shape, verdict = SHAPES[name]
    hours = 10.0 if name == "lumps" else HOURS

    course = follow(change(readings(shape, hours)))

    assert course.worst is verdict if verdict is Certainty.NONE else course.verdicts[-1] is verdict


@pytest.mark.parametrize("seed", range(8, 12))
@pytest.mark.parametrize(
    ("shape", "verdict"),
    [(leak, Certainty.GROWING), (leak, Certainty.LEAKING), (slow, Certainty.GROWING)],
    ids=["leak-growing", "leak-leaking", "slow-growing"],
)
def test_jitter_moves_no_verdict_by_more_than_the_two_minutes_between_judgements(
    shape: Shape, verdict: Certainty, seed: int
) -> None:
    """The least of a block's readings damps it: blocks of one reading, or rises counted from 4 MiB on, come later."""
    still, shaken = (
        follow(observations).first(verdict)
        for observations in (readings(shape, 1.5), jittered(readings(shape, 1.5), seed))
    )

    assert shaken == pytest.approx(still, abs=5 / 60)


@pytest.mark.parametrize("cut", [5, 101, 310], ids=["starting", "growing", "leaking"])
def test_a_series_that_was_put_down_and_taken_up_again_is_judged_alike(cut: int) -> None:
    """Another series in between must not matter: all that is remembered of this one is in its track."""
    observations = list(readings(leak, 1.5))
    first_track = follow(observations[:cut]).track
    follow(readings(records(3, 1), 1))

    assert follow(observations[cut:], first_track).track == follow(observations).track


def test_one_wild_date_interrupts_no_alarm() -> None:
    course = follow(readings(leak, 2))
    assert course.verdicts[-1] is Certainty.LEAKING

    for wild in (0.0, 4e9):
        last_seconds = course.track.clock.snapshot_seconds
        later_course = follow(
            [
                Observation(seconds=wild, held_bytes=1, run_id="1"),
                *(
                    replace(observation, seconds=last_seconds + observation.seconds)
                    for observation in readings(leak, 0.1)
                ),
            ],
            course.track,
        )
        assert later_course.verdicts[0] is Certainty.LEAKING
        assert later_course.track.clock.now_seconds < 3 * HOUR


def test_a_wild_date_makes_no_series_forgotten_and_a_day_does() -> None:
    old, new = follow(readings(flat, 0.1)).track, follow(shifted(readings(flat, 0.1))).track
    state: Tracks = {"GPU-a": new, "GPU-b": new}

    assert set(keep_recent(state, ())) == {"GPU-a", "GPU-b"}
    assert set(keep_recent({"GPU-a": new, "GPU-b": old}, ())) == {"GPU-a"}
