"""What the probe's readings become on the page: the ledger, the allocator, what is reported."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.samples import A_GPU, engine, gpu, only, page, snapshot, values
from vllm_headroom import catalog
from vllm_headroom.derive.discrepancy import derive_discrepancy
from vllm_headroom.derive.readings import derive_readings
from vllm_headroom.model import EngineReading, Inside
from vllm_headroom.vocabulary import MemoryPart

KNOWN: Final = Inside(
    allocated_bytes=700, reserved_bytes=800, parts=((MemoryPart.WEIGHTS, 300), (MemoryPart.OUTSIDE_TORCH, 100))
)


def test_the_ledger_and_the_allocator_are_shown_of_each_gpu() -> None:
    samples = derive_readings(snapshot(gpus=(gpu(inside=KNOWN), gpu(index=1, uuid="GPU-b"))))

    assert values(samples, catalog.ENGINE_MEMORY) == {(*A_GPU, "weights"): 300.0, (*A_GPU, "outside_torch"): 100.0}
    assert values(samples, catalog.ALLOCATOR_ALLOCATED) == {A_GPU: 700.0}
    assert values(samples, catalog.ALLOCATOR_RESERVED) == {A_GPU: 800.0}


def test_what_is_unknown_is_absent() -> None:
    nothing_told = {sample.metric for sample in derive_readings(snapshot(gpus=(gpu(inside=Inside()),)))}

    assert not nothing_told & {catalog.ENGINE_MEMORY, catalog.ALLOCATOR_ALLOCATED, catalog.ALLOCATOR_RESERVED}


BUDGET: Final[dict[str, Any]] = {"gpu_memory_utilization_ratio": 0.9}


@pytest.mark.parametrize(
    ("engine_reading", "inside", "configured", "expected"),
    [
        (engine(memory_bytes=880.0, **BUDGET), KNOWN, 500.0, {(*A_GPU, "metric"): 880.0}),
        (engine(**BUDGET), KNOWN, 500.0, {(*A_GPU, "probe"): 800.0}),
        (engine(**BUDGET), Inside(), 500.0, {(*A_GPU, "budget"): 900.0}),
        (engine(**BUDGET), None, 500.0, {(*A_GPU, "budget"): 900.0}),
        (engine(), Inside(reserved_bytes=0), 500.0, {(*A_GPU, "configured"): 500.0}),
        (engine(), None, None, {}),
    ],
)
def test_reported_is_the_first_there_is(
    engine_reading: EngineReading,
    inside: Inside | None,
    configured: float | None,
    expected: dict[tuple[str, ...], float],
) -> None:
    sample = snapshot(engines=page(engine_reading), gpus=(gpu(used=950, inside=inside),))

    samples = derive_discrepancy(sample, configured_bytes=configured)

    assert values(samples, catalog.MEMORY_REPORTED) == expected


def test_the_discrepancy_is_what_torch_does_not_know_of() -> None:
    samples = derive_discrepancy(snapshot(gpus=(gpu(used=950, inside=KNOWN),)), configured_bytes=None)

    assert only(samples, catalog.MEMORY_DISCREPANCY).value == 150.0
    assert only(samples, catalog.MEMORY_DISCREPANCY_RATIO).value == 150 / 800
