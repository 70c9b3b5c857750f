"""Text Generation Inference 3."""

from typing import Final

from vllm_headroom.parse.profile import Fact, Profile

_NO_BYTES: Final = "its page has no bytes"
_NO_PREFIX: Final = "its page does not show its prefix cache"

TGI: Final = Profile(
    name="tgi",
    product="Text Generation Inference",
    switch="always",
    prefixes=("tgi_",),
    model_label="",
    absent=(
        ("preemptions", "it never takes back what a request was given"),
        ("scheduler_steps", "it counts no steps"),
        ("kv_cache_dtype", "its series have no labels"),
        ("prefix_cache_queries", _NO_PREFIX),
        ("prefix_cache_hits", _NO_PREFIX),
        ("prefix_cache_hit_rate", _NO_PREFIX),
        ("sleep_state", "it does not sleep"),
        ("gpu_memory_utilization", _NO_BYTES),
        ("kv_cache_memory_bytes", _NO_BYTES),
        ("memory_bytes", _NO_BYTES),
        ("process_start_time", "its page does not show it"),
    ),
    facts=(
        Fact("running", ("batch_current_size",)),
        Fact("waiting", ("queue_size",)),
        Fact("finished_total", ("request_success",)),  # a counter without _total
        Fact("prompt_tokens_total", ("request_input_length_sum",)),
        Fact("generation_tokens_total", ("request_generated_tokens_sum",)),
        Fact("kv_used_tokens", ("batch_current_max_tokens",)),  # what the batch may grow to
        Fact("kv_capacity_tokens", ("batch_max_total_tokens",)),
    ),
)
