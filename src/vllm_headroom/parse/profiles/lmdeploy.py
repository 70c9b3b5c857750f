"""LMDeploy 0.18."""

from typing import Final

from vllm_headroom.parse.profile import Combine, Fact, Profile

LMDEPLOY: Final = Profile(
    name="lmdeploy",
    product="LMDeploy",
    switch="without --disable-metrics",
    prefixes=("lmdeploy:",),
    reasons={
        "it counts none": "preemptions",
        "its page has the share that is used, not of how many tokens": "kv_cache_capacity",
        "no label that is read has it": "kv_cache_dtype",
        "its page does not show it": "sleep_state",
        "its share of the cache is of what weights leave free": "gpu_memory_utilization",
        "its page has no bytes": "kv_cache_memory_bytes memory_bytes",
        "its page combines several processes, and shows no start time": "process_start_time",
    },
    facts=(
        Fact("running", ("num_requests_running",)),
        Fact("waiting", ("num_requests_waiting+num_api_requests_waiting", "num_requests_waiting")),
        Fact("finished_total", ("request_success_total",)),
        Fact("prompt_tokens_total", ("prompt_tokens_total",)),
        Fact("generation_tokens_total", ("generation_tokens_total",)),
        Fact("steps_total", ("iteration_tokens_total_count",)),
        Fact("kv_used_ratio", ("gpu_cache_usage_perc",), combine=Combine.MEAN),
        Fact("prefix_queries_total", ("prompt_tokens_total",)),
        Fact("prefix_hits_total", ("cached_tokens_total",)),
        Fact("prefix_hit_lifetime_ratio", ("prefix_cache_hit_rate",), combine=Combine.MEAN),
    ),
)
