"""How often a value was counted, in bounded memory."""

from __future__ import annotations

from collections import Counter


class Tally:
    """Values to three digits, which keeps some thousand of them at the most, and their quantiles."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()

    def add(self, value: float | None) -> None:
        """Count one more value, where it is known."""
        if value is not None:
            self._counts[float(f"{value:.3g}")] += 1

    def quantile(self, share: float) -> float | None:
        """Return the least value that so large a share of all does not exceed; None without any."""
        wanted, counted = share * self._counts.total(), 0
        for value, times in sorted(self._counts.items()):
            counted += times
            if counted >= wanted:
                return value
        return None
