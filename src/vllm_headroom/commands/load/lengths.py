"""How long prompts and answers are, as an operator writes it: text → distribution, or ValueError."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

LENGTHS: Final = re.compile(r"(\d{1,7})(?:\.\.(\d{1,7}))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Whole numbers of tokens from `least` to `most`, each doubling as likely as the next: many short, few long."""

    least: int
    most: int

    def drawn(self, chance: float) -> int:
        """Return the length at `chance`, a number from 0 to below 1."""
        return min(self.most, int(self.least * ((self.most + 1) / self.least) ** chance))

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"


def lengths(text: str) -> Lengths:
    """Return the distribution of a text such as `512` or `256..2048`."""
    found = LENGTHS.fullmatch(text.strip())
    if found is None:
        raise ValueError
    least = int(found[1])
    most = int(found[2] or least)
    if not 1 <= least <= most:
        raise ValueError
    return Lengths(least=least, most=most)
