"""Read one physical GPU from NVML."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import pynvml
from msgspec import Struct

from vllm_headroom.model import Failure, GpuMemory, GpuProcess, GpuReading
from vllm_headroom.scrape.gpu_state import Peak
from vllm_headroom.scrape.nvml.calls import LOST, Calls, Handle, Xids
from vllm_headroom.scrape.proc.host import read_free_blocks, read_machine

CHANGE_BYTES: Final = 2 * 2**20
"""A device's memory is allocated in pieces of 2 MiB: less is no change."""

MOST_BYTES: Final = 2**41
"""Two TiB, several times the largest GPU: a driver that fails has answered 2^64 - 1."""

MOST_CELSIUS: Final = 200
MOST_MILLIWATTS: Final = 10_000_000
"""A GPU of 2026 takes 1,400 W, and switches off above 110 C; 2^32 - 1 is no reading."""

LEAST_AGE_SECONDS: Final = 1.0
"""A list costs 400 times what memory info does (4.5 ms, flightlessmango/MangoHud#2104) and holds the driver's lock."""


class ProcessList:
    """The last list of processes, and the memory in use at that time."""

    def __init__(self) -> None:
        self.processes: tuple[GpuProcess, ...] | None = None
        self._listed_at = 0.0
        self._used_bytes: int | None = None

    def is_fresh(self, now: float, used_bytes: int | None, interval_seconds: float) -> bool:
        """Return whether the list still matches the memory now in use (None where that is unknown)."""
        age_seconds = now - self._listed_at
        if self.processes is None or age_seconds >= interval_seconds:
            return False
        if used_bytes is None or self._used_bytes is None or age_seconds < LEAST_AGE_SECONDS:
            return True
        return abs(used_bytes - self._used_bytes) < CHANGE_BYTES

    def renew(self, now: float, used_bytes: int | None, processes: tuple[GpuProcess, ...] | None) -> None:
        """Set a new list, None where it could not be read."""
        self.processes, self._listed_at, self._used_bytes = processes, now, used_bytes


def _list_processes(function: str, handle: Handle) -> tuple[GpuProcess, ...]:
    # By name and version: for a missing function without its version pynvml raises another class of error.
    listed = getattr(pynvml, function)(handle)
    known = ((each.pid, each.usedGpuMemory) for each in listed)
    return tuple(GpuProcess(pid=pid, used_bytes=None if (used or 0) > MOST_BYTES else used) for pid, used in known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A whole GPU, or a MIG instance with its id; `handle` is valid until NVML is shut down or the GPU is lost."""

    index: int
    uuid: str
    name: str
    gpu_uuid: str
    gpu_instance: int | None = None
    handle: Handle = field(repr=False, compare=False)

    def failed(self, failure: Failure, xid_errors: tuple[tuple[int, int], ...]) -> GpuReading:
        """Return a failed reading of this part; XID errors are counted here and stay known."""
        return GpuReading(index=self.index, uuid=self.uuid, name=self.name, xid_errors=xid_errors, failure=failure)


def open_gpu(index: int, calls: Calls) -> Part:
    """Open the GPU at an NVML index; raise NVMLError where it cannot be opened."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    name = calls.ask(uuid, "name", lambda: pynvml.nvmlDeviceGetName(handle)) or ""
    return Part(index=index, uuid=uuid, name=name, gpu_uuid=uuid, handle=handle)


def list_parts(gpu: Part, calls: Calls) -> tuple[Part, ...]:
    """Return the MIG instances visible at this moment, or the GPU itself where there are none."""
    mode = calls.ask(gpu.uuid, "MIG mode", lambda: pynvml.nvmlDeviceGetMigMode(gpu.handle))
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return (gpu,)
    count = calls.ask(gpu.uuid, "MIG devices", lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu.handle)) or 0
    instances = (_open_instance(gpu, position, calls) for position in range(count))
    return tuple(instance for instance in instances if instance is not None) or (gpu,)


def _open_instance(gpu: Part, position: int, calls: Calls) -> Part | None:
    handle = calls.ask(
        gpu.uuid, f"MIG device {position}", lambda: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, position)
    )
    if handle is None:
        return None
    uuid = calls.ask(gpu.uuid, "MIG UUID", lambda: pynvml.nvmlDeviceGetUUID(handle))
    if uuid is None:
        return None
    return Part(
        index=gpu.index,
        uuid=uuid,
        name=calls.ask(uuid, "name", lambda: pynvml.nvmlDeviceGetName(handle)) or gpu.name,
        gpu_uuid=gpu.uuid,
        gpu_instance=calls.ask(uuid, "GPU instance", lambda: pynvml.nvmlDeviceGetGpuInstanceId(handle)),
        handle=handle,
    )


class GpuFaults(Struct, frozen=True, kw_only=True):
    """The memory faults of the GPU at an NVML index; None where unknown, as with MIG instances on it.

    `ecc`: whether ECC is on now, and after the next reset. `row_remap_failed` stays True for good.
    """

    index: int
    ecc: tuple[bool, bool] | None = None
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    page_retirement_pending: bool | None = None


T = TypeVar("T")


def _scale(value: int | None, most: int, divisor: int) -> float | None:
    """Return a value in our unit; None above `most`, which no GPU reaches."""
    return None if value is None or value > most else value / divisor


class DriverContext(Struct, frozen=True, kw_only=True):
    """What the GPUs of one init share; `memory_version` is NVML's number of memory info v2, None for v1.

    `alone`: there is only one GPU, as on machines whose GPU uses the machine's memory, read from `proc`. `peaks` (by
    the UUID of a GPU or MIG instance) and `xids` are kept across inits.
    """

    monotonic: Callable[[], float]
    process_interval_seconds: float
    memory_version: int | None
    calls: Calls
    peaks: defaultdict[str, Peak]
    xids: Xids
    proc: Path
    alone: bool


class NvmlDevice:
    """A GPU at one NVML index from init to shutdown, opened when it is first read.

    Its methods run on NVML's thread and raise NVMLError where the whole GPU, or the driver, fails; after the error of a
    lost GPU, `lost_code` is set and no method may be called again.
    """

    def __init__(self, index: int, surroundings: DriverContext) -> None:
        self.index = index
        self.gpu: Part | None = None
        self.parts: tuple[Part, ...] = ()
        self.lost_code: int | None = None
        self._around = surroundings
        self._lists: defaultdict[str, ProcessList] = defaultdict(ProcessList)

    def read(self) -> tuple[GpuReading, ...]:
        """Return a full reading of the GPU, or of each of its MIG instances."""
        with self._watch_loss():
            gpu = self.gpu or self._open()
            before, self.parts = self.parts, list_parts(gpu, self._around.calls)
            for uuid in {part.uuid for part in before} - {part.uuid for part in self.parts}:  # MIG instances removed
                self._around.calls.forget(uuid)
                self._around.peaks.pop(uuid, None)
                self._lists.pop(uuid, None)
            return tuple(self._read_part(part) for part in self.parts)

    def sample_used(self) -> dict[str, int]:
        """Return the memory in use by UUID, and add it to its peak."""
        with self._watch_loss():
            seen = {part.uuid: self._memory(part) for part in self.parts}
        return {uuid: memory.used_bytes for uuid, memory in seen.items() if memory is not None}

    def faults(self) -> GpuFaults:
        """Return the faults in the memory of the whole GPU."""
        with self._watch_loss():
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

    @contextmanager
    def _watch_loss(self) -> Iterator[None]:
        try:
            yield
        except pynvml.NVMLError as error:
            if error.value in LOST:
                self.lost_code = error.value
            raise

    def _open(self) -> Part:
        around = self._around
        gpu = open_gpu(self.index, around.calls)
        around.calls.ask(gpu.uuid, "XID events", lambda: around.xids.listen(gpu.handle, gpu.uuid))
        self.gpu = gpu
        return gpu

    def _read_part(self, part: Part) -> GpuReading:
        memory = self._memory(part)
        utilization = self._ask(part, "utilization", pynvml.nvmlDeviceGetUtilizationRates)
        temperature = self._ask(
            part, "temperature", lambda handle: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
        )
        power_milliwatts = self._ask(part, "power", pynvml.nvmlDeviceGetPowerUsage)
        processes = self._processes(part, memory)
        return GpuReading(
            index=part.index,
            uuid=part.uuid,
            name=part.name,
            memory=memory,
            used_peak_bytes=self._around.peaks[part.uuid].highest_bytes(self._around.monotonic()),
            utilization_ratio=_scale(None if utilization is None else utilization.gpu, 100, 100),
            temperature_celsius=_scale(temperature, MOST_CELSIUS, 1),
            power_watts=_scale(power_milliwatts, MOST_MILLIWATTS, 1000),
            processes=processes.processes,
            xid_errors=self._around.xids.counts(part.gpu_uuid, part.gpu_instance),
        )

    def _memory(self, part: Part) -> GpuMemory | None:
        version = self._around.memory_version
        info = self._ask(part, "memory", lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle, version), essential=True)
        if info is None:
            unified = self._around.alone and self._around.calls.is_unsupported(part.uuid, "memory")
            return self._read_unified(part) if unified else None
        if max(info.used, info.free) > info.total or info.total > MOST_BYTES:
            return None  # a sharing library below zero (Project-HAMi/HAMi-core#200): neither value is reliable
        self._around.peaks[part.uuid].add(self._around.monotonic(), info.used)
        reserved_bytes = None if version is None or info.reserved > info.total else info.reserved
        return GpuMemory(
            total_bytes=info.total, used_bytes=info.used, free_bytes=info.free, reserved_bytes=reserved_bytes
        )

    def _read_unified(self, part: Part) -> GpuMemory | None:
        """Return the machine's memory, which such a GPU uses; vLLM reads it from the kernel too (mem_utils.py)."""
        machine = read_machine(self._around.proc)
        if machine is None:
            return None
        used_bytes = machine.total_bytes - machine.available_bytes
        self._around.peaks[part.uuid].add(self._around.monotonic(), used_bytes)
        return GpuMemory(
            total_bytes=machine.total_bytes,
            used_bytes=used_bytes,
            free_bytes=machine.available_bytes,
            reserved_bytes=None,
            machine_available_bytes=machine.available_bytes,
            machine_free_blocks_bytes=read_free_blocks(self._around.proc),
        )

    def _processes(self, part: Part, memory: GpuMemory | None) -> ProcessList:
        known, now = self._lists[part.uuid], self._around.monotonic()
        used_bytes = None if memory is None else memory.used_bytes
        if not known.is_fresh(now, used_bytes, self._around.process_interval_seconds):
            compute = partial(_list_processes, "nvmlDeviceGetComputeRunningProcesses_v3")
            listed = self._ask(part, "processes", compute, essential=memory is None or memory.is_unified)
            known.renew(now, used_bytes, listed and self._add_mps_clients(part, listed))
        return known

    def _add_mps_clients(self, part: Part, listed: tuple[GpuProcess, ...]) -> tuple[GpuProcess, ...]:
        """Return the processes with the clients of MPS, each once."""
        mps = partial(_list_processes, "nvmlDeviceGetMPSComputeRunningProcesses_v3")
        clients = self._ask(part, "MPS clients", mps) or ()
        pids = {process.pid for process in listed}
        return *listed, *(client for client in clients if client.pid not in pids)

    def _ask(self, part: Part, fact: str, call: Callable[[Handle], T], *, essential: bool = False) -> T | None:
        return self._around.calls.ask(part.uuid, fact, lambda: call(part.handle), essential=essential)
