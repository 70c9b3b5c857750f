"""vLLM 0.4 and newer (V0 and V1), and Aphrodite."""

from typing import Final

from msgspec.structs import replace

from vllm_headroom.model.families import GROUPED_MODELS
from vllm_headroom.parse.profile import Combine, Fact, Profile
from vllm_headroom.units import GIB

_INFO: Final = ("cache_config_info",)


def _counter(field: str, *names: str) -> Fact:
    """Also accept each name without `_total`, because Ray exports counters that way."""
    families: list[str] = []
    for name in names:
        families += [f"{name}_total", name]
    return Fact(field, tuple(families))


VLLM: Final = Profile(
    name="vllm",
    product="vLLM",
    switch="without --disable-log-stats",
    prefixes=("vllm:", "ray_vllm:", "ray_vllm_", "vllm_"),
    # The page has one series per API server. One of these series has the true value, and the others
    # are 0.
    repeat_labels=("pid",),
    replica_labels=("ReplicaId",),
    grouped_models=GROUPED_MODELS,
    reasons={
        "its page has no bytes: the probe reports them, or the budget is used": "memory_bytes",
    },
    facts=(
        Fact("running", ("num_requests_running",)),
        Fact("waiting", ("num_requests_waiting",)),
        _counter("finished_total", "request_success"),
        _counter("preemptions_total", "num_preemptions"),
        _counter("prompt_tokens_total", "prompt_tokens"),
        _counter("generation_tokens_total", "generation_tokens"),
        # This series counts steps that produced a token or finished a request.
        Fact("steps_total", ("iteration_tokens_total_count",)),
        # vLLM uses the first name since 0.9.2, and the second one up to 0.11.2.
        Fact(
            "kv_used_ratio", ("kv_cache_usage_perc", "gpu_cache_usage_perc"), combine=Combine.MEAN
        ),
        Fact("kv_capacity_tokens", _INFO, label="kv_cache_size_tokens"),  # 0.24 and newer
        Fact(
            "kv_cache_dtype",
            _INFO,
            combine=Combine.TEXT,
            label="cache_dtype",
            exceptions="kv_cache_dtype_skip_layers",  # 0.19
        ),
        Fact("kv_blocks", _INFO, label="num_gpu_blocks", combine=Combine.SHARE),
        Fact("kv_block_tokens", _INFO, label="block_size", combine=Combine.SAME),
        Fact("kv_state_block_tokens", _INFO, label="mamba_block_size", combine=Combine.SAME),
        _counter("prefix_queries_total", "prefix_cache_queries", "gpu_prefix_cache_queries"),
        _counter("prefix_hits_total", "prefix_cache_hits", "gpu_prefix_cache_hits"),
        # vLLM V0 has this series up to 0.9.0. The value is -1 if prefix caching is off.
        Fact("prefix_hit_lifetime_ratio", ("gpu_prefix_cache_hit_rate",), combine=Combine.MEAN),
        # 0.11.1 and newer
        Fact("awake", ("engine_sleep_state",), where=("sleep_state", ("awake",))),
        Fact(
            "gpu_memory_utilization_ratio",
            _INFO,
            label="gpu_memory_utilization",
            combine=Combine.SAME,
        ),
        Fact("kv_cache_memory_bytes", _INFO, label="kv_cache_memory_bytes", combine=Combine.SAME),
        # 0.33
        Fact("kv_offload_bytes", ("kv_offload_config_info",), label="cpu_kv_cache_size_bytes"),
        Fact(
            "kv_offload_bytes", _INFO, label="kv_offloading_size", combine=Combine.SAME, factor=GIB
        ),
        _counter("multimodal_cache_queries_total", "mm_cache_queries"),  # 0.11.1 and newer
        Fact(
            "started_at_seconds",
            ("process_start_time_seconds",),
            combine=Combine.SAME,
            prefixed=False,
        ),
    ),
)

APHRODITE: Final = replace(VLLM, name="aphrodite", product="Aphrodite", prefixes=("aphrodite:",))
"""Aphrodite's page is the same as vLLM's, but with another prefix."""
