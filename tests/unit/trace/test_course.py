"""The states that the detector went through on a trace."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.unit.commands.check.engine_traces import BEGAN, STEP, engine
from vllm_headroom_tools.history import LeakReplay
from vllm_headroom_tools.trace import parse_snapshot


@pytest.mark.parametrize("restarts", [False, True])
def test_an_early_warning_is_undecided_where_a_restart_cut_it_off(*, restarts: bool) -> None:
    growing_seconds = 3240.0
    steps = int(growing_seconds / STEP)
    growing = list(islice(engine(leak=12.8e6), steps))
    held_bytes = growing[-1]["gpus"][0]["used"]
    calm = islice(engine(2.6, held_bytes=held_bytes, restarts_at=growing_seconds * restarts), steps, None)
    watch = LeakReplay()
    for sample in (*growing, *calm):
        watch.step(parse_snapshot(sample))

    course = watch.course("GPU-0")
    ((begin, end),) = course.growing
    assert begin < BEGAN + growing_seconds <= (end or 0.0)
    assert course.warning is None
    assert course.is_undecided == restarts
