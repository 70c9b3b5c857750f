"""What is remembered of a GPU between two readings: its peaks and its last failure."""

from collections import deque
from typing import Any, Final

from vllm_headroom.log import Log
from vllm_headroom.model import GpuReading

log = Log(__name__)

WINDOW_SECONDS: Final = 60.0
"""Four scrapes at Prometheus' usual 15 s: a peak between two of them is on the page for several."""


class Peak:
    """Keeps the samples that can still become the highest: each is higher than all later ones."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, now: float, used_bytes: int) -> None:
        """Take a sample; `now` must not decrease."""
        while self._samples and self._samples[-1][1] <= used_bytes:
            self._samples.pop()
        self._samples.append((now, used_bytes))

    def highest_bytes(self, now: float) -> int | None:
        """Return the highest sample of the window that ends now; None without one."""
        while self._samples and self._samples[0][0] < now - WINDOW_SECONDS:
            self._samples.popleft()
        return self._samples[0][1] if self._samples else None


class GpuTransitions:
    """Logs once when a GPU, by UUID or else by index, fails, answers again, or does not report its memory."""

    def __init__(self) -> None:
        self._failed: frozenset[str] = frozenset()
        self._without_memory: set[str] = set()

    def report(self, readings: tuple[GpuReading, ...]) -> None:
        """Log what changed since the last readings."""
        before, self._failed = (
            self._failed,
            frozenset(name for name, reading in _name(readings) if reading.failure),
        )
        self._without_memory &= {reading.uuid for reading in readings}
        for name, reading in _name(readings):
            about: dict[str, Any] = {"gpu": reading.index, "uuid": reading.uuid}
            if reading.failure is not None:
                if name not in before:
                    failure = reading.failure
                    log.warning(
                        "GPU failed", **about, reason=str(failure.reason), problem=failure.message
                    )
                continue
            if before & {name, f"GPU {reading.index}"}:
                log.info("GPU answers again", **about)
            if reading.memory is None and reading.uuid not in self._without_memory:
                self._without_memory.add(reading.uuid)
                log.warning("GPU does not report its memory: its memory series are absent", **about)


def _name(readings: tuple[GpuReading, ...]) -> list[tuple[str, GpuReading]]:
    return [(reading.uuid or f"GPU {reading.index}", reading) for reading in readings]
