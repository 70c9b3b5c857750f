"""Which series does the daemon's page lack for want of an input?"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.model import EnginePage, EngineReading

SERIES: Final = {
    each.metadata["input"]: made
    for each in fields(EngineReading)
    if (made := tuple(m for m in catalog.METRICS if each.name in m.needs or m.name == each.metadata.get("metric")))
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
