"""Dynamo's own series, used where those of the engine inside it are not on the page."""

from __future__ import annotations

from typing import Final

from vllm_headroom.parse.profile import Combine, Fact, Profile

_ENGINE: Final = "the engine's own series have it, on the port of DYN_SYSTEM_PORT"

DYNAMO: Final = Profile(
    name="dynamo",
    product="Dynamo",
    switch="with DYN_SYSTEM_PORT",
    prefixes=("dynamo_component_",),
    model_label="model",
    engine_label="dp_rank",
    absent=(
        ("requests_running", _ENGINE),
        ("requests_waiting", _ENGINE),
        ("requests_finished", _ENGINE),
        ("preemptions", _ENGINE),
        ("prompt_tokens", _ENGINE),
        ("generation_tokens", _ENGINE),
        ("scheduler_steps", _ENGINE),
        ("kv_cache_capacity", "it counts blocks, and only the engine knows how many tokens one has"),
        ("kv_cache_dtype", _ENGINE),
        ("prefix_cache_queries", _ENGINE),
        ("prefix_cache_hits", _ENGINE),
        ("sleep_state", _ENGINE),
        ("gpu_memory_utilization", _ENGINE),
        ("kv_cache_memory_bytes", _ENGINE),
        ("memory_bytes", _ENGINE),
        ("process_start_time", _ENGINE),
    ),
    facts=(
        Fact(field="kv_used_ratio", families=("gpu_cache_usage_percent",), combine=Combine.MEAN),
        Fact(field="prefix_hit_lifetime_ratio", families=("kv_cache_hit_rate",), combine=Combine.MEAN),
    ),
)
