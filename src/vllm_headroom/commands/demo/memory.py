"""The GPU memory that a healthy engine goes on taking after its start, and never gives back.

The picture is PyTorch's caching allocator (c10/core/AllocatorConfig.h: 2 MiB and 20 MiB segments) with lazily loaded
kernels. What the n-th request needs first gets rarer as 1/n; a leak does not.
"""

from __future__ import annotations

from math import ceil, log1p
from typing import Final

MIB: Final = 2**20
SMALL_SEGMENT_MIB: Final = 2
LARGE_SEGMENT_MIB: Final = 20
ACTIVATIONS_MIB: Final = 1_400
"""What vLLM's profile run set aside for activations: the most that the allocator takes later."""

MIB_PER_RUNNING: Final = 2.0
"""Scratch memory that grows with the batch; its peak is kept."""

FIRST_USES_MIB: Final = 40.0
"""What is needed first in each e-fold of requests."""


def segments(mib: float, segment_mib: int) -> int:
    """Return `mib` as MiB in whole segments."""
    return ceil(mib / segment_mib) * segment_mib


def taken_mib(requests: int, most_running: int) -> int:
    """Return what a life of the engine has taken that served so many requests, so many at once at the most."""
    first_uses = segments(FIRST_USES_MIB * log1p(requests), LARGE_SEGMENT_MIB)
    return min(first_uses + segments(MIB_PER_RUNNING * most_running, LARGE_SEGMENT_MIB), ACTIVATIONS_MIB)
