"""Resident memory of the engine's host process: a heap with garbage, arenas, caches, and what is lost."""

from __future__ import annotations

from math import exp, log, sqrt
from random import Random

from simulator.card import GIB, MIB
from simulator.traffic import Tick, poisson

PAGE = 4096


class Heap:
    """A process of a healthy engine; `lost` stays 0."""

    role = "engine_core"

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._base = rng.uniform(3, 12) * GIB
        self._noise, self._swing = 0.0, rng.uniform(0.05, 4) * MIB
        self._garbage, self._each, self._collect = 0.0, rng.uniform(0, 4e3), rng.randint(2_000, 40_000)
        self._since, self._stays = 0, rng.uniform(0, 0.02)
        self._arenas, self._arena = 0.0, rng.uniform(0.2, 2) * MIB
        self.limit = int(rng.uniform(64, 256) * GIB)
        self.lost, self.onset = 0.0, 0.0
        self._cached = 0.0

    @property
    def rss(self) -> int:
        total_bytes = self._base + self._noise + self._garbage + self._arenas + self._cached + self.lost
        return int(total_bytes // PAGE * PAGE)

    def step(self, tick: Tick) -> None:
        keeps = exp(-tick.length / 120)
        self._noise = self._noise * keeps + self._rng.gauss(0, self._swing) * sqrt(1 - keeps * keeps)
        self._garbage += tick.done * self._each
        self._since += tick.done
        if self._since >= self._collect:
            self._since, self._garbage = 0, self._garbage * self._stays
        self._arenas = max(self._arenas, tick.running * self._arena)

    def woke(self) -> None:
        """Change nothing."""


class Caches(Heap):
    """A cache of processed inputs: new ones become rarer as the popular ones are known, and it has a limit."""

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self._most, self._power = rng.uniform(0.5, 4) * GIB, rng.uniform(0.4, 0.7)
        self._scale, self._seen = rng.uniform(0.2, 2) * MIB, 0

    def step(self, tick: Tick) -> None:
        super().step(tick)
        self._seen += tick.done
        self._cached = min(self._most, self._scale * float(self._seen**self._power))


class Fill(Heap):
    """A cache that every request fills evenly until it is full, within hours."""

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self._most, self._pace = rng.uniform(1, 4) * GIB, rng.uniform(0.05, 0.5) * MIB

    def step(self, tick: Tick) -> None:
        super().step(tick)
        self._cached = min(self._most, self._cached + self._pace * tick.length)


class Fragmented(Heap):
    """A heap whose holes grow by records of demand: so much for each e-fold of the requests done."""

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self._each_fold, self._seen = rng.uniform(50, 200) * MIB, 0

    def step(self, tick: Tick) -> None:
        super().step(tick)
        self._seen += tick.done
        self._cached = self._each_fold * log(1 + self._seen / 500)


class LosesByRequest(Heap):
    """A list that is not drained: so much for each request."""

    def __init__(self, rng: Random, low: float = 1_400, high: float = 2_300) -> None:
        super().__init__(rng)
        self._lose = rng.uniform(low, high)

    def step(self, tick: Tick) -> None:
        super().step(tick)
        self.lost += tick.done * self._lose


class LosesByTime(Heap):
    """So many bytes a second, from some hour on."""

    def __init__(self, rng: Random, low: float = 13e3, high: float = 200e3, latest: float = 0.0) -> None:
        super().__init__(rng)
        self._pace = exp(rng.uniform(*(log(end) for end in (low, high))))
        self.onset = rng.uniform(0.5, 1) * latest * 3600

    def step(self, tick: Tick) -> None:
        super().step(tick)
        if tick.seconds >= self.onset:
            self.lost += self._pace * tick.length


class LosesLumps(Heap):
    """A buffer that is not given back, in one request of thousands."""

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self._lump, self._chance = rng.uniform(64, 512) * MIB, 1 / rng.uniform(20_000, 60_000)

    def step(self, tick: Tick) -> None:
        super().step(tick)
        self.lost += self._lump * poisson(self._rng, tick.done * self._chance)
