"""Open NVML, and read one physical GPU."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

import pynvml
from msgspec import Struct

from vllm_headroom.log import Log
from vllm_headroom.model import Failure, GpuMemory, GpuProcess, GpuReading
from vllm_headroom.scrape.gpu_state import RecentPeak
from vllm_headroom.scrape.nvml.errors import (
    BLOCKED_CODES,
    DRIVER_WIDE_CODES,
    LOST_CODES,
    explain_source,
)
from vllm_headroom.scrape.nvml.xids import Handle, Xids
from vllm_headroom.scrape.proc.host import read_free_blocks, read_machine
from vllm_headroom.units import MIB
from vllm_headroom.vocabulary import Reason

log = Log(__name__)
T = TypeVar("T")

DeviceFact = tuple[str, str]
"""The key of a fact: a GPU's or MIG instance's UUID, and a name."""

REFUSAL_CODES: Final = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    }
)
"""The error codes after which repeating the call is pointless."""

PAGE_BYTES: Final = 2 * MIB
"""A device's memory is allocated in blocks of this size. Smaller differences are ignored."""

MAX_DEVICE_BYTES: Final = 2**41
"""Two TiB, which is several times the memory of the largest GPU. A failing driver once returned
2^64 - 1.
"""

MAX_CELSIUS: Final = 200
"""A higher temperature is ignored. GPUs shut down above 110 C. A faulty driver may return
2^32 - 1.
"""

MAX_MILLIWATTS: Final = 10_000_000
"""A higher power is ignored. A GPU of 2026 draws up to 1,400 W. A faulty driver may return
2^32 - 1.
"""

MAX_PERCENT: Final = 100

MIN_LIST_AGE_SECONDS: Final = 1.0
"""The minimum time between two process lists. Listing processes holds the driver's lock and takes
4.5 ms. Reading memory info is 400 times faster (flightlessmango/MangoHud#2104).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPart:
    """A whole GPU, or a MIG instance on it."""

    index: int
    uuid: str
    name: str
    gpu_uuid: str
    """The UUID of the whole GPU."""
    gpu_instance: int | None = None
    """NVML's number for the MIG instance, or None for a whole GPU."""
    handle: Handle = field(repr=False, compare=False)
    """The handle is valid until NVML is shut down or the GPU is lost."""


class GpuFaults(Struct, frozen=True, kw_only=True):
    """The memory faults of a GPU.

    A field is None if its value is unknown, as with MIG instances.
    """

    index: int
    """The index of the GPU in NVML."""
    ecc: tuple[bool, bool] | None = None
    """Whether error correction (ECC) is enabled now and after the next reset."""
    row_remap_pending: bool | None = None
    """Whether rows will be remapped at the next reset."""
    row_remap_failed: bool | None = None
    """Whether a row remapping has ever failed. Once True, it stays True."""
    page_retirement_pending: bool | None = None
    """Whether pages will be retired at the next reset."""
    unlinked_indices: tuple[int, ...] | None = None
    """The indices of the other GPUs that are not connected to this GPU by NVLink."""


class ProcessList(Struct, frozen=True, kw_only=True):
    """The processes on a GPU or MIG instance, and the memory in use when they were listed."""

    listed_at_seconds: float
    """When the processes were listed, on the monotonic clock."""
    used_bytes: int | None
    """The memory in use, or None if unknown."""
    processes: tuple[GpuProcess, ...] | None


class Session:
    """Initialises NVML, and reinitialises it if needed.

    Its methods run on NVML's thread.
    """

    def __init__(
        self, *, monotonic: Callable[[], float], process_interval_seconds: float, proc: Path
    ) -> None:
        self.monotonic = monotonic
        self.process_interval_seconds = process_interval_seconds
        self.proc = proc
        self.devices: tuple[NvmlDevice, ...] = ()
        """The devices, or none while NVML is closed."""
        self.driver_version: str | None = None
        self.memory_version: int | None = None
        """NVML's number for version 2 of memory info, or None for version 1."""
        self.has_single_gpu = False
        """Whether the machine has exactly one GPU. Every machine whose GPU uses the machine's
        memory has exactly one.
        """
        self.xids = Xids()
        self.peaks: defaultdict[str, RecentPeak] = defaultdict(RecentPeak)
        """The peaks by the UUID of a GPU or MIG instance. The peaks are kept when NVML is
        reinitialised.
        """
        self._refusals: dict[DeviceFact, int | None] = {}
        """The NVML error code of the device's first refusal of a fact. None if the device has ever
        provided the fact.
        """
        self._is_initialised = False
        self._has_logged_v1 = False

    def open(self) -> Failure | None:
        """Initialise NVML, shutting it down first if needed, and list its devices.

        Returns None on success, and a Failure otherwise. Finding no GPU also counts as a failure.
        """
        self.close()
        try:
            pynvml.nvmlInit()
            self._is_initialised = True
            gpu_count = pynvml.nvmlDeviceGetCount()
            self._refusals = {}
            self.driver_version = self.query(
                "", "driver version", pynvml.nvmlSystemGetDriverVersion
            )
        except pynvml.NVMLError as error:
            return explain_source(error.value)
        self._choose_memory_version()
        self._drop_old_peaks()
        self.xids.begin()
        self.has_single_gpu = gpu_count == 1
        self.devices = tuple(NvmlDevice(index, self) for index in range(gpu_count))
        return None if gpu_count else explain_source(Reason.NO_DEVICES)

    def _choose_memory_version(self) -> None:
        """Choose the version of memory info for all GPUs, once per init.

        In version 1, used memory includes reserved memory. If the versions alternated, used memory
        would jump.
        """
        has_v2 = hasattr(pynvml.nvmlLib, "nvmlDeviceGetMemoryInfo_v2")
        self.memory_version = int(pynvml.nvmlMemory_v2) if has_v2 else None
        if not has_v2 and not self._has_logged_v1:
            self._has_logged_v1 = True
            log.warning(
                "this driver has no memory info v2: used memory contains what the driver reserves"
            )

    def _drop_old_peaks(self) -> None:
        """Drop the peaks of GPUs and MIG instances without a sample in the last minute."""
        now_seconds = self.monotonic()
        for uuid, peak in tuple(self.peaks.items()):
            if peak.highest_bytes(now_seconds) is None:
                del self.peaks[uuid]

    def close(self) -> None:
        """Shut NVML down if it is initialised.

        The session's handles become invalid.
        """
        self.devices = ()
        if self._is_initialised:
            self._is_initialised = False
            self.xids.end()
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def query(
        self,
        uuid: str,
        fact: str,
        call: Callable[..., T],
        *arguments: object,
        is_essential: bool = False,
    ) -> T | None:
        """Return a fact about the device `uuid` by calling an NVML function.

        Returns None if the device does not provide the fact at the moment. Also returns None if it
        has refused the fact before. After a refusal, only essential facts are queried again.

        Raises NVMLError if the GPU is lost or the driver fails. For an essential fact, "unknown
        error" also raises NVMLError, although healthy devices occasionally return it.
        """
        if not is_essential and self._refusals.get((uuid, fact)) is not None:
            return None
        try:
            value = call(*arguments)
        # pynvml decodes names, and a faulty driver may return invalid ones.
        except UnicodeDecodeError:
            return None
        except pynvml.NVMLError as error:
            is_blocked = is_essential and error.value in BLOCKED_CODES
            if is_blocked or error.value in LOST_CODES | DRIVER_WIDE_CODES:
                raise
            if error.value in REFUSAL_CODES:
                # If the device has provided the fact before, the refusal may be temporary. In that
                # case, the entry stays None.
                self._refusals.setdefault((uuid, fact), error.value)
            return None
        self._refusals[uuid, fact] = None
        return value

    def forget(self, uuid: str) -> None:
        """Forget the refusals and the peak of a removed MIG instance."""
        for device_uuid, fact in tuple(self._refusals):
            if device_uuid == uuid:
                del self._refusals[device_uuid, fact]
        self.peaks.pop(uuid, None)

    def is_unsupported(self, uuid: str, fact: str) -> bool:
        """Return whether the device reported the fact as unsupported and has never provided it."""
        return bool(self._refusals.get((uuid, fact)) == pynvml.NVML_ERROR_NOT_SUPPORTED)


class NvmlDevice:
    """The GPU at an NVML index, from NVML's init until its shutdown.

    The GPU is opened when it is first read. The methods of this class run on NVML's thread. They
    raise NVMLError if the whole GPU or the driver fails. If the error means that the GPU is lost,
    `lost_code` is set. Once `lost_code` is set, no method may be called.
    """

    def __init__(self, index: int, session: Session) -> None:
        """Create a device without opening it; `index` is the GPU's index in NVML."""
        self.index = index
        self.gpu: GpuPart | None = None
        """The whole GPU, or None until the device is opened."""
        self.parts: tuple[GpuPart, ...] = ()
        """The MIG instances at the last reading. If there were none, only the whole GPU. Empty
        before the first reading.
        """
        self.lost_code: int | None = None
        """NVML's error code when the GPU was lost, or None while it is not lost."""
        self._session = session
        self._lists_by_uuid: dict[str, ProcessList] = {}
        """The last process list of each of `parts`."""

    def call(self, method: "Callable[[NvmlDevice], T]") -> T:
        """Call a method of this device, and return its result or raise its error.

        If an error means that the GPU is lost, `lost_code` is set.
        """
        try:
            return method(self)
        except pynvml.NVMLError as error:
            if error.value in LOST_CODES:
                self.lost_code = error.value
            raise

    def read(self) -> tuple[GpuReading, ...]:
        """Return a reading of each MIG instance, or one of the whole GPU."""
        gpu = self.gpu or self._open()
        previous_uuids = {part.uuid for part in self.parts}
        # A GPU in MIG mode is read as its instances. Any other GPU is read as a whole.
        self.parts = tuple(self._list_instances(gpu)) or (gpu,)
        removed_uuids = previous_uuids - {part.uuid for part in self.parts}
        for uuid in removed_uuids:
            self._session.forget(uuid)
            self._lists_by_uuid.pop(uuid, None)
        return tuple(self._read_part(part) for part in self.parts)

    def sample_used(self) -> dict[str, int]:
        """Return the memory in use of each part, keyed by UUID, and update the peaks.

        Parts of the GPU whose memory is unknown are omitted. The result is empty before the first
        reading.
        """
        used_bytes: dict[str, int] = {}
        for part in self.parts:
            memory = self._read_memory(part)
            if memory is not None:
                used_bytes[part.uuid] = memory.used_bytes
        return used_bytes

    def read_faults(self) -> GpuFaults:
        """Return the memory faults of the whole GPU.

        A field is None if its value is unknown.
        """
        gpu = self.gpu or self._open()
        ecc = self._query(gpu, "ECC mode", pynvml.nvmlDeviceGetEccMode)
        rows = self._query(gpu, "row remapping", pynvml.nvmlDeviceGetRemappedRows)
        pages = self._query(gpu, "page retirement", pynvml.nvmlDeviceGetRetiredPagesPendingStatus)
        return GpuFaults(
            index=gpu.index,
            ecc=None if ecc is None else (bool(ecc[0]), bool(ecc[1])),
            # The first two values are the rows remapped for correctable and uncorrectable errors.
            # The last two are whether a remapping is pending or has failed.
            row_remap_pending=None if rows is None else bool(rows[2]),
            row_remap_failed=None if rows is None else bool(rows[3]),
            page_retirement_pending=None if pages is None else bool(pages),
            unlinked_indices=self._list_unlinked(gpu),
        )

    def _list_unlinked(self, gpu: GpuPart) -> tuple[int, ...] | None:
        """Return the indices of open GPUs without an NVLink connection to this one.

        Returns None if the driver does not report the connections.
        """
        unlinked_indices = []
        for other in self._session.devices:
            if other is self or other.gpu is None or other.lost_code is not None:
                continue
            status = self._query(
                gpu,
                f"NVLink to GPU {other.index}",
                pynvml.nvmlDeviceGetP2PStatus,
                other.gpu.handle,
                pynvml.NVML_P2P_CAPS_INDEX_NVLINK,
            )
            if status is None:
                return None
            if status != pynvml.NVML_P2P_STATUS_OK:
                unlinked_indices.append(other.index)
        return tuple(unlinked_indices)

    def _open(self) -> GpuPart:
        """Open the GPU as `gpu`, start counting its XID errors, and return it."""
        query = self._session.query
        # Both calls raise NVMLError if the device cannot be opened.
        handle = pynvml.nvmlDeviceGetHandleByIndex(self.index)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        name = query(uuid, "name", pynvml.nvmlDeviceGetName, handle) or ""
        query(uuid, "XID events", self._session.xids.listen, handle, uuid)
        self.gpu = GpuPart(index=self.index, uuid=uuid, name=name, gpu_uuid=uuid, handle=handle)
        return self.gpu

    def _list_instances(self, gpu: GpuPart) -> Iterator[GpuPart]:
        """Yield the MIG instances visible now.

        Yields none if the GPU is not in MIG mode.
        """
        mode = self._query(gpu, "MIG mode", pynvml.nvmlDeviceGetMigMode)
        # MIG mode is off or not supported, so the whole GPU is the only part.
        if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return
        max_count = self._query(gpu, "MIG devices", pynvml.nvmlDeviceGetMaxMigDeviceCount)
        for position in range(max_count or 0):
            handle = self._query(
                gpu, f"MIG device {position}", pynvml.nvmlDeviceGetMigDeviceHandleByIndex, position
            )
            if handle is None:
                continue
            # The instance's UUID is queried below. Until it is known, refusals are stored under the
            # whole GPU.
            instance = replace(gpu, handle=handle)
            uuid = self._query(instance, "MIG UUID", pynvml.nvmlDeviceGetUUID)
            if uuid is None:
                continue
            instance = replace(instance, uuid=uuid)
            name = self._query(instance, "name", pynvml.nvmlDeviceGetName) or gpu.name
            number = self._query(instance, "GPU instance", pynvml.nvmlDeviceGetGpuInstanceId)
            yield replace(instance, name=name, gpu_instance=number)

    def _read_part(self, part: GpuPart) -> GpuReading:
        """Return a reading of the whole GPU or a MIG instance.

        Facts that the GPU or instance does not provide are None.
        """
        session = self._session
        memory = self._read_memory(part)
        # Each fact is queried separately, so that a refusal affects only one value.
        utilization = self._query(part, "utilization", pynvml.nvmlDeviceGetUtilizationRates)
        utilization_percent = None if utilization is None else utilization.gpu
        celsius = self._query(
            part, "temperature", pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU
        )
        milliwatts = self._query(part, "power", pynvml.nvmlDeviceGetPowerUsage)
        return GpuReading(
            index=part.index,
            uuid=part.uuid,
            name=part.name,
            memory=memory,
            used_peak_bytes=session.peaks[part.uuid].highest_bytes(session.monotonic()),
            utilization_ratio=_convert(utilization_percent, maximum=MAX_PERCENT, divisor=100),
            temperature_celsius=_convert(celsius, maximum=MAX_CELSIUS, divisor=1),
            power_watts=_convert(milliwatts, maximum=MAX_MILLIWATTS, divisor=1000),
            processes=self._read_processes(part, memory),
            xid_errors=session.xids.list_counts(part.gpu_uuid, part.gpu_instance),
        )

    def _read_memory(self, part: GpuPart) -> GpuMemory | None:
        """Return the memory of the whole GPU or a MIG instance, and update the peak.

        If a GPU uses the machine's memory, the memory is read from the kernel. Returns None if NVML
        does not report the memory or reports impossible values.
        """
        session = self._session
        info = self._query(
            part,
            "memory",
            pynvml.nvmlDeviceGetMemoryInfo,
            session.memory_version,
            is_essential=True,
        )
        if info is None:
            is_unsupported = session.is_unsupported(part.uuid, "memory")
            # NVML does not support memory info for a GPU that uses the machine's memory.
            if session.has_single_gpu and is_unsupported:
                return self._read_unified_memory(part)
            return None
        # A GPU-sharing library can report values below zero (Project-HAMi/HAMi-core#200). If any
        # value is below zero, none of the values is reliable.
        is_overflown = max(info.used, info.free) > info.total
        if is_overflown or info.total > MAX_DEVICE_BYTES:
            return None
        session.peaks[part.uuid].add(session.monotonic(), info.used)
        has_reserved = session.memory_version is not None and info.reserved <= info.total
        return GpuMemory(
            total_bytes=info.total,
            used_bytes=info.used,
            free_bytes=info.free,
            reserved_bytes=info.reserved if has_reserved else None,
        )

    def _read_unified_memory(self, part: GpuPart) -> GpuMemory | None:
        """Return the memory of a GPU that uses the machine's memory, and update the peak.

        vLLM also reads this memory from the kernel (mem_utils.py). Returns None if it cannot be
        read from /proc.
        """
        session = self._session
        machine = read_machine(session.proc)
        if machine is None:
            return None
        used_bytes = machine.total_bytes - machine.available_bytes
        session.peaks[part.uuid].add(session.monotonic(), used_bytes)
        return GpuMemory(
            total_bytes=machine.total_bytes,
            used_bytes=used_bytes,
            free_bytes=machine.available_bytes,
            reserved_bytes=None,
            machine_available_bytes=machine.available_bytes,
            machine_free_blocks_bytes=read_free_blocks(session.proc),
        )

    def _read_processes(
        self, part: GpuPart, memory: GpuMemory | None
    ) -> tuple[GpuProcess, ...] | None:
        """Return the processes, and list them again only if the last list is outdated.

        If the last attempt to list them failed, every call tries again. Returns None if the
        processes cannot be listed.
        """
        now_seconds = self._session.monotonic()
        used_bytes = None if memory is None else memory.used_bytes
        previous = self._lists_by_uuid.get(part.uuid)
        if previous is not None and not self._is_outdated(previous, now_seconds, used_bytes):
            return previous.processes
        # If NVML does not report memory, only this call shows whether the GPU still works.
        is_essential = memory is None or memory.is_unified
        processes = self._list_processes(part, is_essential=is_essential)
        self._lists_by_uuid[part.uuid] = ProcessList(
            listed_at_seconds=now_seconds, used_bytes=used_bytes, processes=processes
        )
        return processes

    def _is_outdated(
        self, previous: ProcessList, now_seconds: float, used_bytes: int | None
    ) -> bool:
        """Return whether a list is missing, is old, or contradicts the memory in use.

        A list younger than MIN_LIST_AGE_SECONDS stays valid, because listing is expensive. A list
        of this age stays valid even if the memory in use has changed.
        """
        age_seconds = now_seconds - previous.listed_at_seconds
        if previous.processes is None or age_seconds >= self._session.process_interval_seconds:
            return True
        # The memory in use changes when processes start, exit, allocate or free memory.
        if used_bytes is None or previous.used_bytes is None or age_seconds < MIN_LIST_AGE_SECONDS:
            return False
        return abs(used_bytes - previous.used_bytes) >= PAGE_BYTES

    def _list_processes(
        self, part: GpuPart, *, is_essential: bool
    ) -> tuple[GpuProcess, ...] | None:
        """Return the compute processes and MPS clients, or None if they cannot be listed.

        `is_essential` has the same meaning as in `Session.query`.
        """
        processes = self._query(
            part,
            "processes",
            _call_process_list,
            "nvmlDeviceGetComputeRunningProcesses_v3",
            is_essential=is_essential,
        )
        # MPS clients are listed only if there are compute processes, because each list is
        # expensive.
        if not processes:
            return processes
        clients = self._query(
            part, "MPS clients", _call_process_list, "nvmlDeviceGetMPSComputeRunningProcesses_v3"
        )
        pids = {process.pid for process in processes}
        new_clients = [client for client in clients or () if client.pid not in pids]
        return (*processes, *new_clients)

    def _query(
        self,
        part: GpuPart,
        fact: str,
        call: Callable[..., T],
        *arguments: object,
        is_essential: bool = False,
    ) -> T | None:
        """Return the fact that `call` reads from the part's handle; see `Session.query`.

        Returns None if the driver does not provide the fact.
        """
        return self._session.query(
            part.uuid, fact, call, part.handle, *arguments, is_essential=is_essential
        )


def _call_process_list(handle: Handle, function: str) -> tuple[GpuProcess, ...]:
    """Return the processes that a pynvml function lists.

    `function` is the versioned name of the function. If the driver lacks the function, pynvml
    raises another error for an unversioned name. Raises NVMLError if the call fails.
    """
    processes = []
    for process in getattr(pynvml, function)(handle):
        used_bytes = process.usedGpuMemory
        if used_bytes is not None and used_bytes > MAX_DEVICE_BYTES:
            used_bytes = None
        processes.append(GpuProcess(pid=process.pid, used_bytes=used_bytes))
    return tuple(processes)


def _convert(value: int | None, *, maximum: int, divisor: int) -> float | None:
    """Return a value divided by `divisor`, or None if it is unknown or above `maximum`.

    No GPU reaches `maximum`, so a value above it is a driver error.
    """
    return None if value is None or value > maximum else value / divisor
