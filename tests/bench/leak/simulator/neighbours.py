"""Other processes on the engine's card."""

from __future__ import annotations

from math import exp
from random import Random

from simulator.allocator import Allocator
from simulator.card import GIB, MIB, Card
from simulator.leaks import ByTime
from simulator.parts import Activations, FirstUses
from simulator.traffic import Tick


class Nobody:
    """An engine alone on its card."""

    held = 0
    lost = 0.0
    onset = 0.0
    processes = 0

    def __init__(self, rng: Random, card: Card) -> None:
        self._rng, self._card = rng, card

    def step(self, tick: Tick) -> None:
        """Do nothing."""

    def _resize(self, size: int) -> None:
        self._card.give(self.held)
        self.held = size if self._card.take(size) else 0


class Tools(Nobody):
    """A tool that looks at the card for a moment, with a separate context."""

    def step(self, tick: Tick) -> None:
        here = self._rng.random() < 0.02
        self._resize(300 * MIB if here else 0)
        self.processes = int(here)


class Job(Nobody):
    """A job on the card every so often, which comes and goes."""

    every = 2400.0

    def __init__(self, rng: Random, card: Card) -> None:
        super().__init__(rng, card)
        self._most = rng.uniform(0.4, 1.5) * GIB
        self._length = rng.uniform(300, 900)
        self._from = rng.uniform(0, self.every)

    def step(self, tick: Tick) -> None:
        since = (tick.seconds - self._from) % self.every
        here = tick.seconds > self._from and since < self._length
        self._resize(int((450 * MIB + self._most * (1 - exp(-since / 30))) // (2 * MIB) * 2 * MIB) if here else 0)
        self.processes = int(here)


class Sibling(Nobody):
    """Another server from the beginning on, with its own activations and first uses."""

    processes = 1

    def __init__(self, rng: Random, card: Card) -> None:
        super().__init__(rng, card)
        self._allocator = Allocator(card)
        self._parts = [Activations(rng, self._allocator, rng.uniform(100, 600) * MIB)]
        self._uses = FirstUses(rng, self._allocator, card, rng.randint(4, 12))
        self._leak: ByTime | None = None

    @property
    def held(self) -> int:  # type: ignore[override]
        return self._allocator.reserved + self._uses.outside

    @property
    def lost(self) -> float:  # type: ignore[override]
        return 0.0 if self._leak is None else self._leak.lost

    def step(self, tick: Tick) -> None:
        for part in self._parts:
            part.step(tick)
        self._uses.step(tick)
        if self._leak is not None:
            self._leak.step(tick)


class LeakingSibling(Sibling):
    """That server leaks."""

    def __init__(self, rng: Random, card: Card) -> None:
        super().__init__(rng, card)
        self.onset = rng.uniform(0, 4) * 3600
        self._leak = ByTime(self._allocator, card, rng.uniform(60e3, 250e3), self.onset)


class Newcomer(Sibling):
    """A server that comes late, fills up within minutes and stays."""

    def __init__(self, rng: Random, card: Card) -> None:
        super().__init__(rng, card)
        self._begin, self._tau = rng.uniform(2, 16) * 3600, rng.uniform(10, 200)
        self._base = rng.uniform(0.4, 1.5) * GIB
        self._taken = 0

    processes = 0

    @property
    def held(self) -> int:  # type: ignore[override]
        return self._taken + super().held

    def step(self, tick: Tick) -> None:
        since = tick.seconds - self._begin
        if since < 0:
            return
        self.processes = 1
        wanted = int(self._base * (1 - exp(-since / self._tau)) // (2 * MIB) * 2 * MIB)
        self._card.take(wanted - self._taken)
        self._taken = wanted
        super().step(tick)


NEIGHBOURS = {
    "none": Nobody,
    "tools": Tools,
    "job": Job,
    "sibling": Sibling,
    "leaking sibling": LeakingSibling,
    "newcomer": Newcomer,
}
