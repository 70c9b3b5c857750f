"""Log lines for what changes on one GPU."""

from __future__ import annotations

from vllm_headroom.log import Log
from vllm_headroom.model import GpuReading

log = Log(__name__)


class GpuTransitions:
    """Says once that a GPU fails, answers again, or does not tell its memory.

    A GPU is known by its UUID, since it may come back at another index; by its index while it does not tell its UUID.
    """

    def __init__(self) -> None:
        self._failed: frozenset[str] = frozenset()
        self._without_memory: set[str] = set()

    def report(self, readings: tuple[GpuReading, ...]) -> None:
        """Log what changed since the last readings."""
        before = self._failed
        self._failed = frozenset(reading.uuid or _name_by_index(reading) for reading in readings if reading.failure)
        self._without_memory &= {reading.uuid for reading in readings}
        for reading in readings:
            failure = reading.failure
            if failure is None:
                if before & {reading.uuid, _name_by_index(reading)}:
                    log.info("GPU answers again", gpu=reading.index, uuid=reading.uuid)
                self._memory(reading)
            elif (reading.uuid or _name_by_index(reading)) not in before:
                log.warning(
                    "GPU failed",
                    gpu=reading.index,
                    uuid=reading.uuid,
                    reason=str(failure.reason),
                    problem=failure.message,
                )

    def _memory(self, reading: GpuReading) -> None:
        if reading.memory is None and reading.uuid not in self._without_memory:
            self._without_memory.add(reading.uuid)
            log.warning(
                "GPU does not tell its memory: its memory series are absent", gpu=reading.index, uuid=reading.uuid
            )


def _name_by_index(reading: GpuReading) -> str:
    return f"GPU {reading.index}"
