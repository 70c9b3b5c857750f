"""When the time left falls under an hour: not by a large demand, and in time before a step that does not fit."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.unit.derive.leak.stretches import HOUR, Shape, segments
from tests.unit.derive.leak.test_releases import followed
from vllm_headroom.derive.leak.facts import OUT_OF_MEMORY_BYTES, Certainty
from vllm_headroom.units import MIB

LEAK = 140e3
"""Bytes per second."""


def take(demands_mib: dict[float, float]) -> Shape:
    """Return memory that is taken in steps, by the minute in which each comes."""

    def shape(seconds: float) -> float:
        return sum(size_mib * MIB for minutes, size_mib in demands_mib.items() if seconds >= minutes * 60)

    return shape


@pytest.mark.parametrize(
    "demands_mib",
    [
        pytest.param({57: 888}, id="one large demand in an even leak"),
        pytest.param({2: 600, 12: 240, 21: 450, 36: 350}, id="a warm-up in large steps"),
    ],
)
def test_large_demands_bring_the_end_of_an_even_leak_no_nearer(demands_mib: dict[float, float]) -> None:
    demand = take(demands_mib)
    room_bytes = 6e9

    def shape(seconds: float) -> float:
        return segments(LEAK * seconds, 20 * MIB) + demand(seconds)

    ratios = []
    for seconds, track in followed(shape, 2.5, room_bytes):
        if seconds > 1.1 * HOUR and track.estimate is not None and track.estimate.oom_seconds is not None:
            left_seconds = (room_bytes - shape(seconds) - OUT_OF_MEMORY_BYTES) / LEAK
            ratios.append(track.estimate.oom_seconds / left_seconds)

    assert track.verdict is Certainty.LEAKING
    assert min(ratios) > 0.55


@pytest.mark.parametrize(
    "minutes", [(58, 88, 174, 355), (10, 22, 45, 90)], ids=["a buffer of hours", "a buffer of minutes"]
)
def test_the_next_size_of_a_buffer_that_doubles_is_an_alarm_if_it_does_not_fit(minutes: tuple[float, ...]) -> None:
    buffer = take(dict(zip(minutes, (970, 977, 1954, 3908), strict=True)))
    *_, earlier, newest = minutes
    next_minutes = newest + 2 * (newest - earlier)
    tracks = {seconds / 60: track for seconds, track in followed(buffer, next_minutes / 60, 10_000 * MIB)}

    assert tracks[newest - 1].verdict is not Certainty.LEAKING
    for minute in (newest + 5, next_minutes - 30):
        track = tracks[minute]
        assert track.verdict is Certainty.LEAKING
        assert track.estimate is not None
        assert track.estimate.oom_seconds is not None
        assert track.estimate.oom_seconds <= (next_minutes - minute) * 60 + 60
        assert track.estimate.oom_seconds_lower is not None
        assert track.estimate.oom_seconds_lower <= max(0, newest + newest - earlier - minute) * 60


@pytest.mark.parametrize(
    ("minutes", "sizes_mib"),
    [
        pytest.param((58, 88, 174, 355), (1000, 1000, 1500, 2000), id="steps that do not double"),
        pytest.param((58, 174, 230, 250), (970, 977, 1954, 3908), id="each comes sooner than the one before"),
    ],
)
def test_other_growing_steps_are_no_buffer_that_doubles(
    minutes: tuple[float, ...], sizes_mib: tuple[float, ...]
) -> None:
    shape = take(dict(zip(minutes, sizes_mib, strict=True)))

    assert all(later > earlier for earlier, later in pairwise(minutes))
    assert {track.verdict for _, track in followed(shape, 6.5, 10_000 * MIB)} <= {Certainty.NONE, Certainty.GROWING}


def test_no_alarm_begins_when_the_room_is_gone() -> None:
    """Demands of a new kind fill the card to its end, and then nothing is needed any more."""
    minutes = (1, 3, 5, 8, 13, 21, 27, 72, 95, 322, 441, 455, 459, 496)
    sizes_mib = (300, 140, 100, 140, 60, 140, 60, 236, 340, 340, 180, 140, 140, 457)
    room_bytes = (sum(sizes_mib) + 60) * MIB
    shape = take(dict(zip(minutes, sizes_mib, strict=True)))

    verdicts = [track.verdict for _, track in followed(shape, 12, room_bytes)]

    assert Certainty.LEAKING not in verdicts


def test_large_buffers_of_the_first_hour_that_are_released_then_are_no_alarm() -> None:
    """A chore takes a few buffers of nearly one size each twenty minutes, and ever fewer are released in between."""
    taken_mib: dict[float, float] = {
        0.5: 584,
        1.5: 32,
        2.5: 580,
        3.5: 1518,
        4.5: 32,
        11.5: 12,
        15: -2548,
        15.5: 480,
        16: 602,
        16.5: 918,
    }
    taken_mib |= {35: 12, 38.5: -1900, 39: 1040, 40: 768, 44: 786, 45: 828, 49.5: 842, 52.5: 912, 59.5: -5204}

    verdicts = [track.verdict for _, track in followed(take(taken_mib), 1.2, 7278 * MIB)]

    assert Certainty.LEAKING not in verdicts
