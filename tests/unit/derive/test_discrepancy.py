"""Reported against actual memory."""

from __future__ import annotations

import pytest

from tests.samples import A_GPU, engine, failure, gpu, only, page, snapshot
from vllm_headroom import catalog
from vllm_headroom.derive.discrepancy import derive_discrepancy
from vllm_headroom.model import Sample, Snapshot
from vllm_headroom.vocabulary import Source


def answer(given_snapshot: Snapshot, configured_bytes: float | None = None) -> dict[str, dict[tuple[str, ...], float]]:
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for sample in derive_discrepancy(given_snapshot, configured_bytes=configured_bytes):
        samples.setdefault(sample.metric.name, {})[sample.labels] = sample.value
    return samples


def test_the_budget_is_the_engines_share_of_the_devices_total() -> None:
    sample = snapshot(
        engines=page(engine(gpu_memory_utilization_ratio=0.92)), gpus=(gpu(total=1000, used=960, engine=950),)
    )

    assert answer(sample) == {
        "headroom_memory_reported_bytes": {(*A_GPU, "budget"): 920.0},
        "headroom_memory_discrepancy_bytes": {(*A_GPU, "budget"): 30.0},
        "headroom_memory_discrepancy_ratio": {(*A_GPU, "budget"): pytest.approx(30 / 920)},
        "headroom_engine_unused_bytes": {A_GPU: 40.0},
    }


@pytest.mark.parametrize(("used", "engine_bytes", "unused"), [(500, 500, 100.0), (650, 500, 0.0), (550, 500, 50.0)])
def test_the_unused_memory_is_neither_in_the_budget_nor_anyone_elses(
    used: int, engine_bytes: int, unused: float
) -> None:
    on_page = page(engine(gpu_memory_utilization_ratio=0.9))
    sample = snapshot(engines=on_page, gpus=(gpu(total=1000, used=used, engine=engine_bytes),))

    assert answer(sample)["headroom_engine_unused_bytes"] == {A_GPU: unused}


def test_of_a_device_without_memory_there_is_no_budget() -> None:
    sample = snapshot(engines=page(engine(gpu_memory_utilization_ratio=0.9)), gpus=(gpu(total=0, used=0, engine=0),))

    assert answer(sample) == {}


def test_an_engine_below_its_budget_has_a_negative_discrepancy() -> None:
    sample = snapshot(
        engines=page(engine(gpu_memory_utilization_ratio=0.9)), gpus=(gpu(total=1000, used=500, engine=500),)
    )

    assert answer(sample)["headroom_memory_discrepancy_bytes"] == {(*A_GPU, "budget"): -400.0}


def test_what_the_engine_is_taken_to_hold_counts_where_its_processes_memory_is_not_known() -> None:
    sample = snapshot(
        engines=page(engine(gpu_memory_utilization_ratio=0.9)), gpus=(gpu(total=1000, used=960, held=930),)
    )

    assert answer(sample)["headroom_memory_discrepancy_bytes"] == {(*A_GPU, "budget"): 30.0}


def test_without_knowing_what_the_engine_holds_there_is_only_what_it_reports() -> None:
    sample = snapshot(engines=page(engine(gpu_memory_utilization_ratio=0.9)), gpus=(gpu(used=930, held=None),))

    assert answer(sample) == {"headroom_memory_reported_bytes": {(*A_GPU, "budget"): 900.0}}


def test_a_metric_in_bytes_comes_before_the_budget() -> None:
    sample = snapshot(engines=page(engine(memory_bytes=700.0, gpu_memory_utilization_ratio=0.9)))

    assert set(answer(sample)["headroom_memory_reported_bytes"]) == {(*A_GPU, "metric")}


def test_a_kv_cache_sized_in_bytes_voids_the_budget() -> None:
    sample = snapshot(engines=page(engine(gpu_memory_utilization_ratio=0.9, kv_cache_memory_bytes=100.0)))

    assert answer(sample) == {}
    assert set(answer(sample, configured_bytes=400.0)["headroom_memory_reported_bytes"]) == {(*A_GPU, "configured")}


def test_engines_that_disagree_on_their_budget_leave_it_unknown() -> None:
    sample = snapshot(
        engines=page(
            engine(name="0", gpu_memory_utilization_ratio=0.9), engine(name="1", gpu_memory_utilization_ratio=0.5)
        )
    )

    assert answer(sample) == {}


def test_a_gpu_that_is_not_the_engines_has_no_report() -> None:
    sample = snapshot(engines=page(engine(gpu_memory_utilization_ratio=0.9)), gpus=(gpu(attribution=None),))

    assert answer(sample) == {}


@pytest.mark.parametrize("source", [Source.ENGINE, Source.NVML])
def test_a_failed_side_is_never_filled_in(source: Source) -> None:
    failed_snapshot = snapshot(engines=failure(source)) if source is Source.ENGINE else snapshot(gpus=failure(source))

    assert derive_discrepancy(failed_snapshot, configured_bytes=1.0) == ()


def test_a_lost_gpu_has_no_report() -> None:
    sample = snapshot(engines=page(engine(gpu_memory_utilization_ratio=0.9)), gpus=(gpu(memory=False),))

    assert answer(sample) == {}


def test_the_report_is_a_sample_of_the_catalogues_metric() -> None:
    sample = snapshot(engines=page(engine(memory_bytes=700.0)))

    assert only(derive_discrepancy(sample, configured_bytes=None), catalog.MEMORY_REPORTED) == Sample(
        catalog.MEMORY_REPORTED, (*A_GPU, "metric"), 700.0
    )
