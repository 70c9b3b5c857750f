"""Load at twice its height makes demands of its own: what a few large steps foretell is counted from there."""

from __future__ import annotations

from tests.unit.derive.leak.stretches import HOUR, Course, Shape, changed, follow, leak, readings
from vllm_headroom.derive.leak.facts import MIB, Verdict

DOUBLED = 6 * HOUR
STEP_HOURS = 0.6
STEP_BYTES = 900 * MIB


def steps(most: int) -> Shape:
    """Return so many steps, 36 minutes apart, of which the first comes as long after the load."""
    return lambda seconds: STEP_BYTES * max(0, min(most, int((seconds - DOUBLED) / HOUR / STEP_HOURS)))


def told(shape: Shape, hours: float, running: float) -> Course:
    """Follow memory under 80 requests at once, and under so many from the sixth hour on."""
    seen = changed(readings(shape, hours), lambda _: True, running=80.0)
    return follow(changed(seen, lambda each: each.seconds >= DOUBLED, running=running))


def test_the_first_large_steps_of_a_doubled_load_are_no_alarm_and_at_a_level_load_they_are_one() -> None:
    assert told(steps(4), 10.0, 80.0).worst is Verdict.LEAKING
    assert told(steps(4), 10.0, 119.0).worst is Verdict.LEAKING
    assert told(steps(4), 10.0, 161.0).worst < Verdict.LEAKING


def test_steps_that_go_on_at_a_doubled_load_are_an_alarm() -> None:
    alarm = told(steps(7), 12.0, 161.0).first(Verdict.LEAKING)

    assert alarm is not None
    assert alarm * HOUR - DOUBLED < 5.5 * HOUR


def test_just_after_load_doubled_growth_proves_as_little_as_after_a_start() -> None:
    def late(seconds: float) -> float:
        return leak(max(0.0, seconds - DOUBLED))

    level, doubled = (told(late, 7.0, running).first(Verdict.GROWING) for running in (80.0, 161.0))

    assert level is not None
    assert doubled is not None
    assert 1 / 60 < doubled - level < 0.2
