"""llama.cpp's server, with --metrics."""

from typing import Final

from vllm_headroom.parse.profile import Combine, Fact, Profile

_NO_CACHE: Final = "its page shows its KV cache no longer (ggml-org/llama.cpp#13660)"
_NO_BYTES: Final = "its page has no bytes"
_ALL_PROMPTS: Final = "prompt_tokens_total+prompt_tokens_cached_total"
"""Computed plus cached tokens; before 2026 the page has only the first."""

LLAMA_CPP: Final = Profile(
    name="llama_cpp",
    product="llama.cpp",
    switch="with --metrics",
    prefixes=("llamacpp:",),
    model_label="",
    absent=(
        ("requests_finished", "it counts none: growth per request is not known"),
        ("preemptions", "a slot is never taken back"),
        ("kv_cache_usage", _NO_CACHE),
        ("kv_cache_capacity", _NO_CACHE),
        ("kv_cache_dtype", _NO_CACHE),
        ("prefix_cache_hit_rate", "its counters say more"),
        ("sleep_state", "its page does not show it"),
        ("gpu_memory_utilization", _NO_BYTES),
        ("kv_cache_memory_bytes", _NO_BYTES),
        ("memory_bytes", _NO_BYTES),
        ("process_start_time", "its page does not show it"),
    ),
    facts=(
        Fact(field="running", families=("requests_processing",)),
        Fact(field="waiting", families=("requests_deferred",)),
        Fact(
            field="kv_used_ratio", families=("kv_cache_usage_ratio",), combine=Combine.MEAN
        ),  # until ggml-org/llama.cpp#13660
        Fact(field="kv_used_tokens", families=("kv_cache_tokens",)),
        Fact(field="prompt_tokens_total", families=(_ALL_PROMPTS, "prompt_tokens_total")),
        Fact(field="generation_tokens_total", families=("tokens_predicted_total",)),
        Fact(field="steps_total", families=("n_decode_total",)),
        Fact(field="prefix_queries_total", families=(_ALL_PROMPTS,)),
        Fact(field="prefix_hits_total", families=("prompt_tokens_cached_total",)),
    ),
)
