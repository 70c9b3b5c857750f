"""LMDeploy 0.18."""

from typing import Final

from vllm_headroom.parse.profile import Combine, Fact, Profile

_NO_BYTES: Final = "its page has no bytes"

LMDEPLOY: Final = Profile(
    name="lmdeploy",
    product="LMDeploy",
    switch="without --disable-metrics",
    prefixes=("lmdeploy:",),
    absent=(
        ("preemptions", "it counts none"),
        ("kv_cache_capacity", "its page has the share that is used, not of how many tokens"),
        ("kv_cache_dtype", "no label that is read has it"),
        ("sleep_state", "its page does not show it"),
        ("gpu_memory_utilization", "its share of the cache is of what weights leave free"),
        ("kv_cache_memory_bytes", _NO_BYTES),
        ("memory_bytes", _NO_BYTES),
        ("process_start_time", "its page combines several processes, and shows no start time"),
    ),
    facts=(
        Fact(field="running", families=("num_requests_running",)),
        Fact(field="waiting", families=("num_requests_waiting+num_api_requests_waiting", "num_requests_waiting")),
        Fact(field="finished_total", families=("request_success_total",)),
        Fact(field="prompt_tokens_total", families=("prompt_tokens_total",)),
        Fact(field="generation_tokens_total", families=("generation_tokens_total",)),
        Fact(field="steps_total", families=("iteration_tokens_total_count",)),
        Fact(field="kv_used_ratio", families=("gpu_cache_usage_perc",), combine=Combine.MEAN),
        Fact(field="prefix_queries_total", families=("prompt_tokens_total",)),
        Fact(field="prefix_hits_total", families=("cached_tokens_total",)),
        Fact(field="prefix_hit_lifetime_ratio", families=("prefix_cache_hit_rate",), combine=Combine.MEAN),
    ),
)
