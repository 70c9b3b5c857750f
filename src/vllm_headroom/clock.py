"""The only module that reads the time."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """The clock that determines when the daemon takes samples."""

    def time(self) -> float:
        """Return seconds since the epoch."""

    def monotonic(self) -> float:
        """Return a time in seconds that never goes backwards."""

    async def sleep_until(self, monotonic_seconds: float) -> None:
        """Wait until the given time; if it has already passed, only yield to other tasks."""


class SystemClock:
    """The machine's clock, optionally sped up by the factor `speed`."""

    speed = 1.0

    def time(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Return a time in seconds that never goes backwards."""
        return time.monotonic()

    async def sleep_until(self, monotonic_seconds: float) -> None:
        """Wait until the given time; if it has already passed, only yield to other tasks."""
        # uvloop's timers count whole milliseconds and may fire early. If this method returned
        # early, a step would run twice.
        while True:
            remaining_seconds = monotonic_seconds - self.monotonic()
            await asyncio.sleep(max(0.0, remaining_seconds / self.speed))
            if self.monotonic() >= monotonic_seconds:
                return
