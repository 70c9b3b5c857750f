"""What the engine was started with is in the trace; what the operator gives wins."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.commands.advise import traces
from vllm_headroom_tools.advise.settings import FIELD_VERSIONS, EngineArgs
from vllm_headroom_tools.advise.verdict import judge_facts


def read_engine_args(settings: EngineArgs = traces.UNTOLD, **engine_fields: Any) -> EngineArgs:
    return traces.facts((traces.sample(step, **engine_fields) for step in range(3)), settings).settings


def test_the_share_of_the_gpu_is_the_engines_own() -> None:
    assert read_engine_args(gpu_memory_utilization=0.92).gpu_memory_utilization == 0.92
    assert read_engine_args().gpu_memory_utilization is None


def test_what_the_operator_gives_wins() -> None:
    assert (
        read_engine_args(EngineArgs(gpu_memory_utilization=0.8), gpu_memory_utilization=0.92).gpu_memory_utilization
        == 0.8
    )


def test_a_cache_that_is_sized_in_bytes_is_seen() -> None:
    settings = read_engine_args(kv_cache_memory_bytes=2**30, awake=None)

    assert (settings.sizes_cache_in_bytes, settings.kv_cache_memory_bytes) == (True, 2**30)
    assert settings.earliest_version == FIELD_VERSIONS["kv_cache_memory_bytes"]


def test_the_newest_run_of_the_engine_counts() -> None:
    lives = [traces.sample(0, gpu_memory_utilization=0.95), traces.sample(1, gpu_memory_utilization=0.9)]

    assert traces.facts([*lives, traces.down(2)]).settings.gpu_memory_utilization == 0.9


@pytest.mark.parametrize("share", [0.92, None])
def test_a_value_takes_the_place_of_a_difference_where_the_share_is_known(share: float | None) -> None:
    records = (
        {**record, "engines": [{**record["engines"][0], "gpu_memory_utilization": share}]}
        for record in traces.configuration_overshoot()
    )
    change = judge_facts(traces.facts(records)).advice[0].changes[0]

    assert (change.now, change.value is not None, change.difference is not None) == (
        share,
        share is not None,
        share is None,
    )
