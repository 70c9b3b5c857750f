"""TensorRT-LLM's trtllm-serve."""

from typing import Final

from vllm_headroom.parse.profile import Combine, Fact, Profile

TENSORRT_LLM: Final = Profile(
    name="tensorrt_llm",
    product="TensorRT-LLM",
    switch="with return_perf_metrics and enable_iter_perf_stats",
    prefixes=("trtllm_",),
    path="/prometheus/metrics",
    engine_label="",
    reasons={
        "it shows how many requests are paused now, not how often": "preemptions",
        "it counts no steps": "scheduler_steps",
        "no label that is read has it": "kv_cache_dtype",
        "its counters say more": "prefix_cache_hit_rate",
        "its page does not show it": "sleep_state process_start_time",
        "its page has the bytes themselves": "gpu_memory_utilization",
        "its page has blocks, and the bytes of all": "kv_cache_memory_bytes",
    },
    facts=(
        Fact("running", ("num_requests_running",)),
        Fact("waiting", ("num_requests_waiting",)),
        Fact("finished_total", ("num_requests_completed_total", "request_success_total")),
        Fact("prompt_tokens_total", ("prompt_tokens_total",)),
        Fact("generation_tokens_total", ("generation_tokens_total",)),
        Fact("kv_used_ratio", ("kv_cache_utilization",), combine=Combine.MEAN),
        Fact("kv_blocks", ("kv_cache_max_blocks",)),
        Fact("kv_block_tokens", ("kv_cache_tokens_per_block",), combine=Combine.SAME),
        Fact("prefix_queries_total", ("prompt_tokens_total",)),
        Fact("prefix_hits_total", ("prompt_cached_tokens_total",)),
        Fact("memory_bytes", ("gpu_memory_usage_bytes",)),
    ),
)
