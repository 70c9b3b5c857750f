from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest

from tests.unit.commands.replay.traces import flat, leaking
from vllm_headroom.vocabulary import LeakState
from vllm_headroom_tools.history import LeakCourse, LeakReplay, LeakVerdict, Moment, judge_course
from vllm_headroom_tools.trace import parse_snapshot


def judge_growth_of(records: Iterable[dict[str, Any]]) -> tuple[LeakVerdict, str]:
    watch = LeakReplay()
    for snapshot in map(parse_snapshot, records):
        watch.step(snapshot)
    begin, end = watch.span
    return judge_course(watch.course("GPU-a"), end - begin)


def test_a_leak_is_one() -> None:
    assert judge_growth_of(leaking(3.0)) == (LeakVerdict.LEAKING, "even growth that load does not explain")


def test_the_early_warning_is_growth() -> None:
    verdict, _ = judge_growth_of(islice(leaking(3.0), 600))

    assert verdict is LeakVerdict.GROWING


def test_a_flat_line_of_hours_is_no_leak() -> None:
    assert judge_growth_of(flat(2.0)) == (LeakVerdict.NO_LEAK, "no growth that load does not explain")


def test_a_flat_line_of_minutes_proves_nothing() -> None:
    assert judge_growth_of(flat(0.5)) == (
        LeakVerdict.CANNOT_TELL,
        "29 min 55 s is too short, growth has to last 10 min for an early warning, about 60 for an alarm",
    )


def test_hours_in_which_the_detector_never_settled_prove_nothing() -> None:
    course = LeakCourse()
    course.state = LeakState.UNSETTLED

    assert judge_course(course, 7200.0) == (
        LeakVerdict.CANNOT_TELL,
        "the detector never had enough readings under load",
    )


def follow(*states: tuple[float, LeakState]) -> LeakCourse:
    """Return the course of states at these times in hours."""
    course = LeakCourse()
    for hours, state in states:
        course.step(state, Moment(seconds=hours * 3600))
    return course


STABLE, GROWING = LeakState.STABLE, LeakState.GROWING


@pytest.mark.parametrize(
    ("course", "expected"),
    [
        (follow((0, STABLE), (1, GROWING), (1.5, STABLE), (3, STABLE)), LeakVerdict.NO_LEAK),
        # Within the hour that growth takes to be an alarm, the end of a warning means little.
        (follow((0, STABLE), (1, GROWING), (1.5, STABLE), (2.4, STABLE)), LeakVerdict.GROWING),
        # Growth for longer than an alarm takes was not decided, however long ago it ended.
        (follow((0, STABLE), (1, GROWING), (4.5, STABLE), (24, STABLE)), LeakVerdict.GROWING),
        (
            follow((0, GROWING), (0.6, STABLE), (5, GROWING), (5.6, STABLE), (24, STABLE)),
            LeakVerdict.GROWING,
        ),
        # Time in which nothing could be judged is no time without growth.
        (follow((1, GROWING), (1.5, STABLE), (1.6, LeakState.UNKNOWN), (9, LeakState.UNKNOWN)), LeakVerdict.GROWING),
    ],
)
def test_a_withdrawn_warning_counts_unless_it_was_short_and_long_ago(course: LeakCourse, expected: LeakVerdict) -> None:
    assert judge_course(course, 24 * 3600.0)[0] is expected
