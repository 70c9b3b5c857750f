"""Growth that took most of the room, whatever its steps."""

from __future__ import annotations

import pytest

from tests.unit.derive.leak.stretches import HOUR, Shape, follow, readings
from vllm_headroom.derive.leak.facts import Certainty
from vllm_headroom.units import MIB

Steps = tuple[tuple[float, int], ...]
"""The hour and the MiB of each step; the room is 6.4 GiB."""

UNEVEN: Steps = ((1.2, 300), (1.7, 900), (2.1, 150), (2.6, 1200), (2.9, 1250), (3.2, 1700), (3.5, 100), (3.7, 60))
EVER_SMALLER: Steps = (
    (0.05, 2850),
    (0.3, 1300),
    (0.6, 700),
    (1.0, 350),
    (1.5, 180),
    (2.2, 90),
    (3.0, 60),
    (3.6, 40),
)


QUIET_AT_THE_END: Steps = (
    (0.3, 700),
    (0.6, 500),
    (1.1, 900),
    (1.3, 600),
    (1.6, 500),
    (3.2, 900),
    (3.4, 700),
    (3.6, 700),
    (3.75, 680),
)
"""The last two thirds of the run have much of the growth only an hour after its last step."""


def take(steps: Steps) -> Shape:
    return lambda seconds: MIB * sum(size for hour, size in steps if seconds >= hour * HOUR)


def test_uneven_growth_that_took_most_of_the_room_is_an_alarm() -> None:
    at = follow(readings(take(UNEVEN), 4.5)).first(Certainty.LEAKING)

    assert at is not None
    assert 3.2 < at < 4


@pytest.mark.parametrize("steps", [EVER_SMALLER, UNEVEN[:5]], ids=["slows down", "much room is left"])
def test_growth_that_slows_down_or_leaves_room_is_none(steps: Steps) -> None:
    assert follow(readings(take(steps), 4.5)).worst < Certainty.LEAKING


def test_no_alarm_begins_while_memory_does_not_rise() -> None:
    course = follow(readings(take(QUIET_AT_THE_END), 8.0))
    at = course.first(Certainty.LEAKING)

    assert at is None or at < 4.3


def test_a_single_large_demand_that_takes_most_of_the_room_is_no_alarm() -> None:
    """Without the large one, half of the room would be left."""
    one_large = ((1.2, 300), (1.7, 400), (2.1, 250), (2.6, 500), (2.9, 300), (3.2, 3650), (3.5, 300), (3.7, 160))

    assert follow(readings(take(one_large), 4.5)).worst < Certainty.LEAKING
