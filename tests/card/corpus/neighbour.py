"""Another process on the card: it holds a level, fills up to one, or rises and falls."""

from __future__ import annotations

from random import Random
from typing import Any, Final

from tests.card.corpus import memory
from tests.card.corpus.day import Beside
from tests.card.corpus.memory import GIB, MIB, take

PIECE: Final = 48 * MIB
LEAST: Final = 0.3
"""Of its level, which a filling or sawtooth neighbour holds at first."""


class Neighbour:
    """A process that does not serve vLLM."""

    def __init__(self, neighbour_plan: Beside, seed: int, began_seconds: float) -> None:
        self._beside, self._began = neighbour_plan, began_seconds
        self._rng = Random(seed)  # noqa: S311 - no secret
        self._held: list[Any] = []

    def step(self, seconds: float, _length: float) -> None:
        """Hold what it wants now, or what is left where that is less."""
        wanted = self._beside.gib * GIB * self._level((seconds - self._began) / (60 * self._beside.minutes))
        if wanted < PIECE * len(self._held) / 2:
            del self._held[int(wanted / PIECE) :]
            memory.release_cache()
        while PIECE * (len(self._held) + 1) <= wanted:
            try:
                self._held.append(take(PIECE))
            except memory.OUT_OF_MEMORY:
                return

    def _level(self, rounds: float) -> float:
        if self._beside.kind == "filling":
            return min(1.0, LEAST + (1 - LEAST) * rounds)
        if self._beside.kind == "sawtooth":
            return LEAST + (1 - LEAST) * (rounds % 1.0) * self._rng.uniform(0.9, 1.0)
        return 1.0
