"""How far a counter of the engine's rose over a trace."""

from __future__ import annotations


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
