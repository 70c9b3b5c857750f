"""What an engine does with its allocator while it serves; each part has its own reason to grow, and to stop."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from math import exp, log, sqrt
from random import Random
from typing import Protocol

from simulator.allocator import Allocator, Block
from simulator.card import MIB, Card
from simulator.traffic import Tick, poisson


class Part(Protocol):
    """Something that takes memory."""

    def step(self, tick: Tick) -> None: ...


class Activations:
    """Scratch for the largest batch of the tick: bounded by what was profiled, kept by the allocator as high water."""

    def __init__(self, rng: Random, allocator: Allocator, full: float, *, drift: float = 0.0) -> None:
        self._rng, self._allocator, self._full, self._drift = rng, allocator, full, drift
        self._median, self._sigma = rng.uniform(0.02, 0.2), rng.uniform(0.3, 0.8)
        self._shares = sorted(rng.random() for _ in range(rng.randint(1, 3)))

    def step(self, tick: Tick) -> None:
        if not tick.done:
            return
        normal = _largest_normal(self._rng, tick.done)
        typical = self._median * (1 + self._drift * min(1.0, tick.seconds / 36_000))
        demand = self._full * min(1.0, typical * exp(self._sigma * normal) + tick.running / 2000)
        cuts = [0.0, *self._shares, 1.0]
        blocks = [self._allocator.malloc(demand * (end - begin)) for begin, end in pairwise(cuts) if end - begin > 0.01]
        for block in blocks:
            self._allocator.free(block)


def _largest_normal(rng: Random, count: int) -> float:
    """Return the largest of so many standard normal draws, nearly (Gumbel for many)."""
    if count < 8:
        return max(rng.gauss(0, 1) for _ in range(count))
    root = sqrt(2 * log(count))
    centre = root - (log(log(count)) + 2.53) / (2 * root)
    return centre - log(-log(max(1e-12, rng.random()))) / root


class FirstUses:
    """Kernels, workspaces and buffers that are loaded at their first use and stay."""

    def __init__(self, rng: Random, allocator: Allocator, card: Card, count: int) -> None:
        self._allocator, self._card = allocator, card
        self._due = sorted(
            (rng.expovariate(exp(rng.uniform(log(1e-6), log(1e-1)))), rng.random()) for _ in range(count)
        )
        self._sizes = [rng.choice((2, 2, 4, 8, 8, 16, 32)) * MIB for _ in range(count)]
        self._done = 0
        self.outside = 0

    def step(self, tick: Tick) -> None:
        self._done += tick.done
        while self._due and self._due[0][0] <= self._done:
            _, where = self._due.pop(0)
            size = self._sizes.pop()
            if where < 0.5:
                self._allocator.malloc(size)
            elif self._card.take(size):
                self.outside += size


class Graphs:
    """A graph for each size of batch, captured when that size is first seen, in a separate pool."""

    def __init__(self, rng: Random, card: Card) -> None:
        self._card, self._size = card, rng.uniform(4, 40) * MIB
        self._seen: set[int] = set()
        self.outside = 0

    def step(self, tick: Tick) -> None:
        bucket = min(64, int(tick.running) // 8)
        if tick.done and bucket not in self._seen and self._card.take(self._size):
            self._seen.add(bucket)
            self.outside += -int(-self._size // (2 * MIB)) * 2 * MIB


class Encoder:
    """Images: scratch by the pixels, and outputs that stay in a cache of bounded size until the oldest go."""

    def __init__(self, rng: Random, allocator: Allocator, share: float, cache: float) -> None:
        self._rng, self._allocator, self._share, self._cache = rng, allocator, share, cache
        self._pixels, self._sigma = rng.uniform(8, 40) * MIB, rng.uniform(0.4, 0.9)
        self._kept: deque[Block] = deque()
        self._bytes = 0

    def step(self, tick: Tick) -> None:
        for _ in range(min(4, poisson(self._rng, tick.done * self._share))):
            size = min(30 * self._pixels, self._pixels * self._rng.lognormvariate(0, self._sigma))
            scratch = self._allocator.malloc(size)
            block = self._allocator.malloc(size / 12)
            self._allocator.free(scratch)
            self._kept.append(block)
            self._bytes += block.size
            while self._bytes > self._cache:
                oldest = self._kept.popleft()
                self._bytes -= oldest.size
                self._allocator.free(oldest)


class Adapters:
    """Adapters loaded on demand into so many slots; the oldest makes room."""

    def __init__(self, rng: Random, allocator: Allocator, per_hour: float, size: float, slots: int) -> None:
        self._rng, self._allocator, self._per_hour, self._size, self._slots = rng, allocator, per_hour, size, slots
        self._loaded: deque[list[Block]] = deque()

    def step(self, tick: Tick) -> None:
        for _ in range(poisson(self._rng, self._per_hour * tick.length / 3600)):
            if len(self._loaded) == self._slots:
                for block in self._loaded.popleft():
                    self._allocator.free(block)
            rank = self._rng.choice((0.5, 1.0, 1.0, 1.0))
            self._loaded.append([self._allocator.malloc(self._size * rank / 8) for _ in range(8)])


class Chores:
    """A job in the engine every so often (an evaluation, a reload) that needs scratch and frees it all."""

    def __init__(self, rng: Random, allocator: Allocator, every: float, size: float, *, gives_back: bool) -> None:
        self._rng, self._allocator, self._every, self._size, self._gives_back = rng, allocator, every, size, gives_back
        self._next = rng.uniform(0.2, 1) * every

    def step(self, tick: Tick) -> None:
        if tick.seconds < self._next:
            return
        self._next = tick.seconds + self._every * self._rng.uniform(0.8, 1.2)
        size = self._size * self._rng.uniform(0.7, 1.0)
        blocks = [self._allocator.malloc(size / 5) for _ in range(5)]
        for block in blocks:
            self._allocator.free(block)
        if self._gives_back:
            self._allocator.empty_cache()


class Requests:
    """Buffers that live as long as their request: they follow load, and their free blocks stay cached."""

    def __init__(self, rng: Random, allocator: Allocator, bytes_each: float) -> None:
        self._rng, self._allocator, self._each = rng, allocator, bytes_each
        self._held: deque[Block] = deque()

    def step(self, tick: Tick) -> None:
        wanted = min(400, int(tick.running))
        while len(self._held) < wanted:
            self._held.append(self._allocator.malloc(self._each * self._rng.lognormvariate(0, 0.4)))
        while len(self._held) > wanted:
            self._held.rotate(self._rng.randint(0, 3))
            self._allocator.free(self._held.popleft())
