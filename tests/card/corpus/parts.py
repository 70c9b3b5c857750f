"""What takes memory in an engine while it serves, and gives it back or has a bound: no leak is here."""

from __future__ import annotations

from collections import deque
from math import exp, log
from random import Random
from typing import Any, Final, Protocol

from tests.card.corpus.memory import MIB, take, take_outside_torch
from tests.card.corpus.traffic import HOUR, Tick


class Part(Protocol):
    """Something that takes memory; raises torch's OutOfMemoryError."""

    def step(self, tick: Tick) -> None: ...


def count_events(rng: Random, mean: float) -> int:
    """Return a number of events by Poisson's law; the mean is small."""
    threshold, count = exp(-mean), 0
    product = rng.random()
    while product > threshold:
        product *= rng.random()
        count += 1
    return count


class Adapters:
    """LoRA adapters, loaded on demand into so many slots; the oldest makes room. Ranks differ."""

    PIECES: Final = 28

    def __init__(self, rng: Random, *, per_hour: float, mib: float, slots: int) -> None:
        self._rng, self._per_hour, self._mib, self._slots = rng, per_hour, mib, slots
        self._loaded: deque[list[Any]] = deque()

    def step(self, tick: Tick) -> None:
        for _ in range(count_events(self._rng, self._per_hour * tick.length / HOUR)):
            if len(self._loaded) == self._slots:
                self._loaded.popleft()
            size = self._mib * MIB * self._rng.choice((0.25, 0.5, 1.0, 1.0))
            copied = take(size)
            self._loaded.append([take(size / self.PIECES * self._rng.choice((0.5, 1.5))) for _ in range(self.PIECES)])
            del copied


class Images:
    """Scratch by the pixels of an image, and outputs in a cache of bounded size."""

    LARGEST: Final = 12
    """At most this many times the usual image."""

    def __init__(self, rng: Random, *, share: float, mib: float, sigma: float, cache_mib: float) -> None:
        self._rng, self._share, self._mib, self._sigma, self._cache = rng, share, mib, sigma, cache_mib * MIB
        self._kept: deque[Any] = deque()
        self._kept_bytes = 0

    def step(self, tick: Tick) -> None:
        for _ in range(min(6, count_events(self._rng, min(20.0, tick.started * self._share)))):
            size = self._mib * MIB * min(self.LARGEST, self._rng.lognormvariate(0, self._sigma))
            scratch = [take(size), take(size / 2)]
            image = take(size / 10)
            del scratch
            self._kept.append(image)
            self._kept_bytes += image.numel()
            while self._kept_bytes > self._cache:
                self._kept_bytes -= self._kept.popleft().numel()


class FirstSizes:
    """Buffers for each size of batch, taken when a batch of that size first runs."""

    def __init__(self, rng: Random, *, mib: float, apart: int) -> None:
        self._size, self._apart = rng.uniform(0.5, 1.5) * mib * MIB, apart
        self._seen: dict[int, Any] = {}

    def step(self, tick: Tick) -> None:
        bucket = tick.running // self._apart
        if tick.running and bucket not in self._seen:
            self._seen[bucket] = [take(self._size * 0.7), take(self._size * 0.3)]


class FirstUses:
    """Kernels, workspaces and buffers that stay after their first use; how rare each is is log-uniform.

    A share of them is outside torch, which does not release its cache for them: on a full card they fail.
    """

    def __init__(self, rng: Random, *, count: int, outside: float = 0.5) -> None:
        rarity = (exp(rng.uniform(log(1e-5), log(1e-1))) for _ in range(count))
        self._due = sorted((rng.expovariate(rate), rng.choice((2, 2, 4, 8, 16, 32)), rng.random()) for rate in rarity)
        self._done, self._inside = 0, 1 - outside
        self._kept: list[Any] = []

    def step(self, tick: Tick) -> None:
        self._done += tick.done
        while self._due and self._due[0][0] <= self._done:
            _, mib, where = self._due.pop(0)
            if where < self._inside:
                self._kept.append(take(mib * MIB))
            else:
                take_outside_torch(mib * MIB)


class Workspace:
    """One buffer for the largest batch so far; a larger batch takes a larger one and frees the one before."""

    def __init__(self, _rng: Random, *, bytes_per_token: int) -> None:
        self._each, self._tokens = bytes_per_token, 0
        self._buffer: Any = None

    def step(self, tick: Tick) -> None:
        tokens = max((tokens for tokens, _ in tick.batches), default=0)
        if tokens > self._tokens:
            self._tokens, self._buffer = tokens, take(self._each * tokens)


class OneOffs:
    """Rare requests that need a large buffer once: prompt logprobs, a long image."""

    def __init__(self, rng: Random, *, per_hour: float, low_mib: float, high_mib: float) -> None:
        self._rng, self._per_hour, self._low, self._high = rng, per_hour, low_mib, high_mib

    def step(self, tick: Tick) -> None:
        for _ in range(count_events(self._rng, self._per_hour * tick.length / HOUR)):
            size = exp(self._rng.uniform(log(self._low), log(self._high))) * MIB
            logits = take(size * 0.6)
            logprobs = take(size * 0.4)
            del logits, logprobs


class Buffers:
    """Buffers of mixed sizes that live as long as a request: they follow load, and leave fragments."""

    def __init__(self, rng: Random, *, mib: float, sigma: float, most: int) -> None:
        self._rng, self._mib, self._sigma, self._most = rng, mib, sigma, most
        self._held: list[Any] = []

    def step(self, tick: Tick) -> None:
        wanted = min(self._most, tick.running)
        for _ in range(min(len(self._held), max(tick.done // 4, len(self._held) - wanted))):
            self._held.pop(self._rng.randrange(len(self._held)))
        while len(self._held) < wanted:
            size = self._mib * min(8.0, self._rng.lognormvariate(0, self._sigma))
            self._held.append(take(size * MIB))
