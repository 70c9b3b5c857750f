"""Which series does the daemon's page lack for want of an input?"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.model import EnginePage, Metric

_PER_REQUEST: Final = (catalog.ENGINE_KV_TOKENS_PER_REQUEST, catalog.ENGINE_KV_BYTES_PER_REQUEST)

SERIES: Final[Mapping[str, tuple[Metric, ...]]] = {
    "requests_running": (
        catalog.ENGINE_RUNNING,
        catalog.LOAD_STABLE,
        catalog.MEMORY_DELTA,
        catalog.MEMORY_PER_RUNNING_REQUEST,
        catalog.MEMORY_PER_REQUEST_RATIO,
        *_PER_REQUEST,
        catalog.ENGINE_ADDITIONAL_REQUESTS,
    ),
    "requests_waiting": (catalog.ENGINE_WAITING,),
    "requests_finished": (
        catalog.ENGINE_FINISHED,
        catalog.LEAK_PER_REQUEST,
        catalog.MEMORY_PER_REQUEST_RATIO,
    ),
    "preemptions": (catalog.ENGINE_PREEMPTIONS,),
    "prompt_tokens": (catalog.ENGINE_PROMPT_TOKENS,),
    "generation_tokens": (catalog.ENGINE_GENERATION_TOKENS,),
    "kv_cache_usage": (catalog.ENGINE_KV_USED, *_PER_REQUEST, catalog.ENGINE_ADDITIONAL_REQUESTS),
    "kv_cache_capacity": (
        catalog.ENGINE_KV_CAPACITY_TOKENS,
        catalog.ENGINE_KV_CAPACITY_BYTES,
        *_PER_REQUEST,
    ),
    "prefix_cache_queries": (catalog.ENGINE_PREFIX_QUERIES, catalog.ENGINE_PREFIX_HIT_RATIO),
    "prefix_cache_hits": (catalog.ENGINE_PREFIX_HITS, catalog.ENGINE_PREFIX_HIT_RATIO),
    "sleep_state": (catalog.ENGINE_AWAKE,),
}
"""What is made of each input, and absent without it. Of the inputs that are not here, each has others that stand in for
it, and what the engine reports of its memory is looked at by itself."""


def needed(page: EnginePage) -> tuple[str, ...]:
    """Return the inputs that the page does not offer and something is made of."""
    return tuple(name for name, found in page.inputs if not found and name in SERIES)


def lost(inputs: Collection[str], page: EnginePage) -> tuple[str, ...]:
    """Return the series that are absent without these inputs, in the order of the daemon's page."""
    without = {metric for name in inputs for metric in SERIES[name]}
    if ("prefix_cache_hit_rate", True) in page.inputs:
        without.discard(catalog.ENGINE_PREFIX_HIT_RATIO)
    return tuple(metric.name for metric in catalog.METRICS if metric in without)
