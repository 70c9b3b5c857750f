"""What the profiles of other engines read from their pages; README.md beside the pages says where each is from."""

from __future__ import annotations

from typing import Final

import pytest

from tests.contract.recorded import OTHERS
from vllm_headroom.model import EnginePage, EngineReading
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.parse.profiles import PROFILES

GIB: Final = 2**30
EXPECTED: Final = {
    "llama-cpp-first-scrape": (
        "llama_cpp",
        EngineReading(
            model_name="llama_cpp",
            engine="0",
            running=0.0,
            waiting=0.0,
            prompt_tokens_total=0.0,
            generation_tokens_total=0.0,
            steps_total=0.0,
            prefix_queries_total=0.0,
            prefix_hits_total=0.0,
        ),
    ),
    "llama-cpp-load": (
        "llama_cpp",
        EngineReading(
            model_name="llama_cpp",
            engine="0",
            running=2.0,
            waiting=3.0,
            prompt_tokens_total=339.0,
            generation_tokens_total=60.0,
            steps_total=83.0,
            prefix_queries_total=339.0,
            prefix_hits_total=36.0,
        ),
    ),
    "llama-cpp-2024": (
        "llama_cpp",
        EngineReading(
            model_name="llama_cpp",
            engine="0",
            running=2.0,
            waiting=0.0,
            prompt_tokens_total=1200.0,
            generation_tokens_total=340.0,
            kv_used_ratio=0.25,
            kv_capacity_tokens=8192.0,
        ),
    ),
    "triton": (
        "triton",
        EngineReading(
            model_name="tensorrt_llm",
            engine="0",
            running=8.0,
            waiting=3.0,
            kv_used_ratio=0.25,
            kv_capacity_tokens=409600.0,
            memory_bytes=20.0 * GIB,
        ),
    ),
    "sglang-tokens": (
        "sglang",
        EngineReading(
            model_name="Qwen/Qwen3-8B", engine="0", running=6.0, kv_used_ratio=0.25, kv_capacity_tokens=400000.0
        ),
    ),
    "sglang-0.5.23": (
        "sglang",
        EngineReading(
            model_name="Qwen/Qwen3-8B",
            engine="0",
            running=12.0,
            waiting=4.0,
            finished_total=3.0,
            preemptions_total=2.0,
            prompt_tokens_total=3500.0,
            generation_tokens_total=610.0,
            kv_used_ratio=0.42,
            kv_capacity_tokens=438271.0,
            prefix_queries_total=13500.0,
            prefix_hits_total=4500.0,
            memory_bytes=(15.27 + 60.19 + 0.84 + 0.5) * GIB,
        ),
    ),
    "lmdeploy-0.18.0": (
        "lmdeploy",
        EngineReading(
            model_name="internlm3-8b-instruct",
            engine="0",
            running=2.0,
            waiting=2.0,
            finished_total=2.0,
            prompt_tokens_total=2000.0,
            generation_tokens_total=17.0,
            steps_total=3.0,
            kv_used_ratio=0.37,
            prefix_queries_total=2000.0,
            prefix_hits_total=500.0,
            prefix_hit_lifetime_ratio=0.25,
        ),
    ),
    "tensorrt-llm": (
        "tensorrt_llm",
        EngineReading(
            model_name="llama-3.1-8b",
            engine="0",
            running=7.0,
            waiting=2.0,
            finished_total=310.0,
            prompt_tokens_total=410000.0,
            generation_tokens_total=61000.0,
            kv_used_ratio=0.31,
            kv_capacity_tokens=480000.0,
            prefix_queries_total=410000.0,
            prefix_hits_total=52000.0,
            memory_bytes=75161927680.0,
        ),
    ),
    "tgi": (
        "tgi",
        EngineReading(
            model_name="tgi",
            engine="0",
            running=5.0,
            waiting=3.0,
            finished_total=91.0,
            prompt_tokens_total=88000.0,
            generation_tokens_total=10400.0,
            kv_used_ratio=0.15625,
            kv_capacity_tokens=131072.0,
        ),
    ),
    "dynamo-component": (
        "dynamo",
        EngineReading(model_name="llama", engine="0", kv_used_ratio=0.62, prefix_hit_lifetime_ratio=0.18),
    ),
    "dynamo-vllm": (
        "vllm",
        EngineReading(model_name="llama", engine="0", running=3.0, waiting=0.0, kv_used_ratio=0.2),
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_page_says_what_its_engine_said(name: str) -> None:
    profile, engine = EXPECTED[name]
    page = parse_engines((OTHERS / f"{name}.prom").read_text())

    assert isinstance(page, EnginePage)
    assert (page.profile, page.engines) == (profile, (engine,))


def test_every_profile_has_a_page() -> None:
    read = {parse_engines(path.read_text()) for path in OTHERS.glob("*.prom")}

    assert {page.profile for page in read if isinstance(page, EnginePage)} == {profile.name for profile in PROFILES}
