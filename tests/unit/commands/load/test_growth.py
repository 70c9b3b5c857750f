from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.unit.commands.replay.traces import flat, leaking, text
from vllm_headroom.commands.load.report import Growth, LeakVerdict
from vllm_headroom.commands.load.status import growth, watched
from vllm_headroom.trace.course import Course
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.vocabulary import LeakState


def told(folder: Path, records: Iterable[dict[str, Any]]) -> Growth:
    file = folder / "trace.jsonl"
    file.write_text(text(records))
    watch = watched(file)
    ((_, _, course),) = watch.gpus
    begin, end = watch.span
    return growth(course, end - begin)


def test_a_leak_is_one_with_the_detectors_figure(tmp_path: Path) -> None:
    found = told(tmp_path, leaking(3.0))

    assert (found.verdict, found.state) == (LeakVerdict.LEAKING, LeakState.LEAKING)
    assert found.bytes_per_request == pytest.approx(12_800, rel=0.1)


def test_the_early_warning_is_growth(tmp_path: Path) -> None:
    found = told(tmp_path, islice(leaking(3.0), 600))

    assert found.verdict is LeakVerdict.GROWING
    assert found.bytes_per_request is None


def test_a_flat_line_of_hours_is_no_leak(tmp_path: Path) -> None:
    assert told(tmp_path, flat(2.0)).verdict is LeakVerdict.NO_LEAK


def test_a_flat_line_of_minutes_proves_nothing(tmp_path: Path) -> None:
    found = told(tmp_path, flat(0.5))

    assert found.verdict is LeakVerdict.CANNOT_TELL
    assert found.reason == (
        "29 min 55 s is too short, an early warning takes 10 minutes of growth or more and an alarm about 60"
    )


def test_hours_that_end_in_an_unsettled_state_prove_nothing() -> None:
    course = Course()
    course.state = LeakState.UNSETTLED

    assert growth(course, 7200.0).verdict is LeakVerdict.CANNOT_TELL
    assert growth(course, 7200.0).reason == "the detector ended in state unsettled"


def test_a_trace_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        watched(tmp_path / "trace")
