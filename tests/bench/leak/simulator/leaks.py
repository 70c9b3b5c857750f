"""Ways to lose memory: what was lost is never freed, and is counted."""

from __future__ import annotations

from random import Random

from simulator.allocator import Allocator
from simulator.card import MIB, Card, CardFullError
from simulator.traffic import Tick, poisson

PIECE = MIB // 2
SEGMENT = 20 * MIB


class Leak:
    """Loses memory as instructed; `lost` is in bytes, from `onset`. Outside torch it takes from the card directly."""

    def __init__(self, allocator: Allocator, card: Card, onset: float = 0.0, *, outside: bool = False) -> None:
        self._allocator, self._card, self.onset, self._outside = allocator, card, onset, outside
        self.lost = 0.0
        self.outside = 0
        self._owed = 0.0

    @property
    def place(self) -> str:
        return "outside_torch" if self._outside else "tensors"

    def lose(self, size: float, piece: float = PIECE) -> None:
        """Lose so many bytes, in pieces of at most this size."""
        self.lost += size
        if self._outside:
            self._owed += size
            while self._owed >= 2 * MIB:
                self._owed -= 2 * MIB
                if not self._card.take(2 * MIB):
                    raise CardFullError
                self.outside += 2 * MIB
            return
        while size > 0:
            self._allocator.malloc(min(size, piece))
            size -= piece

    def step(self, tick: Tick) -> None:
        """Lose nothing by itself."""

    def woke(self) -> None:
        """Lose nothing on waking."""


class ByRequest(Leak):
    """So many bytes for each finished request."""

    def __init__(
        self, allocator: Allocator, card: Card, bytes_each: float, onset: float = 0.0, *, outside: bool = False
    ) -> None:
        super().__init__(allocator, card, onset, outside=outside)
        self._each = bytes_each

    def step(self, tick: Tick) -> None:
        if tick.done and tick.seconds >= self.onset:
            self.lose(tick.done * self._each)


class ByTime(Leak):
    """So many bytes a second, whatever is served."""

    def __init__(
        self, allocator: Allocator, card: Card, pace: float, onset: float = 0.0, *, outside: bool = False
    ) -> None:
        super().__init__(allocator, card, onset, outside=outside)
        self._pace = pace

    def step(self, tick: Tick) -> None:
        if tick.seconds >= self.onset:
            self.lose(self._pace * tick.length)


class Fragments(Leak):
    """So many bytes for each finished request, as segments that a small tensor each keeps from being given back."""

    def __init__(self, allocator: Allocator, card: Card, bytes_each: float) -> None:
        super().__init__(allocator, card)
        self._each = bytes_each

    @property
    def place(self) -> str:
        return "fragmentation"

    def step(self, tick: Tick) -> None:
        self._owed += tick.done * self._each
        self.lost += tick.done * self._each
        while self._owed >= SEGMENT:
            self._owed -= SEGMENT
            self._allocator.strand(SEGMENT, SEGMENT // 20)


class Sometimes(Leak):
    """A whole block in one request of so many."""

    def __init__(self, rng: Random, allocator: Allocator, card: Card, size: float, chance: float) -> None:
        super().__init__(allocator, card)
        self._rng, self._size, self._chance = rng, size, chance

    def step(self, tick: Tick) -> None:
        for _ in range(poisson(self._rng, tick.done * self._chance)):
            self.lose(self._size, self._size)


class Lumps(Leak):
    """A lump every so often: at set times, or at random ones with that mean distance."""

    def __init__(
        self,
        rng: Random,
        allocator: Allocator,
        card: Card,
        size: float,
        every: float,
        *,
        regular: bool,
        pieces: int = 1,
    ) -> None:
        super().__init__(allocator, card)
        self._rng, self._size, self._every, self._regular, self._pieces = rng, size, every, regular, pieces
        self._next = rng.uniform(0.3, 1.0) * every

    def step(self, tick: Tick) -> None:
        if tick.seconds >= self._next:
            self.lose(self._size, self._size / self._pieces)
            gap = self._rng.uniform(0.9, 1.1) if self._regular else self._rng.expovariate(1)
            self._next = tick.seconds + self._every * gap


class AtWaking(Leak):
    """A lump left over at each waking."""

    def __init__(self, allocator: Allocator, card: Card, size: float) -> None:
        super().__init__(allocator, card)
        self._size = size

    def woke(self) -> None:
        self.lose(self._size, self._size / 4)
