"""The GPU memory that a healthy engine goes on taking after its start, and never gives back.

The picture is PyTorch's caching allocator (c10/core/AllocatorConfig.h: 2 MiB and 20 MiB segments) with lazily loaded
kernels. Both get rarer as work accumulates; a leak does not.
"""

from __future__ import annotations

from math import ceil, exp
from random import Random
from statistics import NormalDist
from typing import Final

MIB: Final = 2**20
SMALL_SEGMENT_MIB: Final = 2
LARGE_SEGMENT_MIB: Final = 20
ACTIVATIONS_MIB: Final = 1_400
"""What vLLM's profile run set aside for activations: the most that the allocator takes later."""

MIB_PER_RUNNING: Final = 2.0
"""Scratch memory that grows with the batch; its peak is kept."""

FIRST_USES: Final = 12
_NORMAL: Final = NormalDist()


def segments(mib: float, segment_mib: int) -> int:
    """Return `mib` as MiB in whole segments."""
    return ceil(mib / segment_mib) * segment_mib


class HighWater:
    """The most that any request so far needed for a moment: a record of log-normal demands."""

    def __init__(self, random: Random, *, median_mib: float, spread: float, segment_mib: int) -> None:
        self.mib = 0
        self._random = random
        self._median_mib = median_mib
        self._spread = spread
        self._segment_mib = segment_mib
        self._record = 0.0

    def step(self, requests: int) -> None:
        """Serve so many requests; the highest of n even draws is one draw to the power 1/n."""
        if requests == 0:
            return
        highest = self._random.random() ** (1.0 / requests)
        if self._record < highest < 1.0:
            self._record = highest
            demand_mib = self._median_mib * exp(self._spread * _NORMAL.inv_cdf(highest))
            self.mib = segments(demand_mib, self._segment_mib)


class Allocator:
    """What one life of the engine has taken since it began to serve; `mib` never falls."""

    def __init__(self, random: Random) -> None:
        self.mib = 0
        self._most_running = 0
        self._first_used_mib = 0
        self._high_waters = (
            HighWater(random, median_mib=36.0, spread=0.35, segment_mib=SMALL_SEGMENT_MIB),
            HighWater(random, median_mib=80.0, spread=0.30, segment_mib=LARGE_SEGMENT_MIB),
        )
        self._first_uses = sorted((_first_use(random) for _ in range(FIRST_USES)), reverse=True)

    def step(self, *, requests: int, requests_total: int, running: int) -> None:
        """Serve `requests` more requests, `requests_total` since the start."""
        for high_water in self._high_waters:
            high_water.step(requests)
        self._most_running = max(self._most_running, running)
        while self._first_uses and self._first_uses[-1][0] <= requests_total:
            self._first_used_mib += self._first_uses.pop()[1]
        taken = (
            sum(high_water.mib for high_water in self._high_waters)
            + segments(MIB_PER_RUNNING * self._most_running, LARGE_SEGMENT_MIB)
            + self._first_used_mib
        )
        self.mib = min(taken, ACTIVATIONS_MIB)


def _first_use(random: Random) -> tuple[float, int]:
    """Return the request that first needs some kernel, and its MiB; from one request in ten to one in a million."""
    chance = 10.0 ** random.uniform(-6.0, -1.0)
    return random.expovariate(chance), SMALL_SEGMENT_MIB * random.randint(1, 8)
