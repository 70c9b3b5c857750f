"""The compute processes of one device, asked for no more often than needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pynvml

from vllm_headroom.model import GpuProcess
from vllm_headroom.scrape.nvml.calls import Handle

CHANGE_BYTES: Final = 2 * 2**20
"""A device's memory is given out in pieces of 2 MiB: who moved by less has not moved."""

LEAST_AGE_SECONDS: Final = 1.0
"""A list costs about 400 times what memory info does (4.5 ms against 11.6 us, flightlessmango/MangoHud#2104) and holds
the driver's lock meanwhile, so that memory which always moves must not ask for it on every reading.
"""


class ProcessList:
    """The last list and what was in use when it was made."""

    def __init__(self) -> None:
        self.processes: tuple[GpuProcess, ...] | None = None
        self._listed_at = 0.0
        self._used_bytes: int | None = None

    def is_fresh(self, now: float, used_bytes: int | None, interval_seconds: float) -> bool:
        """Return whether the list still tells who holds the memory now in use (None where that is not known)."""
        age_seconds = now - self._listed_at
        if self.processes is None or age_seconds >= interval_seconds:
            return False
        if used_bytes is None or self._used_bytes is None or age_seconds < LEAST_AGE_SECONDS:
            return True
        return abs(used_bytes - self._used_bytes) < CHANGE_BYTES

    def renew(self, now: float, used_bytes: int | None, processes: tuple[GpuProcess, ...] | None) -> None:
        """Take a new list, None where it could not be read."""
        self.processes, self._listed_at, self._used_bytes = processes, now, used_bytes


def compute_processes(handle: Handle) -> tuple[GpuProcess, ...]:
    """Return the processes NVML lists on a device. Raises NVMLError.

    The function is named with its version because pynvml answers a missing one by another class of error otherwise.
    """
    return _processes(pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))


def mps_clients(handle: Handle) -> tuple[GpuProcess, ...]:
    """Return the processes that compute through NVIDIA's MPS, whose server alone is a compute process then."""
    return _processes(pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3(handle))


def _processes(listed: Iterable[Any]) -> tuple[GpuProcess, ...]:
    return tuple(GpuProcess(pid=process.pid, used_bytes=process.usedGpuMemory) for process in listed)
