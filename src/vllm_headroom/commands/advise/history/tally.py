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


class Rise:
    """How far a counter rose. One that fell began again from 0: the engine restarted."""

    def __init__(self) -> None:
        self.total = 0.0
        self.known = False
        self._last: float | None = None

    def step(self, value: float | None) -> float:
        """Take the counter as it is now; return how far it rose since it was last known."""
        if value is None:
            return 0.0
        self.known = True
        last, self._last = self._last, value
        rise = 0.0 if last is None else value - (last if value >= last else 0.0)
        self.total += rise
        return rise
