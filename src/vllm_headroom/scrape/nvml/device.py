"""Open NVML, and read one physical GPU from it."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Final, TypeVar

import pynvml
from msgspec import Struct

from vllm_headroom.log import Log
from vllm_headroom.model import Failure, GpuMemory, GpuProcess, GpuReading
from vllm_headroom.scrape.gpu_state import Peak
from vllm_headroom.scrape.nvml.calls import (
    BLOCKED,
    DRIVER_WIDE,
    LOST,
    NEVER_ANSWERED,
    Handle,
    Xids,
    explain_source,
)
from vllm_headroom.scrape.proc.host import read_free_blocks, read_machine
from vllm_headroom.vocabulary import Reason

log = Log(__name__)
T = TypeVar("T")

CHANGE_BYTES: Final = 2 * 2**20
"""A device's memory is allocated in pieces of 2 MiB: less is no change."""

MOST_BYTES: Final = 2**41
"""Two TiB, several times the largest GPU: a driver that fails has answered 2^64 - 1."""

MOST_CELSIUS: Final = 200
MOST_MILLIWATTS: Final = 10_000_000
"""A GPU of 2026 takes 1,400 W, and switches off above 110 C; 2^32 - 1 is no reading."""

LEAST_AGE_SECONDS: Final = 1.0
"""A list costs 400 times what memory info does (4.5 ms, flightlessmango/MangoHud#2104) and holds the driver's lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A whole GPU, or a MIG instance with its id; `handle` is valid until NVML is shut down or the GPU is lost."""

    index: int
    uuid: str
    name: str
    gpu_uuid: str
    gpu_instance: int | None = None
    handle: Handle = field(repr=False, compare=False)


class GpuFaults(Struct, frozen=True, kw_only=True):
    """The memory faults of the GPU at an NVML index; None where unknown, as with MIG instances on it.

    `ecc`: whether ECC is on now, and after the next reset. `row_remap_failed` stays True for good.
    """

    index: int
    ecc: tuple[bool, bool] | None = None
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    page_retirement_pending: bool | None = None


class Session:
    """Opens NVML, as often as needed; `devices` is empty while it is closed. Its methods run on NVML's thread.

    `memory_version` is NVML's number of memory info v2, None for v1. `is_alone`: there is only one GPU, as on machines
    whose GPU uses the machine's memory, read from `proc`. `peaks` (by the UUID of a GPU or MIG instance) and `xids` are
    kept when NVML is opened again.
    """

    def __init__(
        self, *, monotonic: Callable[[], float], process_interval_seconds: float, proc: Path
    ) -> None:
        self.monotonic = monotonic
        self.process_interval_seconds = process_interval_seconds
        self.proc = proc
        self.devices: tuple[NvmlDevice, ...] = ()
        self.driver_version: str | None = None
        self.memory_version: int | None = None
        self.is_alone = False
        self.xids = Xids()
        self.peaks: defaultdict[str, Peak] = defaultdict(Peak)
        self._refusals: dict[tuple[str, str], int | None] = {}
        """The code of the first refusal by UUID and fact, None where the fact was provided once."""
        self._is_initialised = False
        self._said_v1 = False

    def open(self) -> Failure | None:
        """Initialise NVML, after a shutdown if needed, and find the GPUs; return why that failed."""
        self.close()
        try:
            pynvml.nvmlInit()
            self._is_initialised = True
            count = pynvml.nvmlDeviceGetCount()
            self._refusals = {}
            self.driver_version = self.ask("", "driver version", pynvml.nvmlSystemGetDriverVersion)
        except pynvml.NVMLError as error:
            return explain_source(error.value)
        # Once per init, for all GPUs: in v1, used contains reserved, and the two must not be mixed.
        has_v2 = hasattr(pynvml.nvmlLib, "nvmlDeviceGetMemoryInfo_v2")
        self.memory_version = int(pynvml.nvmlMemory_v2) if has_v2 else None
        if not has_v2 and not self._said_v1:
            self._said_v1 = True
            log.warning(
                "this driver has no memory info v2: used memory contains what the driver reserves"
            )
        for uuid in [
            uuid
            for uuid, peak in self.peaks.items()
            if peak.highest_bytes(self.monotonic()) is None
        ]:
            del self.peaks[uuid]
        self.xids.begin()
        self.is_alone = count == 1
        self.devices = tuple(NvmlDevice(index, self) for index in range(count))
        return None if count else explain_source(Reason.NO_DEVICES)

    def close(self) -> None:
        """Shut NVML down if it was initialised; its handles become invalid."""
        self.devices = ()
        if self._is_initialised:
            self._is_initialised = False
            self.xids.end()
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def ask(
        self,
        uuid: str,
        fact: str,
        call: Callable[..., T],
        *arguments: object,
        essential: bool = False,
    ) -> T | None:
        """Return what `call` returns, None where the device does not provide it or its text is not UTF-8.

        Raises NVMLError when the device or the driver fails. NVML's "unknown error" was seen on healthy devices and
        fails the device only where the fact is `essential`; such a fact is requested again after any error.
        """
        if not essential and self._refusals.get((uuid, fact)) is not None:
            return None
        try:
            value = call(*arguments)
        except UnicodeDecodeError:
            return None
        except pynvml.NVMLError as error:
            if error.value in LOST | DRIVER_WIDE or (essential and error.value in BLOCKED):
                raise
            if error.value in NEVER_ANSWERED:
                self._refusals.setdefault((uuid, fact), error.value)
            return None
        self._refusals[uuid, fact] = None
        return value

    def forget(self, uuid: str) -> None:
        """Forget the answers of a device that is gone."""
        self._refusals = {key: code for key, code in self._refusals.items() if key[0] != uuid}

    def is_unsupported(self, uuid: str, fact: str) -> bool:
        """Return whether the device reported this fact as not supported and never provided it."""
        return bool(self._refusals.get((uuid, fact)) == pynvml.NVML_ERROR_NOT_SUPPORTED)


class NvmlDevice:
    """A GPU at one NVML index from init to shutdown, opened when it is first read.

    Its methods run on NVML's thread and raise NVMLError where the whole GPU, or the driver, fails; after the error of a
    lost GPU, `lost_code` is set and no method may be called again.
    """

    def __init__(self, index: int, session: Session) -> None:
        self.index = index
        self.gpu: Part | None = None
        self.parts: tuple[Part, ...] = ()
        self.lost_code: int | None = None
        self._session = session
        self._lists: dict[str, tuple[float, int | None, tuple[GpuProcess, ...] | None]] = {}

    def answer(self, question: "Callable[[NvmlDevice], T]") -> T:
        """Return the answer of a method of this device."""
        try:
            return question(self)
        except pynvml.NVMLError as error:
            if error.value in LOST:
                self.lost_code = error.value
            raise

    def read(self) -> tuple[GpuReading, ...]:
        """Return a full reading of the GPU, or of each of its MIG instances."""
        gpu = self.gpu or self._open()
        before, self.parts = self.parts, tuple(self._list_instances(gpu)) or (gpu,)
        for uuid in {part.uuid for part in before} - {
            part.uuid for part in self.parts
        }:  # MIG instances removed
            self._session.forget(uuid)
            self._session.peaks.pop(uuid, None)
            self._lists.pop(uuid, None)
        return tuple(self._read_part(part) for part in self.parts)

    def sample_used(self) -> dict[str, int]:
        """Return the memory in use by UUID, and add it to its peak."""
        seen = {part.uuid: self._memory(part) for part in self.parts}
        return {uuid: memory.used_bytes for uuid, memory in seen.items() if memory is not None}

    def faults(self) -> GpuFaults:
        """Return the faults in the memory of the whole GPU."""
        gpu = self.gpu or self._open()
        ecc = self._ask(gpu, "ECC mode", pynvml.nvmlDeviceGetEccMode)
        rows = self._ask(gpu, "row remapping", pynvml.nvmlDeviceGetRemappedRows)
        pages = self._ask(gpu, "page retirement", pynvml.nvmlDeviceGetRetiredPagesPendingStatus)
        return GpuFaults(
            index=gpu.index,
            ecc=None if ecc is None else (bool(ecc[0]), bool(ecc[1])),
            row_remap_pending=None if rows is None else bool(rows[2]),
            row_remap_failed=None if rows is None else bool(rows[3]),
            page_retirement_pending=None if pages is None else bool(pages),
        )

    def _open(self) -> Part:
        ask = self._session.ask
        handle = pynvml.nvmlDeviceGetHandleByIndex(self.index)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        name = ask(uuid, "name", pynvml.nvmlDeviceGetName, handle) or ""
        ask(uuid, "XID events", self._session.xids.listen, handle, uuid)
        self.gpu = Part(index=self.index, uuid=uuid, name=name, gpu_uuid=uuid, handle=handle)
        return self.gpu

    def _list_instances(self, gpu: Part) -> Iterator[Part]:
        """Yield the MIG instances visible at this moment."""
        mode = self._ask(gpu, "MIG mode", pynvml.nvmlDeviceGetMigMode)
        if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return
        for position in range(
            self._ask(gpu, "MIG devices", pynvml.nvmlDeviceGetMaxMigDeviceCount) or 0
        ):
            handle = self._ask(
                gpu, f"MIG device {position}", pynvml.nvmlDeviceGetMigDeviceHandleByIndex, position
            )
            instance = None if handle is None else replace(gpu, handle=handle)
            uuid = (
                None
                if instance is None
                else self._ask(instance, "MIG UUID", pynvml.nvmlDeviceGetUUID)
            )
            if instance is not None and uuid is not None:
                instance = replace(instance, uuid=uuid)
                name = self._ask(instance, "name", pynvml.nvmlDeviceGetName) or gpu.name
                number = self._ask(instance, "GPU instance", pynvml.nvmlDeviceGetGpuInstanceId)
                yield replace(instance, name=name, gpu_instance=number)

    def _read_part(self, part: Part) -> GpuReading:
        memory = self._memory(part)
        utilization = self._ask(part, "utilization", pynvml.nvmlDeviceGetUtilizationRates)
        temperature = self._ask(
            part, "temperature", pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU
        )
        power_milliwatts = self._ask(part, "power", pynvml.nvmlDeviceGetPowerUsage)
        return GpuReading(
            index=part.index,
            uuid=part.uuid,
            name=part.name,
            memory=memory,
            used_peak_bytes=self._session.peaks[part.uuid].highest_bytes(self._session.monotonic()),
            utilization_ratio=_scale(None if utilization is None else utilization.gpu, 100, 100),
            temperature_celsius=_scale(temperature, MOST_CELSIUS, 1),
            power_watts=_scale(power_milliwatts, MOST_MILLIWATTS, 1000),
            processes=self._processes(part, memory),
            xid_errors=self._session.xids.counts(part.gpu_uuid, part.gpu_instance),
        )

    def _memory(self, part: Part) -> GpuMemory | None:
        session = self._session
        info = self._ask(
            part, "memory", pynvml.nvmlDeviceGetMemoryInfo, session.memory_version, essential=True
        )
        if info is None:
            unified = session.is_alone and session.is_unsupported(part.uuid, "memory")
            return self._read_unified(part) if unified else None
        if max(info.used, info.free) > info.total or info.total > MOST_BYTES:
            return None  # a sharing library below zero (Project-HAMi/HAMi-core#200): neither value is reliable
        session.peaks[part.uuid].add(session.monotonic(), info.used)
        reserved = (
            None if session.memory_version is None or info.reserved > info.total else info.reserved
        )
        return GpuMemory(
            total_bytes=info.total,
            used_bytes=info.used,
            free_bytes=info.free,
            reserved_bytes=reserved,
        )

    def _read_unified(self, part: Part) -> GpuMemory | None:
        """Return the machine's memory, which such a GPU uses; vLLM reads it from the kernel too (mem_utils.py)."""
        machine = read_machine(self._session.proc)
        if machine is None:
            return None
        used_bytes = machine.total_bytes - machine.available_bytes
        self._session.peaks[part.uuid].add(self._session.monotonic(), used_bytes)
        return GpuMemory(
            total_bytes=machine.total_bytes,
            used_bytes=used_bytes,
            free_bytes=machine.available_bytes,
            reserved_bytes=None,
            machine_available_bytes=machine.available_bytes,
            machine_free_blocks_bytes=read_free_blocks(self._session.proc),
        )

    def _processes(self, part: Part, memory: GpuMemory | None) -> tuple[GpuProcess, ...] | None:
        """Return the last list of processes, or a new one if it is old or no longer matches the memory in use."""
        now, used_bytes = self._session.monotonic(), None if memory is None else memory.used_bytes
        listed_at, used_then_bytes, listed = self._lists.get(part.uuid, (-inf, None, None))
        change_bytes = (
            0
            if used_bytes is None or used_then_bytes is None
            else abs(used_bytes - used_then_bytes)
        )
        matches = change_bytes < CHANGE_BYTES or now - listed_at < LEAST_AGE_SECONDS
        if (
            listed is None
            or now - listed_at >= self._session.process_interval_seconds
            or not matches
        ):
            compute, mps = (
                f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in ("Compute", "MPSCompute")
            )
            is_essential = memory is None or memory.is_unified
            listed = self._ask(part, "processes", _list_processes, compute, essential=is_essential)
            if listed:
                pids = {process.pid for process in listed}
                clients = self._ask(part, "MPS clients", _list_processes, mps) or ()
                listed = (*listed, *(client for client in clients if client.pid not in pids))
            self._lists[part.uuid] = now, used_bytes, listed
        return listed

    def _ask(
        self,
        part: Part,
        fact: str,
        call: Callable[..., T],
        *arguments: object,
        essential: bool = False,
    ) -> T | None:
        return self._session.ask(
            part.uuid, fact, call, part.handle, *arguments, essential=essential
        )


def _list_processes(handle: Handle, function: str) -> tuple[GpuProcess, ...]:
    # By name and version: for a missing function without its version pynvml raises another class of error.
    listed = getattr(pynvml, function)(handle)
    known = ((each.pid, each.usedGpuMemory) for each in listed)
    return tuple(
        GpuProcess(pid=pid, used_bytes=None if (used or 0) > MOST_BYTES else used)
        for pid, used in known
    )


def _scale(value: int | None, most: int, divisor: int) -> float | None:
    """Return a value in our unit; None above `most`, which no GPU reaches."""
    return None if value is None or value > most else value / divisor
