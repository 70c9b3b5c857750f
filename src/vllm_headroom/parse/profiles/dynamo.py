"""Dynamo's own series, which are used if the page lacks the inner engine's series."""

from typing import Final

from vllm_headroom.parse.profile import Combine, Fact, Profile

DYNAMO: Final = Profile(
    name="dynamo",
    product="Dynamo",
    switch="with DYN_SYSTEM_PORT",
    prefixes=("dynamo_component_",),
    model_label="model",
    engine_label="dp_rank",
    reasons={
        "the engine's own series have it, on the port of DYN_SYSTEM_PORT": (
            "requests_running requests_waiting requests_finished preemptions prompt_tokens"
            " generation_tokens scheduler_steps kv_cache_dtype prefix_cache_queries"
            " prefix_cache_hits sleep_state gpu_memory_utilization kv_cache_memory_bytes"
            " memory_bytes process_start_time"
        ),
        "it counts blocks, and only the engine knows how many tokens one has": "kv_cache_capacity",
    },
    facts=(
        Fact("kv_used_ratio", ("gpu_cache_usage_percent",), combine=Combine.MEAN),
        Fact("prefix_hit_lifetime_ratio", ("kv_cache_hit_rate",), combine=Combine.MEAN),
    ),
)
