"""SGLang 0.5 and newer."""

from typing import Final

from vllm_headroom.parse.profile import Combine, Fact, Profile
from vllm_headroom.units import GIB

_TOTAL: Final = ("priority", ("",))
"""With priority scheduling each priority has a series beside the total (`_log_gauge_queue_count`)."""

_HITS: Final = ("device_hit", "host_hit", "storage_hit")
_GIBIBYTES: Final = float(GIB)
"""SGLang's GB is 2**30 bytes (srt/utils/common.py, srt/mem_cache/memory_pool.py)."""

SGLANG: Final = Profile(
    name="sglang",
    product="SGLang",
    switch="with --enable-metrics",
    prefixes=("sglang:",),
    engine_label="dp_rank",
    repeat_labels=("tp_rank", "pp_rank", "moe_ep_rank"),  # each rank's scheduler, if all ranks export
    absent=(
        ("scheduler_steps", "it counts no steps"),
        ("kv_cache_dtype", "no label has it"),
        ("prefix_cache_hit_rate", "its counters say more"),
        ("sleep_state", "its page does not show that memory was released"),
        ("gpu_memory_utilization", "--mem-fraction-static is not on its page; its bytes are"),
        ("kv_cache_memory_bytes", "the configured size is not on its page; the bytes in use are"),
        ("process_start_time", "its page combines several processes, and shows no start time"),
    ),
    facts=(
        Fact(field="running", families=("num_running_reqs",), where=_TOTAL),
        Fact(field="waiting", families=("num_queue_reqs",), where=_TOTAL),
        Fact(field="finished_total", families=("num_requests_total",)),
        Fact(field="preemptions_total", families=("num_retracted_requests_total",)),  # 0.5.12 and newer
        Fact(field="prompt_tokens_total", families=("prompt_tokens_total",)),
        Fact(field="generation_tokens_total", families=("generation_tokens_total",)),
        Fact(
            field="kv_used_ratio",
            families=("full_token_usage", "token_usage"),  # 0.5.12 and newer; before, the highest of all pools
            combine=Combine.MEAN,
        ),
        Fact(
            field="kv_capacity_tokens",
            families=("max_total_num_tokens", "kv_used_tokens+kv_evictable_tokens+kv_available_tokens"),
        ),
        Fact(
            field="prefix_queries_total",
            families=("prefill_effective_tokens_total",),  # 0.5.23 and newer
            where=("mode", ("input", *_HITS)),
        ),
        Fact(field="prefix_queries_total", families=("prompt_tokens_total",)),
        Fact(field="prefix_hits_total", families=("prefill_effective_tokens_total",), where=("mode", _HITS)),
        Fact(field="prefix_hits_total", families=("cached_tokens_total",)),
        Fact(
            field="memory_bytes",  # after 0.5.12
            families=(
                "weight_memory_usage_gb+kv_cache_memory_usage_gb+graph_memory_usage_gb",
                "weight_memory_usage_gb+kv_cache_memory_usage_gb",  # without graphs
            ),
            factor=_GIBIBYTES,
        ),
    ),
)
