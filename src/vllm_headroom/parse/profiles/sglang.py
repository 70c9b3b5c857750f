"""SGLang 0.5 and newer."""

from typing import Final

from vllm_headroom.parse.profile import Combine, Fact, Profile
from vllm_headroom.units import GIB

_TOTAL: Final = ("priority", ("",))
"""With priority scheduling, each priority has a series in addition to the total
(`_log_gauge_queue_count`).
"""

_PREFILLED: Final = ("prefill_effective_tokens_total",)
_HITS: Final = ("device_hit", "host_hit", "storage_hit")
_MODEL: Final = "weight_memory_usage_gb+kv_cache_memory_usage_gb"

SGLANG: Final = Profile(
    name="sglang",
    product="SGLang",
    switch="with --enable-metrics",
    prefixes=("sglang:",),
    engine_label="dp_rank",
    # These labels identify a rank's scheduler, if all ranks export metrics.
    repeat_labels=("tp_rank", "pp_rank", "moe_ep_rank"),
    reasons={
        "it counts no steps": "scheduler_steps",
        "no label has it": "kv_cache_dtype",
        "its counters say more": "prefix_cache_hit_rate",
        "its page does not show that memory was released": "sleep_state",
        "--mem-fraction-static is not on its page; its bytes are": "gpu_memory_utilization",
        "the configured size is not on its page; the bytes in use are": "kv_cache_memory_bytes",
        "its page combines several processes, and shows no start time": "process_start_time",
    },
    facts=(
        Fact("running", ("num_running_reqs",), where=_TOTAL),
        Fact("waiting", ("num_queue_reqs",), where=_TOTAL),
        Fact("finished_total", ("num_requests_total",)),
        Fact("preemptions_total", ("num_retracted_requests_total",)),  # 0.5.12 and newer
        Fact("prompt_tokens_total", ("prompt_tokens_total",)),
        Fact("generation_tokens_total", ("generation_tokens_total",)),
        # `full_token_usage` exists since SGLang 0.5.12. `token_usage` is the highest value of all
        # pools.
        Fact("kv_used_ratio", ("full_token_usage", "token_usage"), combine=Combine.MEAN),
        Fact(
            "kv_capacity_tokens",
            ("max_total_num_tokens", "kv_used_tokens+kv_evictable_tokens+kv_available_tokens"),
        ),
        # Since 0.5.23.
        Fact("prefix_queries_total", _PREFILLED, where=("mode", ("input", *_HITS))),
        Fact("prefix_queries_total", ("prompt_tokens_total",)),
        Fact("prefix_hits_total", _PREFILLED, where=("mode", _HITS)),
        Fact("prefix_hits_total", ("cached_tokens_total",)),
        # SGLang's GB is 2**30 bytes (srt/utils/common.py, srt/mem_cache/memory_pool.py). The memory
        # of CUDA graphs is on the page in SGLang versions after 0.5.12.
        Fact("memory_bytes", (f"{_MODEL}+graph_memory_usage_gb", _MODEL), factor=GIB),
    ),
)
