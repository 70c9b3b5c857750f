"""When /gate/ready is closed, and when it opens again."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.samples import A_GPU, snapshot
from vllm_headroom import catalog
from vllm_headroom.derive.gates import Gate, build_gate
from vllm_headroom.model import EngineStatus, Metric, Sample, Values
from vllm_headroom.vocabulary import EngineState

LEAST = 600.0
OPEN = Gate()


def ask(
    left: float | None,
    *,
    before: Gate = OPEN,
    metric: Metric = catalog.TIME_TO_OOM_LOWER,
    state: EngineState = EngineState.SERVING,
    least: float | None = LEAST,
) -> tuple[Gate, tuple[Sample, ...]]:
    """Return the gate where so many seconds are left."""
    labels = A_GPU if metric is catalog.TIME_TO_OOM_LOWER else ()
    values = Values(() if left is None else (Sample(metric, labels, left),))
    return build_gate(least, values).step(before, replace(snapshot(), life=EngineStatus(state=state)))


@pytest.mark.parametrize(
    ("metric", "whose"), [(catalog.TIME_TO_OOM_LOWER, "GPU 0"), (catalog.HOST_TIME_TO_OOM_LOWER, "the host")]
)
def test_it_closes_where_out_of_memory_is_near(metric: Metric, whose: str) -> None:
    near, samples = ask(LEAST - 1, metric=metric)

    assert near.reason == f"{whose} may be out of memory in 9 min 59 s"
    assert samples == (Sample(catalog.GATE_OPEN, ("ready",), 0.0),)
    assert ask(LEAST, metric=metric)[0].reason is None


def test_it_opens_where_half_as_much_again_is_left() -> None:
    closed, _ = ask(LEAST - 1)

    assert ask(1.4 * LEAST, before=closed)[0].reason is not None
    assert ask(1.5 * LEAST, before=closed)[0].reason is None


def test_it_closes_for_a_stall_and_for_nothing_that_is_unknown() -> None:
    assert ask(None, state=EngineState.STALLED)[0].reason == "the engine should make progress and makes none"
    for state in set(EngineState) - {EngineState.STALLED}:
        assert ask(None, state=state)[0].reason is None


def test_without_configuration_it_is_open_and_has_no_series() -> None:
    assert ask(1.0, least=None) == (OPEN, ())
