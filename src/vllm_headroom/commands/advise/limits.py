"""The figures that decide, each with where it comes from."""

from __future__ import annotations

from typing import Final

from vllm_headroom.units import GIB, MIB

PEAK_BYTES: Final = 256 * MIB
"""Less than this left at a peak is nearly nothing (alert HeadroomGpuMemoryPeak)."""

AIM_BYTES: Final = GIB
"""What should be left at peaks after a change (runbook HeadroomGpuMemoryLow, "Afterwards")."""

LOST_RATIO: Final = 0.01
LOST_RISES: Final = 3
"""What no request holds of the KV cache (alert HeadroomKvBlocksLeak)."""

HOST_LOW_RATIO: Final = 0.05
"""Ours: with less than a twentieth of the limit left, one request with a large video can be the last."""

LESS_CACHE_GB: Final = 1.0
"""Ours: a quarter of the default."""

LASTING_SECONDS: Final = 600.0
"""What lasts for so long is no burst (`for: 10m` of HeadroomGpuMemoryLow and HeadroomKvCacheThrashing)."""

APART_SECONDS: Final = 300.0
"""Two shortages with so much time between them are two (the five minutes over which HeadroomGpuMemoryLow looks)."""

SOMEBODY_BYTES: Final = 200 * MIB
"""What no visible process holds, up to here, is the driver's; beyond it is somebody (runbook HeadroomGpuMemoryLow)."""

FULL_RATIO: Final = 0.95
"""A KV cache is full above this (alert HeadroomKvCacheThrashing). Full alone queues, and harms nobody."""

HURTING_PREEMPTIONS: Final = 0.1
"""Preemptions for each finished request: 0.01 is nothing, above this it hurts (runbook HeadroomKvCacheThrashing)."""

LARGER_REQUESTS: Final = 2.0
"""Ours: a cache that requests of twice the usual size fill was blown out by them; below, there were too many."""

FEWEST_REQUESTS: Final = 4
"""Ours: where fewer usual requests than this fit at once, there is nothing to batch, and the model is too large."""

WAITING_REQUESTS: Final = 10
"""Fewer than this waiting is noise (alert HeadroomQueueBacklog)."""

ROOMY_RATIO: Final = 0.7
"""Ours: with more than three tenths of the KV cache free it is not the cache that makes requests wait."""

PAYING_RATIO: Final = 0.3
"""Below this share of cached tokens looking them up costs about what it saves (alert HeadroomPrefixCacheNotPaying)."""

PREFIX_SECONDS: Final = 6 * 3600.0
PREFIX_TOKENS_PER_SECOND: Final = 100.0
"""Six hours of at least this traffic judge a prefix cache; with less there is nothing to win (the same alert)."""

BLOCKED_RATIO: Final = 0.05
"""Ours: before vLLM 0.27 a waiting request is looked up anew in each step (vllm-project/vllm#43736); where requests
wait for more than this share of the time, hits over queries say nothing.
"""

USUAL_SECONDS: Final = 6 * 3600.0
"""Ours: an engine's highest peaks are believed to be its usual ones after so long; nothing is raised on less."""

HIGHEST_UTILIZATION: Final = 0.95
"""What vLLM's author calls safe ends here (vllm-project/vllm#1298)."""

SHORTEST_SECONDS: Final = 3600.0
"""A shorter trace cannot show health: the leak detector takes an hour to be sure."""

STALE_SECONDS: Final = 120.0
"""A page this old is not the present (alert HeadroomSampleStale)."""

CHANGED_RATIO: Final = 0.01
"""Ours: a KV cache that is so much larger or smaller was made by other settings; two equal starts differ by less."""

FAILED_STARTS: Final = 2
"""Ours: once may be a person who changed their mind."""
