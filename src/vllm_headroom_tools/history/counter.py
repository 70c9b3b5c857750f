"""Counting over a trace: how far a counter rose, how often a value was there."""

from __future__ import annotations

from collections import Counter


class Rise:
    """Follows a counter; `total` is None until it was read. One that fell began again from 0, as with another life."""

    def __init__(self) -> None:
        self.total: float | None = None
        self._last = 0.0

    def step(self, value: float | None, *, anew: bool = False) -> float:
        """Take the counter as it is now, None where that is not known, `anew` in another life; return its rise."""
        if value is None:
            return 0.0
        since = 0.0 if anew or value < self._last else self._last
        rise = 0.0 if self.total is None else value - since
        self.total, self._last = (self.total or 0.0) + rise, value
        return rise


class Histogram:
    """Values to three digits, and their quantiles; however many there are, some thousand of them are kept."""

    def __init__(self) -> None:
        self.counts: Counter[float] = Counter()

    def add(self, value: float | None) -> None:
        """Count one more value, where it is known."""
        if value is not None:
            self.counts[float(f"{value:.3g}")] += 1

    def quantile(self, share: float) -> float | None:
        """Return the least value that so large a share of all does not exceed; None without any."""
        wanted, counted = share * self.counts.total(), 0
        for value, times in sorted(self.counts.items()):
            counted += times
            if counted >= wanted:
                return value
        return None
