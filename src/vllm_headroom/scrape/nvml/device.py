"""One physical GPU as NVML shows it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pynvml
from msgspec import Struct

from vllm_headroom.model import GpuMemory, GpuProcess, GpuReading
from vllm_headroom.scrape.nvml.calls import Calls, Handle
from vllm_headroom.scrape.nvml.errors import LOST
from vllm_headroom.scrape.nvml.parts import GpuFaults, Part, faults_of, parts, whole_gpu
from vllm_headroom.scrape.nvml.process_list import ProcessList, compute_processes, mps_clients
from vllm_headroom.scrape.nvml.xids import Xids
from vllm_headroom.scrape.peak import Peak
from vllm_headroom.scrape.proc.host import machine_of

T = TypeVar("T")


class Surroundings(Struct, frozen=True, kw_only=True):
    """What the GPUs of one init share; `memory_version` is NVML's number of memory info v2, None for v1.

    `alone` is whether there is but one, as where it works on the machine's memory, which `proc` tells. `peaks` and
    `xids` outlive the init, `peaks` by the UUID of a GPU or MIG instance.
    """

    monotonic: Callable[[], float]
    process_interval_seconds: float
    memory_version: int | None
    calls: Calls
    peaks: defaultdict[str, Peak]
    xids: Xids
    proc: Path
    alone: bool


class Device:
    """A GPU at one NVML index from init to shutdown, opened when it is first read.

    Its methods make NVML calls and belong on NVML's thread. They raise NVMLError where the whole GPU, or the driver,
    fails; after an error that means a lost GPU, `lost_code` is set and no method may be called again.
    """

    def __init__(self, index: int, surroundings: Surroundings) -> None:
        self.index = index
        self.gpu: Part | None = None
        self.parts: tuple[Part, ...] = ()
        self.lost_code: int | None = None
        self._around = surroundings
        self._lists: defaultdict[str, ProcessList] = defaultdict(ProcessList)

    def read(self) -> tuple[GpuReading, ...]:
        """Return a full reading of the GPU, or of each of its MIG instances."""
        try:
            gpu = self.gpu or self._open()
            before, self.parts = self.parts, parts(gpu, self._around.calls)
            for uuid in {part.uuid for part in before} - {part.uuid for part in self.parts}:
                self._forget(uuid)
            return tuple(self._reading(part) for part in self.parts)
        except pynvml.NVMLError as error:
            self._note(error.value)
            raise

    def sample_used(self) -> dict[str, int]:
        """Return nothing but the memory in use, by UUID, and note it for its peak."""
        try:
            seen = {part.uuid: self._memory(part) for part in self.parts}
        except pynvml.NVMLError as error:
            self._note(error.value)
            raise
        return {uuid: memory.used_bytes for uuid, memory in seen.items() if memory is not None}

    def faults(self) -> GpuFaults:
        """Return what the whole GPU says of faults in its memory."""
        try:
            return faults_of(self.gpu or self._open(), self._around.calls)
        except pynvml.NVMLError as error:
            self._note(error.value)
            raise

    def _note(self, code: int) -> None:
        if code in LOST:
            self.lost_code = code

    def _forget(self, uuid: str) -> None:
        """Let go of all that is known of a MIG instance that was removed: the next has a UUID of its own."""
        self._around.calls.forget(uuid)
        self._around.peaks.pop(uuid, None)
        self._lists.pop(uuid, None)

    def _open(self) -> Part:
        around = self._around
        gpu = whole_gpu(self.index, around.calls)
        around.calls.ask(gpu.uuid, "XID events", lambda: around.xids.listen(gpu.handle, gpu.uuid))
        self.gpu = gpu
        return gpu

    def _reading(self, part: Part) -> GpuReading:
        memory = self._memory(part)
        utilization = self._ask(part, "utilization", pynvml.nvmlDeviceGetUtilizationRates)
        temperature = self._ask(part, "temperature", _temperature)
        power_milliwatts = self._ask(part, "power", pynvml.nvmlDeviceGetPowerUsage)
        processes = self._processes(part, memory)
        return GpuReading(
            index=part.index,
            uuid=part.uuid,
            name=part.name,
            memory=memory,
            used_peak_bytes=self._around.peaks[part.uuid].highest_bytes(self._around.monotonic()),
            utilization_ratio=None if utilization is None else utilization.gpu / 100,
            temperature_celsius=temperature,
            power_watts=None if power_milliwatts is None else power_milliwatts / 1000,
            processes=processes.processes,
            xid_errors=self._around.xids.counts(part.gpu_uuid, part.gpu_instance),
        )

    def _memory(self, part: Part) -> GpuMemory | None:
        version = self._around.memory_version
        info = self._ask(part, "memory", lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle, version), essential=True)
        if info is None:
            unified = self._around.alone and self._around.calls.is_unsupported(part.uuid, "memory")
            return self._unified(part) if unified else None
        if max(info.used, info.free) > info.total:
            return None  # a sharing library that fell below zero (Project-HAMi/HAMi-core#200): neither can be believed
        self._around.peaks[part.uuid].add(self._around.monotonic(), info.used)
        reserved_bytes = None if version is None else info.reserved
        return GpuMemory(
            total_bytes=info.total, used_bytes=info.used, free_bytes=info.free, reserved_bytes=reserved_bytes
        )

    def _unified(self, part: Part) -> GpuMemory | None:
        """Return the machine's memory, which such a GPU works on; vLLM, too, asks the kernel there (mem_utils.py)."""
        machine = machine_of(self._around.proc)
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
        )

    def _processes(self, part: Part, memory: GpuMemory | None) -> ProcessList:
        known, now = self._lists[part.uuid], self._around.monotonic()
        used_bytes = None if memory is None else memory.used_bytes
        if not known.is_fresh(now, used_bytes, self._around.process_interval_seconds):
            listed = self._ask(part, "processes", compute_processes, essential=memory is None or memory.unified)
            known.renew(now, used_bytes, listed and self._with_clients(part, listed))
        return known

    def _with_clients(self, part: Part, listed: tuple[GpuProcess, ...]) -> tuple[GpuProcess, ...]:
        """Return the processes with those of MPS, each once; without a process there is no server of MPS either."""
        clients = self._ask(part, "MPS clients", mps_clients) or ()
        pids = {process.pid for process in listed}
        return *listed, *(client for client in clients if client.pid not in pids)

    def _ask(self, part: Part, fact: str, call: Callable[[Handle], T], *, essential: bool = False) -> T | None:
        return self._around.calls.ask(part.uuid, fact, lambda: call(part.handle), essential=essential)


def _temperature(handle: Handle) -> float:
    return float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
