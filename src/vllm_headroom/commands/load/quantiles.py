"""Quantiles of any number of values in bounded memory."""

from __future__ import annotations

from math import ceil, log, sqrt
from typing import Final

EXACT_VALUES: Final = 10_000
"""Up to so many, every value is kept."""

GROWTH: Final = 1.02
"""Beyond, a bin's upper end over its lower: what is said of a value is within 1 % of it."""

LEAST: Final = 1e-6
"""Values below count as this in the bins; these are seconds, and a microsecond is below what is measured here."""


class Quantiles:
    """Takes values from 0 up; its memory is bounded by EXACT_VALUES and then by the bins between extremes."""

    def __init__(self) -> None:
        self.count = 0
        self._values: list[float] = []
        self._bins: dict[int, int] = {}

    def add(self, value: float) -> None:
        """Take one more value."""
        self.count += 1
        if self._bins:
            self._put(value)
            return
        self._values.append(value)
        if len(self._values) > EXACT_VALUES:
            for known in self._values:
                self._put(known)
            self._values = []

    def at(self, share: float) -> float | None:
        """Return the least value that `share` of all are at most; None where there is none."""
        rank = max(1, ceil(share * self.count))
        if self._values:
            return sorted(self._values)[rank - 1]
        for index in sorted(self._bins):
            rank -= self._bins[index]
            if rank <= 0:
                return float(GROWTH**index / sqrt(GROWTH))
        return None

    def _put(self, value: float) -> None:
        index = ceil(log(max(value, LEAST)) / log(GROWTH))
        self._bins[index] = self._bins.get(index, 0) + 1
