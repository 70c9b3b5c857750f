"""One run of an engine: what it takes at start, what its parts do while it serves, how it sleeps and ends."""

from __future__ import annotations

from random import Random

from simulator.allocator import Allocator
from simulator.card import GIB, MIB, Card, rounded
from simulator.leaks import Leak
from simulator.parts import Activations, Part
from simulator.recipe import Recipe
from simulator.traffic import Tick

CONTEXT = 600 * MIB
"""CUDA's context and libraries, which torch knows nothing of."""


class Engine:
    """The engine's process on a card; `lost` is what leaked in this run, `full` the scratch it was profiled with."""

    def __init__(self, rng: Random, card: Card, recipe: Recipe, began: float, *, fixed: int, full: float) -> None:
        self.card, self.began, self.asleep, self.finished = card, began, False, 0
        self.allocator = Allocator(card, expandable=recipe.expandable)
        self._fixed, self._context = fixed, min(CONTEXT, fixed)
        card.take(fixed)
        parts: list[Part] = [Activations(rng, self.allocator, full, drift=recipe.drift)]
        parts += [make(rng, self.allocator, card) for make in recipe.parts]
        self.leak: Leak | None = None if recipe.leak is None else recipe.leak(rng, self.allocator, card)
        self._parts = parts if self.leak is None else [*parts, self.leak]

    @property
    def held(self) -> int:
        """What the process holds on the card."""
        outside = sum(getattr(part, "outside", 0) for part in self._parts)
        return self._fixed + self.allocator.reserved + outside

    @property
    def inside(self) -> dict[str, int]:
        """What a probe in the process would read: torch's figures, with weights and KV cache among the tensors."""
        torch, tensors = self.allocator, self._fixed - min(self._context, self._fixed)
        return {
            "allocated": tensors + torch.allocated,
            "reserved": tensors + torch.reserved,
            "inactive_split": torch.inactive_split,
        }

    @property
    def lost(self) -> float:
        return 0.0 if self.leak is None else self.leak.lost

    def step(self, tick: Tick) -> None:
        """Serve for one tick; raises CardFullError when it runs out of memory."""
        self.finished += tick.done
        for part in self._parts:
            part.step(tick)

    def sleep(self) -> None:
        """Offload the weights and drop the KV cache, as vLLM's sleep does: what is cached goes too."""
        self.asleep = True
        self.allocator.empty_cache()
        self._resize(rounded(1.5 * GIB))

    def wake(self, fixed: int) -> None:
        self.asleep = False
        self._resize(fixed)
        if self.leak is not None:
            self.leak.woke()

    def stop(self) -> None:
        self.card.give(self.held)

    def _resize(self, fixed: int) -> None:
        self.card.give(self._fixed)
        self.card.take(fixed)
        self._fixed = fixed
