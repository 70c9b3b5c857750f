"""When /gate/ready is closed, when it opens again, and when the pod is to be evicted."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.samples import A_GPU, snapshot
from vllm_headroom import catalog
from vllm_headroom.derive.gates import Gate, Guardrail, derive_gate
from vllm_headroom.model import EngineStatus, Metric, Sample, Values
from vllm_headroom.vocabulary import EngineState, EvictionResult, LeakState

LEAST = 600.0
OPEN = Gate()
HOLDER = Guardrail(near_seconds=LEAST, quiet_hour=None, is_holder=True)


def ask(
    left_seconds: float | None,
    *,
    metric: Metric = catalog.TIME_TO_OOM_LOWER,
    state: EngineState = EngineState.SERVING,
    least_seconds: float | None = LEAST,
    guardrail: Guardrail | None = HOLDER,
) -> tuple[Gate, tuple[Sample, ...]]:
    """Return the gate where so many seconds are left."""
    labels = A_GPU if metric is catalog.TIME_TO_OOM_LOWER else ()
    values = Values(() if left_seconds is None else (Sample(metric, labels, left_seconds),))
    return derive_gate(replace(snapshot(), engine_status=EngineStatus(state=state)), values, least_seconds, guardrail)


@pytest.mark.parametrize(
    ("metric", "whose"), [(catalog.TIME_TO_OOM_LOWER, "GPU 0"), (catalog.HOST_TIME_TO_OOM_LOWER, "the host")]
)
def test_it_closes_where_out_of_memory_is_near(metric: Metric, whose: str) -> None:
    near, samples = ask(LEAST - 1, metric=metric)

    assert near.reason == f"{whose} may be out of memory in 9 min 59 s"
    assert samples == (Sample(catalog.GATE_OPEN, ("ready",), 0.0),)
    assert ask(LEAST, metric=metric)[0].reason is None


@pytest.mark.parametrize("guardrail", [None, replace(HOLDER, is_holder=False)])
def test_it_closes_for_out_of_memory_only_where_this_pod_holds_the_lease(guardrail: Guardrail | None) -> None:
    for left_seconds in (0.0, 1.0):
        assert ask(left_seconds, guardrail=guardrail)[0].reason is None
    assert ask(1.0, guardrail=guardrail, state=EngineState.STALLED)[0].reason is not None


def test_it_closes_for_a_stall_and_for_nothing_that_is_unknown() -> None:
    assert ask(None, state=EngineState.STALLED)[0].reason == "the engine should make progress and makes none"
    for state in set(EngineState) - {EngineState.STALLED}:
        assert ask(None, state=state)[0].reason is None


def test_without_configuration_it_is_open_and_has_no_series() -> None:
    assert ask(1.0, least_seconds=None) == (OPEN, ())
    assert ask(1.0, least_seconds=None, guardrail=None) == (OPEN, ())


def find_due(
    left_seconds: float,
    *,
    leak: LeakState = LeakState.LEAKING,
    state: EngineState = EngineState.SERVING,
    is_host: bool = False,
    is_holder_known: bool = True,
    hour: float = 0.0,
    quiet_hour: int | None = None,
) -> str | None:
    """Return why the pod is to be evicted with so many seconds left, at this hour of the day."""
    samples = (
        (
            Sample(catalog.HOST_LEAK_STATE, ("worker", leak), 1.0),
            Sample(catalog.HOST_TIME_TO_OOM_LOWER, (), left_seconds),
        )
        if is_host
        else (Sample(catalog.LEAK_STATE, (*A_GPU, leak), 1.0), Sample(catalog.TIME_TO_OOM_LOWER, A_GPU, left_seconds))
    )
    due_snapshot = replace(
        snapshot(), engine_status=EngineStatus(state=state), time_seconds=1_760_054_400.0 + 3600.0 * hour
    )
    engine_bytes = 60 if is_holder_known else None
    due_snapshot = replace(
        due_snapshot, gpus=tuple(replace(gpu, engine_bytes=engine_bytes) for gpu in due_snapshot.devices)
    )
    return derive_gate(due_snapshot, Values(samples), None, replace(HOLDER, quiet_hour=quiet_hour))[0].due


@pytest.mark.parametrize(("is_host", "whose"), [(False, "GPU 0"), (True, "the host")])
def test_a_sure_leak_whose_end_is_near_is_due(is_host: bool, whose: str) -> None:  # noqa: FBT001 - a parameter
    assert find_due(LEAST - 1, is_host=is_host) == f"{whose} leaks and may be out of memory in 9 min 59 s"
    assert find_due(LEAST, is_host=is_host) is None


def test_growth_that_may_be_another_process_s_is_not_due_for_an_eviction_would_not_end_it() -> None:
    assert find_due(LEAST - 1, is_holder_known=False) is None


def test_no_other_state_of_a_leak_or_an_engine_is_due() -> None:
    assert [state for state in LeakState if find_due(1.0, leak=state)] == [LeakState.LEAKING]
    assert [engine_state for engine_state in EngineState if find_due(1.0, state=engine_state)] == [EngineState.SERVING]


def test_the_end_of_one_gpu_and_the_leak_of_another_are_not_taken_together() -> None:
    samples = (
        Sample(catalog.LEAK_STATE, ("0", "GPU-a", LeakState.GROWING), 1.0),
        Sample(catalog.LEAK_STATE, ("1", "GPU-b", LeakState.LEAKING), 1.0),
        Sample(catalog.TIME_TO_OOM_LOWER, ("0", "GPU-a"), 1.0),
        Sample(catalog.TIME_TO_OOM_LOWER, ("1", "GPU-b"), 9999.0),
    )
    serving = replace(snapshot(), engine_status=EngineStatus(state=EngineState.SERVING))

    assert derive_gate(serving, Values(samples), None, HOLDER)[0].due is None


def test_in_the_quiet_hour_a_leak_is_due_a_day_before_its_end() -> None:
    assert [hour for hour in range(24) if find_due(86399.0, hour=hour + 0.5, quiet_hour=3)] == [3]
    assert find_due(86400.0, hour=3.5, quiet_hour=3) is None
    assert find_due(LEAST - 1, hour=12.0, quiet_hour=3) is not None


def test_the_evictions_that_were_asked_for_are_shown() -> None:
    requests = ((EvictionResult.ACCEPTED, 0), (EvictionResult.REFUSED, 3))
    _, samples = ask(None, least_seconds=None, guardrail=replace(HOLDER, requests=requests))

    assert samples == tuple(Sample(catalog.EVICTION_REQUESTS, (result,), n) for result, n in requests)
