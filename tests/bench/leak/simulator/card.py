"""A card's memory, handed out in steps of 2 MiB as cudaMalloc does."""

from __future__ import annotations

from typing import Final

MIB: Final = 2**20
GIB: Final = 2**30
STEP: Final = 2 * MIB


class CardFullError(Exception):
    """Nothing is left, also after the allocator gave back what it had cached."""


class Card:
    """What is used of a card, by all processes on it."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0

    def take(self, size: float) -> bool:
        """Take memory, rounded up; False when there is not enough."""
        size = rounded(size)
        if self.used + size > self.total:
            return False
        self.used += size
        return True

    def give(self, size: float) -> None:
        self.used -= rounded(size)


def rounded(size: float, step: int = STEP) -> int:
    return -int(-size // step) * step
