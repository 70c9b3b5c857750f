"""What the scheduler knows: steps, the limit of the batch, the size of the cache."""

from __future__ import annotations

from typing import Any

import pytest

from tests.samples import AN_ENGINE, engine, failure, gpu, page, probed, snapshot, values
from vllm_headroom import catalog
from vllm_headroom.derive.admission import Batches, derive_admission
from vllm_headroom.derive.configured import complete_page, find_schedulers
from vllm_headroom.derive.kv_cache import derive_kv_cache
from vllm_headroom.model import EngineOptions, EnginePage, Gpu, Inside, ProbedProcess, ProbeReadings, SchedulerReading
from vllm_headroom.vocabulary import MemoryPart, Source


def core(rank: int | None = 0, **scheduler_fields: Any) -> ProbedProcess:
    return probed(data_parallel_rank=rank, scheduler=SchedulerReading(**scheduler_fields))


def test_one_engine_and_one_core_belong_together() -> None:
    schedulers = find_schedulers(page(engine("0")), (probed(), core(None, steps_total=5)))

    assert {labels: scheduler.steps_total for labels, scheduler in schedulers.items()} == {AN_ENGINE: 5}


def test_several_engines_are_reported_by_their_ranks() -> None:
    schedulers = find_schedulers(page(engine("0"), engine("1")), (core(1, steps_total=7), core(None, steps_total=9)))

    assert {labels: scheduler.steps_total for labels, scheduler in schedulers.items()} == {("m", "1"): 7}


def test_steps_come_to_the_page_the_last_word_of_a_silent_core_too() -> None:
    completed_page = complete_page(
        page(engine("0", steps_total=3.0), engine("1"), engine("2")),
        ProbeReadings(present=(core(0),), silent=(core(1, steps_total=7),), others=(core(2, steps_total=9),)),
        None,
    )

    assert isinstance(completed_page, EnginePage)
    assert [engine_reading.steps_total for engine_reading in completed_page.engines] == [3.0, 7.0, None]


def test_without_a_probe_or_a_page_nothing_changes() -> None:
    engine_page = page(engine())

    assert complete_page(engine_page, None, None) == engine_page
    assert complete_page(engine_page, failure(Source.PROBE), None) == engine_page
    assert complete_page(failure(Source.ENGINE), ProbeReadings(), EngineOptions(max_num_seqs=1)) == failure(
        Source.ENGINE
    )


def more(probe: ProbeReadings | None, running: float = 10.0) -> float | None:
    completed_page = complete_page(page(engine(running=running, kv_used_ratio=0.1)), probe, None)
    return values(
        derive_admission(Batches(), snapshot(engines=completed_page))[1], catalog.ENGINE_ADDITIONAL_REQUESTS
    ).get(AN_ENGINE)


@pytest.mark.parametrize(("max_num_seqs", "expected"), [(64, 54), (1000, 90), (10, 0), (8, 0), (None, 90)])
def test_no_more_fit_than_the_batch_admits(max_num_seqs: int | None, expected: float) -> None:
    assert more(ProbeReadings(present=(core(max_num_seqs=max_num_seqs),))) == expected
    assert more(None) == 90


KV: dict[str, Any] = {"running": 10.0, "kv_used_ratio": 0.5, "kv_cache_dtype": "auto"}


def make_gpu(kv_cache_bytes: int | None, uuid: str = "GPU-a") -> Gpu:
    parts = () if kv_cache_bytes is None else ((MemoryPart.KV_CACHE, kv_cache_bytes),)
    return gpu(uuid=uuid, inside=Inside(parts=parts))


def capacity(
    *gpus: Gpu, configured: float | None = None, tokens: float | None = 1000.0
) -> dict[tuple[str, ...], float]:
    engines = page(engine("0", kv_capacity_tokens=tokens, **KV), engine("1", kv_capacity_tokens=3000.0, **KV))
    sample = snapshot(engines=engines, gpus=gpus)
    return values(
        derive_kv_cache(sample, bytes_per_token=configured, model=lambda _dtype, _gpus: 7),
        catalog.ENGINE_KV_CAPACITY_BYTES,
    )


def test_a_tokens_bytes_are_configured_measured_or_reported_by_the_model_in_this_order() -> None:
    both = (make_gpu(1_000_000), make_gpu(3_000_000, "GPU-b"))

    assert capacity(*both, configured=5.0) == {("m", "0"): 5_000.0, ("m", "1"): 15_000.0}
    assert capacity(*both) == {("m", "0"): 1_000_000.0, ("m", "1"): 3_000_000.0}
    assert capacity(gpu(), gpu(uuid="GPU-b")) == {("m", "0"): 7_000.0, ("m", "1"): 21_000.0}


@pytest.mark.parametrize(
    ("first_gpu", "tokens"),
    [(make_gpu(None), 1000.0), (gpu(), 1000.0), (make_gpu(0), 1000.0), (make_gpu(1_000_000), None)],
)
def test_a_cache_that_is_known_in_part_measures_nothing(first_gpu: Gpu, tokens: float | None) -> None:
    second = make_gpu(0 if first_gpu == make_gpu(0) else 3_000_000, "GPU-b")

    assert capacity(first_gpu, second, tokens=tokens)[("m", "1")] == 21_000.0
