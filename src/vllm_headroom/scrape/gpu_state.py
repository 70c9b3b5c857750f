"""The state of a GPU between two readings: its peaks and its last failure."""

from collections import deque
from typing import Any, Final

from vllm_headroom.log import Log
from vllm_headroom.model import GpuReading

log = Log(__name__)

WINDOW_SECONDS: Final = 60.0
"""How long a peak stays on the page. The time is four scrapes at the usual interval of 15 s."""

_PeakSample = tuple[float, int]
"""A time on the monotonic clock in seconds, and the bytes in use."""


class RecentPeak:
    """The highest amount of memory in use in the last minute."""

    def __init__(self) -> None:
        # Samples that can no longer become the highest in the window are dropped. Each remaining
        # sample is higher than all later ones. The first sample is therefore always the peak.
        self._samples: deque[_PeakSample] = deque()

    def add(self, now: float, used_bytes: int) -> None:
        """Add a sample; `now` must not decrease."""
        while self._samples and self._samples[-1][1] <= used_bytes:
            self._samples.pop()
        self._samples.append((now, used_bytes))

    def highest_bytes(self, now: float) -> int | None:
        """Return the highest sample of the last minute, or None if there are no samples.

        Older samples are dropped.
        """
        window_start = now - WINDOW_SECONDS
        while self._samples:
            sampled_at, used_bytes = self._samples[0]
            if sampled_at >= window_start:
                return used_bytes
            self._samples.popleft()
        return None


class GpuTransitions:
    """Logs when a GPU fails or recovers.

    Logs once if a GPU does not report its memory.
    """

    def __init__(self) -> None:
        self._failed_names: frozenset[str] = frozenset()
        """The GPUs that failed in the last readings."""
        self._uuids_without_memory: set[str] = set()
        """The GPUs already logged as not reporting their memory."""

    def report(self, readings: tuple[GpuReading, ...]) -> None:
        """Log changes since the last readings."""
        previously_failed_names = self._failed_names
        self._failed_names = frozenset(_name(reading) for reading in readings if reading.failure)
        self._uuids_without_memory &= {reading.uuid for reading in readings}
        for reading in readings:
            name = _name(reading)
            fields: dict[str, Any] = {"gpu": reading.index, "uuid": reading.uuid}
            failure = reading.failure
            if failure is not None:
                if name not in previously_failed_names:
                    fields |= {"reason": str(failure.reason), "problem": failure.message}
                    log.warning("GPU failed", **fields)
                continue
            # A GPU that cannot be opened has no known UUID. The failure of an unopened GPU was
            # therefore recorded under its index.
            if previously_failed_names & {name, _name_by_index(reading)}:
                log.info("GPU answers again", **fields)
            if reading.memory is None and reading.uuid not in self._uuids_without_memory:
                self._uuids_without_memory.add(reading.uuid)
                log.warning(
                    "GPU does not report its memory: its memory series are absent", **fields
                )


def _name(reading: GpuReading) -> str:
    """Return a GPU's UUID.

    While the UUID is unknown, returns a name built from the index.
    """
    return reading.uuid or _name_by_index(reading)


def _name_by_index(reading: GpuReading) -> str:
    return f"GPU {reading.index}"
