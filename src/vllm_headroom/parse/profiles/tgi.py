"""Text Generation Inference 3."""

from typing import Final

from vllm_headroom.parse.profile import Fact, Profile

TGI: Final = Profile(
    name="tgi",
    product="Text Generation Inference",
    switch="always",
    prefixes=("tgi_",),
    model_label="",
    reasons={
        "it never takes back what a request was given": "preemptions",
        "it counts no steps": "scheduler_steps",
        "its series have no labels": "kv_cache_dtype",
        "its page does not show its prefix cache": (
            "prefix_cache_queries prefix_cache_hits prefix_cache_hit_rate"
        ),
        "it does not sleep": "sleep_state",
        "its page has no bytes": "gpu_memory_utilization kv_cache_memory_bytes memory_bytes",
        "its page does not show it": "process_start_time",
    },
    facts=(
        Fact("running", ("batch_current_size",)),
        Fact("waiting", ("queue_size",)),
        Fact("finished_total", ("request_success",)),  # a counter without _total
        Fact("prompt_tokens_total", ("request_input_length_sum",)),
        Fact("generation_tokens_total", ("request_generated_tokens_sum",)),
        Fact("kv_used_tokens", ("batch_current_max_tokens",)),  # the maximum size of the batch
        Fact("kv_capacity_tokens", ("batch_max_total_tokens",)),
    ),
)
