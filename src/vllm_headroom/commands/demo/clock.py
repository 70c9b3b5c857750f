"""A clock that runs faster."""

from __future__ import annotations

import time

from vllm_headroom.clock import sleep_until


class ScaledClock:
    """Runs `speed` (above 0) times as fast as the machine's clock, from the machine's time at which it is made."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._began_epoch_seconds = time.time()
        self._began_monotonic_seconds = time.monotonic()

    def time(self) -> float:
        """Return simulated seconds since the epoch."""
        return self._began_epoch_seconds + self._passed()

    def monotonic(self) -> float:
        """Return simulated seconds that never go back."""
        return self._began_monotonic_seconds + self._passed()

    async def sleep_until(self, monotonic_seconds: float) -> None:
        """Wait until that time has come, never less; when it has passed, only let others run."""
        await sleep_until(self, monotonic_seconds, speed=self._speed)

    def _passed(self) -> float:
        return (time.monotonic() - self._began_monotonic_seconds) * self._speed
