"""Bytes of the KV cache by the model's configuration: only where they are certain."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.contract.recorded import FOLDER
from tests.samples import engine, failure, gpu, page, snapshot, values
from tests.unit.sizing.models import model
from vllm_headroom import catalog
from vllm_headroom.derive.kv_cache import derive_kv_cache
from vllm_headroom.model import EnginePage
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.vocabulary import Source
from vllm_headroom_tools.sizing.footprint import count_engine_bytes_per_token


def of_model(name: str) -> Any:
    return partial(count_engine_bytes_per_token, model(name))


RECORDED = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()
ONE_GPU = (gpu(),)


def capacity_bytes(
    name: str, *, gpus: Any = ONE_GPU, bytes_per_token: float | None = None, **engine_fields: Any
) -> list[float]:
    cache_snapshot = snapshot(engines=page(engine(kv_capacity_tokens=1000.0, **engine_fields)), gpus=gpus)
    samples = derive_kv_cache(cache_snapshot, bytes_per_token=bytes_per_token, model=of_model(name))
    return [sample.value for sample in samples if sample.metric is catalog.ENGINE_KV_CAPACITY_BYTES]


def test_a_recorded_page_of_the_tiny_model_says_the_gibibyte_that_vllm_was_given() -> None:
    engines = parse_engines(RECORDED)
    assert isinstance(engines, EnginePage)

    samples = derive_kv_cache(
        snapshot(engines=engines, gpus=failure(Source.NVML)), bytes_per_token=None, model=of_model("tiny")
    )

    assert values(samples, catalog.ENGINE_KV_CAPACITY_BYTES) == {("tiny", "0"): 2.0**30}


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", [131_072_000.0]), ("fp8", [65_536_000.0]), ("of tomorrow", []), (None, [])],
)
def test_the_dtype_on_the_page_counts_and_without_one_there_are_no_bytes(
    dtype: str | None, expected: list[float]
) -> None:
    assert capacity_bytes("llama-3.1-8b", kv_cache_dtype=dtype) == expected


def test_bytes_that_the_operator_says_beat_the_models() -> None:
    assert capacity_bytes("llama-3.1-8b", kv_cache_dtype="auto", bytes_per_token=7.0) == [7000.0]
    assert capacity_bytes("gemma-2-9b", kv_cache_dtype="auto", bytes_per_token=7.0) == [7000.0]


@pytest.mark.parametrize("name", ["gemma-2-9b", "mistral-7b-v0.1", "qwen3-next-80b-a3b"])
def test_where_layers_keep_a_window_or_a_state_there_are_tokens_and_no_bytes(name: str) -> None:
    assert capacity_bytes(name, kv_cache_dtype="auto") == []


@pytest.mark.parametrize(
    ("name", "count", "is_known"),
    [("llama-3.1-8b", 8, True), ("llama-3.1-8b", 9, False), ("deepseek-v3", 1, True), ("deepseek-v3", 2, False)],
)
def test_where_gpus_may_hold_copies_there_are_no_bytes(name: str, count: int, is_known: bool) -> None:  # noqa: FBT001 - a case
    gpus = tuple(gpu(index=index, uuid=f"GPU-{index}") for index in range(count))

    assert bool(capacity_bytes(name, kv_cache_dtype="auto", gpus=gpus)) is is_known


def test_gpus_are_those_of_one_engine_and_not_of_others() -> None:
    ranks = page(*(engine(str(rank), kv_capacity_tokens=1.0, kv_cache_dtype="auto") for rank in range(8)))
    mine = tuple(gpu(index=index, uuid=f"GPU-{index}") for index in range(8))
    foreign = gpu(index=8, uuid="GPU-8", attribution=None)

    samples = derive_kv_cache(
        snapshot(engines=ranks, gpus=(*mine, foreign)), bytes_per_token=None, model=of_model("deepseek-v3")
    )

    assert len(values(samples, catalog.ENGINE_KV_CAPACITY_BYTES)) == 8


def test_without_any_gpu_in_sight_heads_are_taken_to_be_kept_once_and_latent_vectors_not() -> None:
    for unseen in (failure(Source.NVML), ()):
        assert capacity_bytes("llama-3.1-8b", kv_cache_dtype="auto", gpus=unseen) == [131_072_000.0]
        assert capacity_bytes("deepseek-v3", kv_cache_dtype="auto", gpus=unseen) == []
