"""The simulated engine's /metrics page, with the names, labels and help texts of vLLM 0.32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from vllm_headroom.commands.demo.memory import MIB
from vllm_headroom.commands.demo.readers import RESIDENT_MIB
from vllm_headroom.commands.demo.traffic import BLOCK_TOKENS, CAPACITY_TOKENS, KV_BLOCKS, Traffic
from vllm_headroom.commands.demo.world import World

MODEL_NAME: Final = "simulated-8b"
LONGEST_TOKENS: Final = 32_768
"""vLLM's max_model_len."""

BASE: Final = {"model_name": MODEL_NAME, "engine": "0"}

CACHE_CONFIG: Final = {
    "_block_size_resolved": "True",
    "block_size": str(BLOCK_TOKENS),
    "cache_dtype": "auto",
    "cache_hit_alignment_tokens": "None",
    "effective_attention_block_size": str(BLOCK_TOKENS),
    "enable_mamba_shared_prefix_checkpoint": "False",
    "enable_prefix_caching": "True",
    "engine": "0",
    "gpu_memory_utilization": "0.92",
    "hash_block_size": "None",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_cache_max_concurrency": str(CAPACITY_TOKENS / LONGEST_TOKENS),
    "kv_cache_memory_bytes": "None",
    "kv_cache_size_tokens": str(CAPACITY_TOKENS),
    "kv_offloading_backend": "native",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None",
    "mamba_ssm_cache_dtype": "auto",
    "num_cpu_blocks": "None",
    "num_gpu_blocks": str(KV_BLOCKS),
    "num_gpu_blocks_override": "None",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256",
    "prefix_match_unit": "None",
    "replayssm_buffer_len": "16",
    "skip_page_size_padded": "None",
    "sliding_window": "None",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
    "user_specified_block_size": "False",
}

STOPPED_TENTHS: Final = 8
"""Of ten requests, eight end by themselves and two at their token limit."""

Family = tuple[str, str, Callable[[Traffic], float]]

GAUGES: Final[tuple[Family, ...]] = (
    ("vllm:num_requests_running", "Number of requests in model execution batches.", lambda traffic: traffic.running),
    ("vllm:num_requests_waiting", "Number of requests waiting to be processed.", lambda traffic: traffic.waiting),
    (
        "vllm:kv_cache_usage_perc",
        "KV-cache usage. 1 means 100 percent usage.",
        lambda traffic: traffic.kv_used_ratio,
    ),
)
COUNTERS: Final[tuple[Family, ...]] = (
    (
        "vllm:prefix_cache_queries",
        "Prefix cache queries, in terms of number of queried tokens.",
        lambda traffic: traffic.prompt_tokens_total,
    ),
    (
        "vllm:prefix_cache_hits",
        "Prefix cache hits, in terms of number of cached tokens.",
        lambda traffic: traffic.prefix_hits_total,
    ),
    (
        "vllm:num_preemptions",
        "Cumulative number of preemption from the engine.",
        lambda traffic: traffic.preemptions_total,
    ),
    ("vllm:prompt_tokens", "Number of prefill tokens processed.", lambda traffic: traffic.prompt_tokens_total),
    (
        "vllm:generation_tokens",
        "Number of generation tokens processed.",
        lambda traffic: traffic.generation_tokens_total,
    ),
)


class VllmCollector(Collector):
    """Collects the page of `world` as it stands; `epoch_seconds` is when the demo began."""

    def __init__(self, world: World, epoch_seconds: float) -> None:
        self._world = world
        self._epoch_seconds = epoch_seconds

    def collect(self) -> Iterator[Metric]:
        """Yield the families of one page."""
        engine = self._world.engine
        created_seconds = self._epoch_seconds + engine.serving_seconds
        yield from _process(self._epoch_seconds + engine.started_seconds)
        for name, text, value in GAUGES:
            yield _gauge(name, text, ({}, value(engine.traffic)))
        waiting = engine.traffic.waiting
        yield _gauge(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; "
            "'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). "
            "Sum of all reasons equals vllm:num_requests_waiting.",
            ({"reason": "capacity"}, waiting),
            ({"reason": "deferred"}, 0),
        )
        yield _gauge("vllm:engine_sleep_state", _SLEEP_STATE_HELP, *_sleep_state(asleep=engine.asleep))
        for name, text, value in COUNTERS:
            yield _counter(name, text, created_seconds, ({}, value(engine.traffic)))
        yield _counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            created_seconds,
            *_by_reason(engine.traffic.finished_total),
        )
        yield _steps(engine.traffic)
        yield _cache_config()


Child = tuple[dict[str, str], float]

_SLEEP_STATE_HELP: Final = (
    "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
    "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2."
)


def _sleep_state(*, asleep: bool) -> tuple[Child, ...]:
    values = {"awake": not asleep, "weights_offloaded": asleep, "discard_all": False}
    return tuple(({"sleep_state": state}, value) for state, value in values.items())


def _steps(traffic: Traffic) -> Metric:
    """Return the histogram of tokens per step, whose buckets nobody here reads: all fall into the last one."""
    family = HistogramMetricFamily(
        "vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.", labels=tuple(BASE)
    )
    tokens = traffic.prompt_tokens_total + traffic.generation_tokens_total
    family.add_metric(tuple(BASE.values()), [("+Inf", traffic.steps_total)], tokens)
    return family


def _by_reason(finished_total: int) -> tuple[Child, ...]:
    stopped = finished_total * STOPPED_TENTHS // 10
    ends = {"stop": stopped, "length": finished_total - stopped, "abort": 0, "error": 0, "repetition": 0}
    return tuple(({"finished_reason": reason}, count) for reason, count in ends.items())


def _process(started_seconds: float) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "process_start_time_seconds",
        "Start time of the process since unix epoch in seconds.",
        value=started_seconds,
    )
    yield GaugeMetricFamily(
        "process_resident_memory_bytes", "Resident memory size in bytes.", value=RESIDENT_MIB[0][1] * MIB
    )


def _cache_config() -> Metric:
    """Return the family that names no model."""
    family = GaugeMetricFamily(
        "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=tuple(CACHE_CONFIG)
    )
    family.add_metric(tuple(CACHE_CONFIG.values()), 1)
    return family


def _gauge(name: str, text: str, *children: Child) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=(*BASE, *children[0][0]))
    for labels, value in children:
        family.add_metric((*BASE.values(), *labels.values()), value)
    return family


def _counter(name: str, text: str, created_seconds: float, *children: Child) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=(*BASE, *children[0][0]))
    for labels, value in children:
        family.add_metric((*BASE.values(), *labels.values()), value, created=created_seconds)
    return family
