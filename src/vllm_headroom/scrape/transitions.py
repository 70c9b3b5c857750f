"""Log lines for what changes on one GPU."""

from __future__ import annotations

import structlog

from vllm_headroom.model import GpuReading

log = structlog.get_logger()


class GpuTransitions:
    """Says once that a GPU fails, answers again, or does not tell its memory."""

    def __init__(self) -> None:
        self._failed: set[tuple[int, str]] = set()
        self._without_memory: set[str] = set()

    def report(self, readings: tuple[GpuReading, ...]) -> None:
        """Log what changed since the last readings."""
        for reading in readings:
            gpu = (reading.index, reading.uuid)
            if reading.failure is None:
                self._answers(reading)
            elif gpu not in self._failed:
                self._failed.add(gpu)
                failure = reading.failure
                log.warning("GPU failed", gpu=gpu[0], uuid=gpu[1], reason=str(failure.reason), problem=failure.message)

    def _answers(self, reading: GpuReading) -> None:
        gpu = (reading.index, reading.uuid)
        if gpu in self._failed:
            self._failed.remove(gpu)
            log.info("GPU answers again", gpu=reading.index, uuid=reading.uuid)
        if reading.memory is None and reading.uuid not in self._without_memory:
            self._without_memory.add(reading.uuid)
            log.warning("GPU does not tell its memory: its memory series are absent", gpu=gpu[0], uuid=gpu[1])
