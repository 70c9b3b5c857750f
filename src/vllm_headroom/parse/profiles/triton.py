"""Triton with the TensorRT-LLM backend."""

from typing import Final

from vllm_headroom.parse.profile import Combine, Fact, Profile


def _block(field: str, kind: str, combine: Combine = Combine.SUM) -> Fact:
    return Fact(
        field, ("kv_cache_block_metrics",), where=("kv_cache_block_type", (kind,)), combine=combine
    )


TRITON: Final = Profile(
    name="triton",
    product="Triton with TensorRT-LLM",
    switch="on port 8002",
    prefixes=("nv_trt_llm_",),
    model_label="model",
    engine_label="",
    reasons={
        "Triton counts them for each model of an ensemble": "requests_finished",
        "it counts none": "preemptions",
        "it counts no tokens": "prompt_tokens generation_tokens",
        "it counts no steps": "scheduler_steps",
        "no label has it": "kv_cache_dtype",
        "it counts no reuse": "prefix_cache_queries prefix_cache_hits prefix_cache_hit_rate",
        "its page does not show it": "sleep_state process_start_time",
        "its page has the bytes themselves": "gpu_memory_utilization",
        "its page has blocks, and the bytes of all": "kv_cache_memory_bytes",
    },
    facts=(
        Fact("running", ("request_metrics",), where=("request_type", ("scheduled",))),
        Fact("waiting", ("request_metrics",), where=("request_type", ("waiting",))),
        _block("kv_used_ratio", "fraction", Combine.MEAN),
        _block("kv_blocks", "max"),
        _block("kv_block_tokens", "tokens_per", Combine.SAME),
        Fact("memory_bytes", ("runtime_memory_metrics",), where=("memory_type", ("gpu",))),
    ),
)
