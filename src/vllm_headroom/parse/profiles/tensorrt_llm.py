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
    absent=(
        ("preemptions", "it shows how many requests are paused now, not how often"),
        ("scheduler_steps", "it counts no steps"),
        ("kv_cache_dtype", "no label that is read has it"),
        ("prefix_cache_hit_rate", "its counters say more"),
        ("sleep_state", "its page does not show it"),
        ("gpu_memory_utilization", "its page has the bytes themselves"),
        ("kv_cache_memory_bytes", "its page has blocks, and the bytes of all"),
        ("process_start_time", "its page does not show it"),
    ),
    facts=(
        Fact(field="running", families=("num_requests_running",)),
        Fact(field="waiting", families=("num_requests_waiting",)),
        Fact(field="finished_total", families=("num_requests_completed_total", "request_success_total")),
        Fact(field="prompt_tokens_total", families=("prompt_tokens_total",)),
        Fact(field="generation_tokens_total", families=("generation_tokens_total",)),
        Fact(field="kv_used_ratio", families=("kv_cache_utilization",), combine=Combine.MEAN),
        Fact(field="kv_blocks", families=("kv_cache_max_blocks",)),
        Fact(field="kv_block_tokens", families=("kv_cache_tokens_per_block",), combine=Combine.SAME),
        Fact(field="prefix_queries_total", families=("prompt_tokens_total",)),
        Fact(field="prefix_hits_total", families=("prompt_cached_tokens_total",)),
        Fact(field="memory_bytes", families=("gpu_memory_usage_bytes",)),
    ),
)
