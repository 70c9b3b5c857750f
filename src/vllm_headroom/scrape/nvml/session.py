"""Open and close NVML, and keep the list of its GPUs."""

import contextlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pynvml

from vllm_headroom.log import Log
from vllm_headroom.model import Failure, GpuReading
from vllm_headroom.scrape.gpu_state import Peak
from vllm_headroom.scrape.nvml.calls import Calls, Xids, build_device_failure, build_source_failure, explain_source_code
from vllm_headroom.scrape.nvml.device import DriverContext, NvmlDevice, Part
from vllm_headroom.vocabulary import Reason

log = Log(__name__)


class Session:
    """Opens NVML, as often as needed; `devices` is empty while it is closed. Its methods run on NVML's thread."""

    def __init__(self, *, monotonic: Callable[[], float], process_interval_seconds: float, proc: Path) -> None:
        self.devices: tuple[NvmlDevice, ...] = ()
        self.driver_version: str | None = None
        self.xids = Xids()
        self._monotonic = monotonic
        self._process_interval_seconds = process_interval_seconds
        self._proc = proc
        self._peaks: defaultdict[str, Peak] = defaultdict(Peak)
        self._is_initialised = False
        self._said_v1 = False

    def open(self) -> Failure | None:
        """Initialise NVML, after a shutdown if needed, and find the GPUs; return why that failed."""
        self.close()
        try:
            pynvml.nvmlInit()
            self._is_initialised = True
            count = pynvml.nvmlDeviceGetCount()
            context = DriverContext(
                monotonic=self._monotonic,
                process_interval_seconds=self._process_interval_seconds,
                memory_version=self._memory_version(),
                calls=Calls(),
                peaks=self._peaks,
                xids=self.xids,
                proc=self._proc,
                alone=count == 1,
            )
            self.driver_version = context.calls.ask("", "driver version", pynvml.nvmlSystemGetDriverVersion)
        except pynvml.NVMLError as error:
            return explain_source_code(error.value)
        for uuid in [uuid for uuid, peak in self._peaks.items() if peak.highest_bytes(self._monotonic()) is None]:
            del self._peaks[uuid]
        self.xids.begin()
        self.devices = tuple(NvmlDevice(index, context) for index in range(count))
        return None if count else build_source_failure(Reason.NO_DEVICES)

    def close(self) -> None:
        """Shut NVML down if it was initialised; its handles become invalid."""
        self.devices = ()
        if self._is_initialised:
            self._is_initialised = False
            self.xids.end()
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def _memory_version(self) -> int | None:
        # Once per init, for all GPUs: in v1, used contains reserved, and the two must not be mixed.
        if hasattr(pynvml.nvmlLib, "nvmlDeviceGetMemoryInfo_v2"):
            return int(pynvml.nvmlMemory_v2)
        if not self._said_v1:
            self._said_v1 = True
            log.warning("this driver has no memory info v2: used memory contains what the driver reserves")
        return None


Outcome = tuple[GpuReading, ...] | Failure

MOST_GPUS: Final = 64
"""More than a machine has; beyond it the GPUs that are gone the longest are forgotten."""


class Roster:
    """Remembers the parts that each GPU had when it was last opened, by the GPU's UUID.

    A GPU that is gone stays listed with its MIG instances; an instance gone from a present GPU was removed on purpose
    and is forgotten.
    """

    def __init__(self, xids: Xids) -> None:
        self._known: dict[str, tuple[Part, ...]] = {}
        self._xids = xids

    def readings(self, outcomes: list[tuple[NvmlDevice, Outcome]]) -> tuple[GpuReading, ...]:
        """Return the readings, with a failed one for each part that was not read and each part of a missing GPU."""
        for device, _ in outcomes:
            if device.gpu is not None:
                known = self._known.pop(device.gpu.uuid, (device.gpu,))
                self._known[device.gpu.uuid] = device.parts or known
        self._known = dict(tuple(self._known.items())[-MOST_GPUS:])
        missing = self._known.keys() - {device.gpu.uuid for device, _ in outcomes if device.gpu is not None}
        readings: list[GpuReading] = []
        for device, outcome in outcomes:
            readings += self._unread(device, missing, outcome) if isinstance(outcome, Failure) else outcome
        gone = build_device_failure(Reason.DEVICE_LOST)
        for uuid in sorted(missing):
            readings += self._failed(self._known[uuid], gone)
        return tuple(readings)

    def _unread(self, device: NvmlDevice, missing: set[str], failure: Failure) -> list[GpuReading]:
        # the UUID of a GPU that does not open is unknown: it counts as the missing one that had its index
        uuid = (
            device.gpu.uuid
            if device.gpu is not None
            else next((uuid for uuid in sorted(missing) if self._known[uuid][0].index == device.index), "")
        )
        missing.discard(uuid)
        if not uuid:
            return [GpuReading(index=device.index, uuid="", name="", failure=failure)]
        return self._failed(self._known[uuid], failure)

    def _failed(self, parts: tuple[Part, ...], failure: Failure) -> list[GpuReading]:
        return [part.failed(failure, self._xids.counts(part.gpu_uuid, part.gpu_instance)) for part in parts]
