"""When the next request may begin: no more than so many in all, and so many a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Pace:
    """Gives turns to all clients together; None is no cap."""

    def __init__(
        self, *, most_requests: int | None, requests_per_second: float | None, now: Callable[[], float]
    ) -> None:
        self._left = most_requests
        self._gap_seconds = 0.0 if requests_per_second is None else 1.0 / requests_per_second
        self._next_seconds = 0.0
        self._now = now

    @property
    def used_up(self) -> bool:
        """Whether the cap is reached."""
        return self._left == 0

    async def turn(self, until_seconds: float) -> bool:
        """Wait until the caller may begin a request; return False where that is not before `until_seconds`."""
        now = self._now()
        due = max(now, self._next_seconds)
        if due >= until_seconds or self.used_up:
            return False
        self._next_seconds = due + self._gap_seconds
        if self._left is not None:
            self._left -= 1
        if due > now:
            await asyncio.sleep(due - now)
        return True
