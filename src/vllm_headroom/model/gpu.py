"""The GPUs' data: readings from the driver and the probe, and attribution."""

import re
from enum import Enum, StrEnum
from typing import Final

from msgspec import Struct

from vllm_headroom.model.engine import HostReading
from vllm_headroom.model.peaks import PeakReadings, StepAtError
from vllm_headroom.vocabulary import Attribution, MemoryPart, Reason, Role, Source


class Failure(Struct, frozen=True, kw_only=True):
    """A failed reading; `message` is one sentence that states what the operator can do."""

    source: Source
    reason: Reason
    message: str
    http_status: int | None = None
    """The HTTP status of the response, if this status caused the failure."""


class ReadingTime(Struct, frozen=True, kw_only=True):
    """When the reading of a source ended, and how long it took.

    The end is on the monotonic clock.
    """

    source: Source
    seconds: float
    ended_monotonic_seconds: float


class AllocatorReading(Struct, frozen=True, kw_only=True):
    """Figures of torch's allocator in one process on one device.

    A figure is None if unknown.
    """

    uuid: str
    total_bytes: int | None = None
    """The device's memory as the process sees it. A layer between the process and the driver may
    reduce it.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    inactive_split_bytes: int | None = None
    """Unused memory that cannot be freed, because another part of its segment is in use."""

    retries: int | None = None
    """The number of allocations that have been retried since the process started."""

    ooms: int | None = None
    """The number of OutOfMemoryErrors that have been raised since the process started."""


class WorkerMeasurements(Struct, frozen=True, kw_only=True):
    """vLLM's own measurements in a worker; a figure is None if unknown."""

    weights_bytes: int | None = None
    """The size of the weights, as measured when they were loaded."""

    kv_cache_bytes: int | None = None
    """The size of the KV cache's tensors."""

    cuda_graphs_bytes: int | None = None
    """The memory used by CUDA graphs, as measured when they were captured."""

    activation_peak_bytes: int | None = None
    """The peak of activations, as measured by vLLM's profile run on startup."""

    requested_bytes: int | None = None
    """The memory that the engine may use, which is its budget."""

    asleep: bool | None = None
    pool: "WorkerMeasurements | None" = None
    """The weights and KV cache in vLLM's own memory pool, or None without a pool. In an engine that
    can sleep, the pool replaces torch's allocator.
    """


class SchedulerReading(Struct, frozen=True, kw_only=True):
    """Figures of an engine core's scheduler; a figure is None if unknown."""

    steps_total: int | None = None
    max_num_seqs: int | None = None
    kv_stranded_ratio: float | None = None
    """The share of the KV cache that is in use without a request."""

    kv_token_ratio: float | None = None
    """The share of the KV cache that holds tokens of requests."""


class OomRecord(Struct, frozen=True, kw_only=True):
    """The newest OutOfMemoryError of a process, with torch's figures at that time."""

    at_seconds: float
    """When the error was raised, in seconds since the epoch."""

    uuid: str | None = None
    asked_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    seen: int | None = None
    """The number of errors raised by the process. The field has the same name in the probe's file.
    """

    step: StepAtError | None = None
    """The step that raised the error. It is None without a step or without HEADROOM_PROBE_PEAKS."""


class LineHolding(Struct, frozen=True, kw_only=True):
    """The memory held by one line of code in torch's allocator."""

    file: str | None
    """The last part of the file's path. It is None for memory allocated before torch began its
    history.
    """
    line: int | None
    size_bytes: int
    n_blocks: int | None = None
    since_seconds: float | None = None
    """When the line's oldest block was allocated, in seconds since the epoch. The time is None if
    the allocation is no longer in the history.
    """


class AllocatorSnapshot(Struct, frozen=True, kw_only=True):
    """A snapshot of torch's allocator that a process wrote or failed to write."""

    at_seconds: float
    """When the snapshot was taken, in seconds since the epoch."""
    file: str
    """The path of the snapshot file in vLLM's container."""
    size_bytes: int | None = None
    pause_seconds: float | None = None
    """How long the process paused while it wrote the snapshot."""
    request_id: str | None = None
    problem: str | None = None
    """Why the file was not written, or None if it was written."""
    largest: tuple[LineHolding, ...] = ()
    """The lines of code that held the most memory, the largest first."""


class AllocatorHistory(Struct, frozen=True, kw_only=True):
    """The memory history that torch keeps in a process, and the snapshots taken of it."""

    from_seconds: float
    """When torch started to keep the history, in seconds since the epoch."""
    oom: AllocatorSnapshot | None = None
    """The snapshot of the process's first OutOfMemoryError."""
    requested: AllocatorSnapshot | None = None
    """The newest snapshot requested by a command."""


class ProbedProcess(Struct, frozen=True, kw_only=True):
    """The newest probe file of one process. Times are in seconds since the epoch."""

    pid: int
    """The pid of the process in its own PID namespace."""

    started_at_seconds: float
    since_boot_seconds: float | None = None
    """When the process started, in seconds since boot."""

    written_at_seconds: float
    interval_seconds: float
    """The interval at which the file is written."""
    role: Role
    stopped: str | None = None
    """Why the process's probe stopped permanently, or None while it is running."""

    data_parallel_rank: int | None = None
    vllm_version: str | None = None
    devices: tuple[AllocatorReading, ...] = ()
    parts: WorkerMeasurements | None = None
    scheduler: SchedulerReading | None = None
    host: HostReading | None = None
    pinned_bytes: int | None = None
    """The host memory that torch has pinned for CUDA."""

    oom: OomRecord | None = None
    peaks: PeakReadings | None = None
    """The peaks of the process's steps, or None if HEADROOM_PROBE_PEAKS is not set."""
    history: AllocatorHistory | None = None
    """The memory history, or None if torch does not keep one. For example, HEADROOM_PROBE_SNAPSHOT
    may not be set.
    """


class ProbeReadings(Struct, frozen=True, kw_only=True):
    """The newest files of all processes with a probe."""

    present: tuple[ProbedProcess, ...] = ()
    """The processes of this run whose probe is writing."""

    silent: tuple[ProbedProcess, ...] = ()
    """The processes of this run that are still running but whose probe no longer writes."""

    others: tuple[ProbedProcess, ...] = ()
    """All other processes, as described by their last files. Most of them have exited."""

    @property
    def processes(self) -> tuple[ProbedProcess, ...]:
        """Return all processes that have a file, including exited ones."""
        return self.present + self.silent + self.others

    @property
    def has_silent_core(self) -> bool:
        """Return whether a running engine core's probe is silent while another probe is writing.

        If no probe is writing, the cause may be the probes' folder. In that case, the result is
        False.
        """
        return bool(self.present) and any(process.scheduler for process in self.silent)


class Inside(Struct, frozen=True, kw_only=True):
    """What the engine reports about one GPU: torch's allocator and a breakdown of its memory."""

    granted_bytes: int | None = None
    """The device's memory as the engine's processes see it."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    parts: tuple[tuple[MemoryPart, int], ...] = ()
    """The sizes of the known parts; unknown parts are omitted."""


_PART: Final = re.compile(
    r"(MIG-.{1,8}).*|(?:GPU-[0-9a-f]+|PCI-[0-9a-f:.]+)-([0-9]+)", re.IGNORECASE
)
"""Matches the UUID of a part of a GPU. One group is the beginning of a MIG instance's UUID. The
other group is the number of an AMD card's partition.
"""


class Vendor(Enum):
    """The vendor of a GPU's driver."""

    NVIDIA = "nvidia"
    AMD = "amd"


class GpuMemory(Struct, frozen=True, kw_only=True):
    """The memory of a device, as reported by NVML or by AMD's driver.

    NVML's memory info is v2 or v1.
    """

    total_bytes: int
    used_bytes: int
    """The memory that processes use. With v1 and on AMD cards, it also includes the reserved
    memory.
    """

    free_bytes: int
    reserved_bytes: int | None
    """The memory reserved by driver and firmware. It is None with v1 and on AMD cards."""

    machine_available_bytes: int | None = None
    """The machine's available memory, which the GPU shares with everything else. None for a GPU
    that does not use the machine's memory.
    """

    machine_free_blocks_bytes: int | None = None
    """How much of the machine's memory is free in blocks of at least 2 MiB. The value is None if
    unknown or if the GPU has its own memory.
    """

    @property
    def usable_bytes(self) -> int:
        """Return the GPU's total memory as CUDA reports it.

        The result is NVML's total minus the driver's reserve. A share of the result is vLLM's
        budget. For example, one GPU had 95.59 GiB in NVML and 94.97 GiB in CUDA
        (ollama/ollama#18201). If the reserve is unknown, this is NVML's total.
        """
        return self.total_bytes - (self.reserved_bytes or 0)

    @property
    def left_bytes(self) -> int:
        """Return the part of `usable_bytes` that is not in use."""
        return self.usable_bytes - self.used_bytes

    @property
    def is_unified(self) -> bool:
        """Return whether the GPU shares the machine's memory with all programs."""
        return self.machine_available_bytes is not None


class GpuProcess(Struct, frozen=True, kw_only=True):
    """A compute process on a GPU.

    `used_bytes` is None if the driver does not report it.
    """

    pid: int
    used_bytes: int | None


def find_part(uuid: str) -> str:
    """Return the short name of this GPU part, or "" for a whole GPU.

    The short name of a MIG instance is the beginning of its UUID. For an AMD partition, it is
    "partition" and the partition's number. The short name distinguishes the parts of a GPU, which
    all have one index.
    """
    part = _PART.fullmatch(uuid)
    if part is None:
        return ""
    return part[1] or f"partition {part[2]}"


def name_device(index: int | str, uuid: str) -> str:
    """Return a device's name for use in a sentence, such as "GPU 0 MIG-12345678"."""
    return f"GPU {index} {find_part(uuid)}".rstrip()


class Fate(StrEnum):
    """The fate of a process that holds GPU memory after its engine has exited."""

    ORPHANED = "orphaned"
    """The process is still running even though its engine has exited."""
    ZOMBIE = "zombie"
    """The process has exited but has not been reaped yet."""
    VANISHED = "vanished"
    """The process has exited, and only the driver still lists it."""


class Leftover(Struct, frozen=True, kw_only=True):
    """GPU memory held by a dead process, or by a process that outlived its engine."""

    pid: int
    fate: Fate
    used_bytes: int | None
    """The bytes that the process holds, or None if not reported reliably."""


class Device(Struct, frozen=True, kw_only=True):
    """A whole GPU or part of one, identified by index and UUID."""

    index: int
    uuid: str

    @property
    def display_name(self) -> str:
        """Return the name of the device for use in a sentence."""
        return name_device(self.index, self.uuid)


class GpuReading(Device, frozen=True, kw_only=True):
    """The reading of a GPU, a MIG instance or an AMD partition.

    A value that the device does not report is None. `index` is NVML's index, and is the same for
    all parts of a GPU. AMD cards are numbered after NVIDIA GPUs.
    """

    name: str
    memory: GpuMemory | None = None
    used_peak_bytes: int | None = None
    utilization_ratio: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    """The processes on the device. Empty if there are none, and None if the list could not be read.
    """

    xid_errors: tuple[tuple[int, int], ...] = ()
    """The XID codes with their counts since the daemon started."""

    failure: Failure | None = None
    """Why the device cannot be read, or None if it was read. If the device cannot be read, only its
    names and `xid_errors` are known.
    """

    vendor: Vendor = Vendor.NVIDIA

    def mark_failed(self, failure: Failure) -> "GpuReading":
        """Return a failed reading of this device, which keeps its names and XID errors."""
        return GpuReading(
            index=self.index,
            uuid=self.uuid,
            name=self.name,
            xid_errors=self.xid_errors,
            vendor=self.vendor,
            failure=failure,
        )


class GpuReadings(Struct, frozen=True, kw_only=True):
    """All visible devices."""

    driver_version: str | None
    """The version of NVIDIA's driver. It is None without an NVIDIA GPU or without a report."""

    devices: tuple[GpuReading, ...]


class Gpu(Struct, frozen=True, kw_only=True):
    """A device and its attribution to the engine."""

    reading: GpuReading
    attribution: Attribution | None
    """Why the device is attributed to the engine, or None if it is not."""

    engine_bytes: int | None = None
    """The memory that the engine's processes hold, or None if they cannot be identified."""

    other_bytes: int | None = None
    """The memory that other processes hold, or None if they cannot be identified."""

    held_bytes: int | None = None
    """The engine's memory: `engine_bytes` if the device's processes can be attributed. If they
    cannot, the value is all used memory that is not known to be other processes'. The value is None
    while the engine's memory is unknown, or on a device that is not the engine's.
    """

    process_count: int | None = None
    """The number of compute processes that the driver lists, or None if unknown."""

    leftovers: tuple[Leftover, ...] = ()
    """The memory of processes that are dead or have outlived their engine."""

    inside: Inside | None = None
    """What the engine's processes report through the probe, or None if there is no report."""

    @property
    def room_bytes(self) -> int | None:
        """Return the memory that is left for the engine, or None if unknown.

        The room is the GPU's free memory. A layer between the engine and the driver may set a
        limit. With such a limit, the room is at most the unused part of the limit.
        """
        if self.reading.memory is None:
            return None
        free_bytes = self.reading.memory.left_bytes
        granted_bytes = None if self.inside is None else self.inside.granted_bytes
        if granted_bytes is None or self.engine_bytes is None:
            return free_bytes
        return min(free_bytes, max(0, granted_bytes - self.engine_bytes))

    @property
    def is_left_out(self) -> bool:
        """Return whether the engine holds memory on this device although HEADROOM_GPUS omits it."""
        return bool(self.engine_bytes) and self.attribution is None and not self.leftovers
