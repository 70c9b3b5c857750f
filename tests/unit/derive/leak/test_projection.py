"""The projection of the last hours, on floors that are given to it."""

from __future__ import annotations

from itertools import pairwise

from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import MIB, Point, Step, Verdict
from vllm_headroom.derive.leak.shape import Growth
from vllm_headroom.derive.leak.steps import Life, project

BLOCK_SECONDS = 960.0
FIRST = Point(30.0, 300.0, 0.0, 0.0)
LIFE = Life(first=FIRST, room_bytes=2000.0 * MIB, before=Verdict.NONE)


def floors(*held_mib: float) -> tuple[Point, ...]:
    """Return a point for each block of 16 minutes, at ten requests a second."""
    return tuple(
        Point(seconds, 10 * seconds, seconds, held * MIB)
        for number, held in enumerate(held_mib, start=1)
        for seconds in [number * BLOCK_SECONDS]
    )


def foretold(points: tuple[Point, ...], life: Life) -> tuple[Verdict, Growth | None]:
    """Return what is foretold where each rise of the floors was one step, seen early in the block before."""
    pairs = [(before, after) for before, after in pairwise(points) if after.floor_bytes > before.floor_bytes]
    steps = tuple(Step(before.seconds - 900.0, before.floor_bytes, after.floor_bytes) for before, after in pairs)
    return project(points, steps, life)


QUIET = (0.0,) * 20
STEPS = (*QUIET, 500.0, 500.0, 1000.0, 1000.0, 1500.0, 1500.0)


def test_steps_after_quiet_hours_are_a_leak_and_the_growth_is_theirs() -> None:
    verdict, grown = foretold(floors(*STEPS), LIFE)

    assert verdict is Verdict.LEAKING
    assert grown is not None
    assert grown.total_bytes == 1500 * MIB
    assert grown.points[0].floor_bytes == 0


def test_the_same_steps_are_none_where_the_first_hour_took_as_much_by_folds_of_work() -> None:
    steps = [500.0 * (number // 6) for number in range(28)]

    def after(*first_hour: float) -> Verdict:
        return foretold(floors(*first_hour, *(first_hour[-1] + step for step in steps)), LIFE)[0]

    assert after(0.0, 0.0, 0.0, 0.0) is Verdict.LEAKING
    assert after(1500.0, 3000.0, 4500.0, 6000.0) is Verdict.NONE


def test_once_there_is_an_alarm_it_goes_on_without_proof_until_growth_ends() -> None:
    roomy = replace(LIFE, room_bytes=9000.0 * MIB)
    alarmed = replace(roomy, before=Verdict.LEAKING)

    assert foretold(floors(*STEPS), roomy)[0] is not Verdict.LEAKING
    assert foretold(floors(*STEPS), alarmed)[0] is Verdict.LEAKING
    assert foretold(floors(*STEPS, *(1500.0,) * 6), alarmed)[0] is Verdict.NONE


def test_an_alarm_does_not_end_where_the_next_step_may_find_no_room() -> None:
    ended = floors(*STEPS, *(1500.0,) * 6)

    def last(room_mib: float, before: Verdict) -> Verdict:
        return foretold(ended, replace(LIFE, room_bytes=room_mib * MIB, before=before))[0]

    assert last(480.0, Verdict.LEAKING) is Verdict.LEAKING
    assert last(520.0, Verdict.LEAKING) is Verdict.NONE
    assert last(480.0, Verdict.GROWING) is Verdict.NONE


def test_work_is_counted_from_the_first_block_and_what_was_before_it_says_nothing() -> None:
    late = replace(FIRST, seconds=23 * BLOCK_SECONDS, requests=230 * BLOCK_SECONDS)

    assert foretold(floors(*STEPS), replace(LIFE, first=late))[0] is Verdict.NONE
