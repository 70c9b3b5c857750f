"""The llama.cpp server, run with --metrics."""

from typing import Final

from vllm_headroom.parse.profile import Combine, Fact, Profile

_ALL_PROMPTS: Final = "prompt_tokens_total+prompt_tokens_cached_total"
"""The sum of computed and cached tokens. Before 2026, the page has only computed tokens."""

LLAMA_CPP: Final = Profile(
    name="llama_cpp",
    product="llama.cpp",
    switch="with --metrics",
    prefixes=("llamacpp:",),
    model_label="",
    reasons={
        "it counts none: growth per request is not known": "requests_finished",
        "a slot is never taken back": "preemptions",
        "its page shows its KV cache no longer (ggml-org/llama.cpp#13660)": (
            "kv_cache_usage kv_cache_capacity kv_cache_dtype"
        ),
        "its counters say more": "prefix_cache_hit_rate",
        "its page does not show it": "sleep_state process_start_time",
        "its page has no bytes": "gpu_memory_utilization kv_cache_memory_bytes memory_bytes",
    },
    facts=(
        Fact("running", ("requests_processing",)),
        Fact("waiting", ("requests_deferred",)),
        # llama.cpp exported this series until ggml-org/llama.cpp#13660.
        Fact("kv_used_ratio", ("kv_cache_usage_ratio",), combine=Combine.MEAN),
        Fact("kv_used_tokens", ("kv_cache_tokens",)),
        Fact("prompt_tokens_total", (_ALL_PROMPTS, "prompt_tokens_total")),
        Fact("generation_tokens_total", ("tokens_predicted_total",)),
        Fact("steps_total", ("n_decode_total",)),
        Fact("prefix_queries_total", (_ALL_PROMPTS,)),
        Fact("prefix_hits_total", ("prompt_tokens_cached_total",)),
    ),
)
