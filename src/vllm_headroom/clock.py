"""The only place that reads the time."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """The clock of all sampling."""

    def time(self) -> float:
        """Return seconds since the epoch."""

    def monotonic(self) -> float:
        """Return seconds that never go back."""

    async def sleep_until(self, monotonic_seconds: float) -> None:
        """Wait until that time, never less; if it has passed, only yield to other tasks."""


class SystemClock:
    """The machine's clock."""

    def time(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()

    async def sleep_until(self, monotonic_seconds: float) -> None:
        """Wait until that time, never less; if it has passed, only yield to other tasks."""
        await sleep_until(self, monotonic_seconds, speed=1.0)


async def sleep_until(clock: Clock, monotonic_seconds: float, *, speed: float) -> None:
    """Wait until `clock`, which runs `speed` times as fast as the machine's, shows that time.

    uvloop's timers count whole milliseconds and may fire early; a step on a grid would then run twice.
    """
    while True:
        await asyncio.sleep(max(0.0, (monotonic_seconds - clock.monotonic()) / speed))
        if clock.monotonic() >= monotonic_seconds:
            return
