"""Leaks: tensors, or memory outside torch, that an engine keeps although nothing needs them."""

from __future__ import annotations

from math import exp, log
from random import Random
from typing import Any, Final

from tests.card.corpus.memory import MIB, take, take_outside_torch
from tests.card.corpus.parts import count_events
from tests.card.corpus.traffic import HOUR, Tick


class Leak:
    """What is kept from `onset_hours` on; `lost` is its bytes, without what it wastes in the allocator.

    `location` is where a probe should find it, None where that is a matter of opinion.
    """

    location: str | None = "tensors"

    def __init__(self, rng: Random, *, onset_hours: float = 0.0) -> None:
        self._rng, self.onset_seconds = rng, onset_hours * HOUR
        self._kept: list[Any] = []
        self.lost = 0

    def step(self, tick: Tick) -> None:
        """Leak as much as these seconds bring."""
        if tick.seconds >= self.onset_seconds:
            self._leak(tick)

    def _leak(self, tick: Tick) -> None:
        raise NotImplementedError

    def _keep(self, n_bytes: float) -> None:
        self._kept.append(take(n_bytes))
        self.lost += int(n_bytes)


class PerRequest(Leak):
    """Something of each finished request."""

    def __init__(self, rng: Random, *, kb: float, share: float = 1.0, onset_hours: float = 0.0) -> None:
        super().__init__(rng, onset_hours=onset_hours)
        self._bytes, self._share = kb * 1e3, share

    def _leak(self, tick: Tick) -> None:
        for _ in range(tick.done):
            if self._rng.random() < self._share:
                self._keep(self._bytes)


class PerImage(Leak):
    """The pixel values of some images, whose sizes differ."""

    def __init__(self, rng: Random, *, share: float, mb: float, onset_hours: float = 0.0) -> None:
        super().__init__(rng, onset_hours=onset_hours)
        self._share, self._mb = share, mb

    def _leak(self, tick: Tick) -> None:
        for _ in range(count_events(self._rng, min(20.0, tick.done * self._share))):
            self._keep(1e6 * self._mb * min(8.0, self._rng.lognormvariate(0, 0.6)))


class PerAbort(Leak):
    """Something of each request that a client cancelled."""

    def __init__(self, rng: Random, *, kb: float) -> None:
        super().__init__(rng)
        self._bytes = kb * 1e3

    def _leak(self, tick: Tick) -> None:
        for _ in range(tick.aborted):
            self._keep(self._bytes)


class ByTime(Leak):
    """A buffer at even times, whether requests run or not."""

    def __init__(self, rng: Random, *, mb_per_hour: float, every_seconds: float, onset_hours: float = 0.0) -> None:
        super().__init__(rng, onset_hours=onset_hours)
        self._bytes, self._every, self._due = mb_per_hour * 1e6 * every_seconds / HOUR, every_seconds, 0.0

    def _leak(self, tick: Tick) -> None:
        if tick.seconds >= self._due:
            self._due = tick.seconds + self._every
            self._keep(self._bytes)


class Steps(Leak):
    """A large block at rare events: an adapter that is not unloaded, a graph, a pool. `pieces` make it up."""

    def __init__(self, rng: Random, *, per_hour: float, mb: tuple[float, float], pieces: int = 1) -> None:
        super().__init__(rng)
        self._per_hour, self._mb, self._pieces = per_hour, mb, pieces

    def _leak(self, tick: Tick) -> None:
        low, high = self._mb
        for _ in range(count_events(self._rng, self._per_hour * tick.length / HOUR)):
            size = exp(self._rng.uniform(log(low), log(high))) * 1e6
            for _ in range(self._pieces):
                self._keep(size / self._pieces)


class Doubling(Leak):
    """A list on the card that is never cleared: when it is full, one twice as large replaces it."""

    def __init__(self, rng: Random, *, first_mb: float, kb_per_request: float) -> None:
        super().__init__(rng)
        self._capacity, self._bytes, self._filled = first_mb * 1e6, kb_per_request * 1e3, 0.0
        self._buffer: Any = None

    def _leak(self, tick: Tick) -> None:
        self._filled += tick.done * self._bytes
        if self._buffer is None or self._filled > self._capacity:
            self._capacity *= 1 if self._buffer is None else 2
            self._buffer = take(self._capacity)
            self.lost = int(self._capacity)


class Pinned(Leak):
    """A view of a large temporary block: what is kept is small, and its segment cannot be released."""

    SCRATCH: Final = 24 * MIB
    location = None

    def __init__(self, rng: Random, *, share: float, mib: float) -> None:
        super().__init__(rng)
        self._share, self._bytes = share, mib * MIB

    def _leak(self, tick: Tick) -> None:
        for _ in range(count_events(self._rng, min(20.0, tick.done * self._share))):
            tensor_before = take(self.SCRATCH * self._rng.uniform(0.3, 1.5))
            self._keep(self._bytes)
            tensor_after = take(self.SCRATCH * self._rng.uniform(0.3, 1.5))
            del tensor_before, tensor_after


class OutsideTorch(Leak):
    """Memory that a library takes from the runtime and keeps."""

    location = "outside_torch"

    def __init__(self, rng: Random, *, share: float, mib: float) -> None:
        super().__init__(rng)
        self._share, self._bytes = share, int(mib * MIB)

    def _leak(self, tick: Tick) -> None:
        for _ in range(count_events(self._rng, min(20.0, tick.done * self._share))):
            take_outside_torch(self._bytes)
            self.lost += self._bytes
