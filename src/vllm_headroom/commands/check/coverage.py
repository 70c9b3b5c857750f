"""For how long was it read, and how far did it count?"""

from __future__ import annotations

from typing import Final

LONGEST_STEP_SECONDS: Final = 300.0
"""The longest sampling interval that can be set: what lies further apart was not watched in between."""


class Coverage:
    """The time in which something was read without a gap."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: float | None = None

    def step(self, now: float) -> None:
        """Add a reading; a clock that was set back begins anew."""
        if self._last is not None and 0 < now - self._last <= LONGEST_STEP_SECONDS:
            self.seconds += now - self._last
        self._last = now


class Counted:
    """What a counter of the engine's rose by; None until it was read."""

    def __init__(self) -> None:
        self.total: float | None = None
        self._last = 0.0

    def step(self, value: float | None, *, anew: bool) -> None:
        """Add a reading; `anew` says that the engine began to count from 0 since the last one."""
        if value is None:
            return
        if self.total is None:
            self.total = 0.0
        else:
            self.total += value if anew else max(0.0, value - self._last)
        self._last = value
