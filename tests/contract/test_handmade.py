"""What the profile reads from pages that no recording shows."""

from __future__ import annotations

from typing import Final

import pytest

from tests.contract.data_parallel import data_parallel_page
from tests.contract.recorded import HANDMADE
from vllm_headroom.model import EnginePage, EngineReading
from vllm_headroom.parse.engines import parse_engines

EXPECTED: Final = {
    "ray-colon": (
        EngineReading(
            model_name="llama",
            engine="0",
            running=8.0,
            waiting=2.0,
            kv_used_ratio=0.5,
            prompt_tokens_total=2500.0,
            kv_capacity_tokens=2200 * 16.0,
            gpu_memory_utilization_ratio=0.9,
        ),
    ),
    "ray-underscore": (
        EngineReading(
            model_name="llama",
            engine="0",
            running=7.0,
            kv_used_ratio=0.5,
            generation_tokens_total=420.0,
            finished_total=21.0,
        ),
    ),
    "api-servers-pid": (
        EngineReading(
            model_name="llama",
            engine="0",
            running=6.0,
            waiting=1.0,
            kv_used_ratio=0.375,
            prefix_queries_total=4096.0,
            prefix_hits_total=1024.0,
            kv_capacity_tokens=32000.0,
            gpu_memory_utilization_ratio=0.9,
        ),
    ),
    "rust-frontend": (
        EngineReading(
            model_name="llama",
            engine="0",
            running=2.0,
            waiting=0.0,
            finished_total=4.0,
            preemptions_total=0.0,
            prompt_tokens_total=640.0,
            generation_tokens_total=99.0,
            kv_used_ratio=0.125,
            prefix_queries_total=640.0,
            prefix_hits_total=128.0,
        ),
    ),
    "v0-0.4": (
        EngineReading(
            model_name="facebook/opt-125m",
            engine="0",
            running=2.0,
            waiting=0.0,
            prompt_tokens_total=14.0,
            generation_tokens_total=30.0,
            kv_used_ratio=0.0004059539918808878,
            kv_capacity_tokens=7390 * 16.0,
            kv_cache_dtype="auto",
            gpu_memory_utilization_ratio=0.9,
            started_at_seconds=1712345670.0,
        ),
    ),
    "v0-caching-off": (EngineReading(model_name="llama", engine="0", running=1.0),),
    "several-models": (
        EngineReading(
            model_name='a "quoted", {braced} name',
            engine="0",
            running=1.0,
            kv_capacity_tokens=65536.0,
            gpu_memory_utilization_ratio=0.85,
        ),
        EngineReading(
            model_name="base",
            engine="0",
            running=4.0,
            kv_used_ratio=0.5,
            kv_capacity_tokens=65536.0,
            gpu_memory_utilization_ratio=0.85,
        ),
    ),
    "v0.33-offload": (
        EngineReading(
            model_name="llama",
            engine="0",
            running=3.0,
            kv_capacity_tokens=32000.0,
            gpu_memory_utilization_ratio=0.92,
            kv_offload_bytes=68719476000.0,
            multimodal_cache_queries_total=7.0,
        ),
    ),
    "openmetrics": (EngineReading(model_name="llama", engine="0", running=4.0, prompt_tokens_total=512.0),),
    "data-parallel-settings-only": tuple(
        EngineReading(model_name="", engine=rank, kv_capacity_tokens=160000.0, gpu_memory_utilization_ratio=0.92)
        for rank in ("0", "1")
    ),
}


def test_every_hand_made_page_is_expected_and_says_what_it_is() -> None:
    pages = {page.stem: page.read_text() for page in HANDMADE.glob("*.prom")}

    assert set(pages) == set(EXPECTED)
    assert all(text.startswith("# Hand-made: ") for text in pages.values())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_hand_made_page_gives_the_expected_readings(name: str) -> None:
    page = parse_engines((HANDMADE / f"{name}.prom").read_text())

    assert isinstance(page, EnginePage)
    assert page.engines == EXPECTED[name]


@pytest.mark.parametrize(("version", "capacity"), [("0.32.0", 2097152), ("0.20.2", 8192)])
def test_eight_data_parallel_engines_read_like_eight_times_one(version: str, capacity: int) -> None:
    page = parse_engines(data_parallel_page(8, version))

    assert isinstance(page, EnginePage)
    assert [engine.engine for engine in page.engines] == [str(rank) for rank in range(8)]
    assert {engine.kv_capacity_tokens for engine in page.engines} == {capacity}
    assert {(engine.running, engine.waiting) for engine in page.engines} == {(8.0, 16.0)}
