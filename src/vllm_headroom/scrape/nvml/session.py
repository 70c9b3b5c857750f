"""NVML from init to shutdown."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pynvml
import structlog

from vllm_headroom.model import Failure
from vllm_headroom.scrape.nvml.calls import Calls
from vllm_headroom.scrape.nvml.device import Device, Surroundings
from vllm_headroom.scrape.nvml.errors import source_failure, source_failure_of
from vllm_headroom.scrape.nvml.xids import Xids
from vllm_headroom.scrape.peak import Peak
from vllm_headroom.vocabulary import Reason

log = structlog.get_logger()


class Session:
    """Opens NVML, as often as needed; `devices` is empty while it is not open. Its methods belong on NVML's thread."""

    def __init__(self, *, monotonic: Callable[[], float], process_interval_seconds: float, proc: Path) -> None:
        self.devices: tuple[Device, ...] = ()
        self.driver_version: str | None = None
        self.xids = Xids()
        self._monotonic = monotonic
        self._process_interval_seconds = process_interval_seconds
        self._proc = proc
        self._peaks: defaultdict[str, Peak] = defaultdict(Peak)
        self._is_initialised = False
        self._said_v1 = False

    def open(self) -> Failure | None:
        """Initialise NVML, after a shutdown where it was initialised, and find the GPUs; return why that failed."""
        self.close()
        try:
            pynvml.nvmlInit()
            self._is_initialised = True
            count = pynvml.nvmlDeviceGetCount()
            surroundings = self._surroundings(alone=count == 1)
            self.driver_version = surroundings.calls.ask("", "driver version", pynvml.nvmlSystemGetDriverVersion)
        except pynvml.NVMLError as error:
            return source_failure_of(error.value)
        for uuid in [uuid for uuid, peak in self._peaks.items() if peak.highest_bytes(self._monotonic()) is None]:
            del self._peaks[uuid]
        self.xids.begin()
        self.devices = tuple(Device(index, surroundings) for index in range(count))
        return None if count else source_failure(Reason.NO_DEVICES)

    def close(self) -> None:
        """Shut NVML down where it was initialised; its handles are not valid afterwards."""
        self.devices = ()
        if self._is_initialised:
            self._is_initialised = False
            self.xids.end()
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def _surroundings(self, *, alone: bool) -> Surroundings:
        return Surroundings(
            monotonic=self._monotonic,
            process_interval_seconds=self._process_interval_seconds,
            memory_version=self._memory_version(),
            calls=Calls(),
            peaks=self._peaks,
            xids=self.xids,
            proc=self._proc,
            alone=alone,
        )

    def _memory_version(self) -> int | None:
        # Decided once per init and for all GPUs: in v1, used contains reserved, and the two must not be mixed.
        if hasattr(pynvml.nvmlLib, "nvmlDeviceGetMemoryInfo_v2"):
            return int(pynvml.nvmlMemory_v2)
        if not self._said_v1:
            self._said_v1 = True
            log.warning("this driver has no memory info v2: used memory contains what the driver reserves")
        return None
