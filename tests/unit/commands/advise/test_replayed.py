"""Each advised value, checked by replaying the trace under it: what it was advised for is gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.commands.advise import traces
from tests.unit.commands.advise.test_causes import AS_SET, answer, only
from vllm_headroom_tools.advise.facts import AIM_BYTES
from vllm_headroom_tools.advise.finding import Change
from vllm_headroom_tools.advise.settings import EngineArgs, Flag

MEMORY: tuple[traces.Trace, ...] = (
    traces.configuration_overshoot,
    traces.chronic,
    traces.burst,
    traces.burst_that_ends_the_engine,
    traces.unused_memory,
)


def find_change(trace: traces.Trace, flag: Flag) -> Change:
    (change,) = (change for change in only(trace).changes if change.flag is flag)
    return change


@pytest.mark.parametrize("trace", MEMORY, ids=lambda trace: trace.__name__)
def test_an_advised_share_of_the_gpu_leaves_a_gib_at_the_highest_peak(trace: traces.Trace) -> None:
    change = find_change(trace, Flag.GPU_MEMORY_UTILIZATION)
    assert change.value is not None
    assert change.now is not None
    extra_bytes = int((change.value - change.now) * traces.USABLE_MIB) * traces.MIB

    def under() -> Iterator[traces.Record]:
        for record in trace():
            gpus = record["gpus"]
            raised_gpus = (
                {**gpu, "used": gpu["used"] + extra_bytes, "engine": gpu["engine"] + extra_bytes} for gpu in gpus
            )
            yield {
                **record,
                "gpus": [new if gpu["engine"] else gpu for gpu, new in zip(gpus, raised_gpus, strict=True)],
            }

    reply = answer(under, EngineArgs(gpu_memory_utilization=change.value))

    assert only(trace).cause not in {advice.cause for advice in reply.advice}
    assert (reply.facts.least_room_bytes or 0) >= AIM_BYTES


def test_an_advised_limit_on_requests_ends_the_preemptions() -> None:
    change = find_change(traces.too_many_requests, Flag.MAX_NUM_SEQS)
    request_limit = change.value or 0

    def under() -> Iterator[traces.Record]:
        for record in traces.too_many_requests():
            (engine,) = record["engines"]
            share = min(1.0, request_limit / engine["running"])
            now = {"running": engine["running"] * share, "kv_used_ratio": engine["kv_used_ratio"] * share}
            yield {**record, "engines": [{**engine, **now, "preemptions_total": 0}]}

    reply = answer(under, AS_SET)

    assert reply.advice == ()
