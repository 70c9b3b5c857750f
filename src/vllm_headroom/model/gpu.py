"""The GPUs' data: readings of the driver and the probe, and attribution."""

import re
from enum import Enum, StrEnum
from typing import Final

from msgspec import Struct

from vllm_headroom.model.engine import HostReading
from vllm_headroom.vocabulary import Attribution, MemoryPart, Reason, Role, Source


class Failure(Struct, frozen=True, kw_only=True):
    """A failed reading; `message` is one sentence that says what the operator can do."""

    source: Source
    reason: Reason
    message: str


class ReadingTime(Struct, frozen=True, kw_only=True):
    """The end and duration of one source's reading, on the monotonic clock."""

    source: Source
    seconds: float
    ended_monotonic_seconds: float


class AllocatorReading(Struct, frozen=True, kw_only=True):
    """torch's caching allocator on one device; None where unknown."""

    uuid: str
    total_bytes: int | None = None
    """The device's size as the process sees it: less where a layer limits it."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    inactive_split_bytes: int | None = None
    """What is unused but cannot be freed, as the rest of its segment is in use."""

    retries: int | None = None
    """Allocations tried again since the process started."""

    ooms: int | None = None
    """OutOfMemoryErrors since the process started."""


class EngineParts(Struct, frozen=True, kw_only=True):
    """vLLM's own measurements in a worker; None where unknown."""

    weights_bytes: int | None = None
    """Measured when they were loaded."""

    kv_cache_bytes: int | None = None
    """The size of its tensors."""

    cuda_graphs_bytes: int | None = None
    """Measured when they were captured."""

    activation_peak_bytes: int | None = None
    """From profiling."""

    requested_bytes: int | None = None
    """The budget."""

    asleep: bool | None = None
    pool: "EngineParts | None" = None
    """The weights and the KV cache in vLLM's memory pool, which replaces torch's allocator where
    the engine can sleep."""


class SchedulerReading(Struct, frozen=True, kw_only=True):
    """A core's scheduler; None where unknown."""

    steps_total: int | None = None
    max_num_seqs: int | None = None
    kv_stranded_ratio: float | None = None
    """The share of the KV cache that is in use by no request."""

    kv_token_ratio: float | None = None
    """The share of the KV cache that holds a request's token."""


class OomRecord(Struct, frozen=True, kw_only=True):
    """The newest OutOfMemoryError of a process, with torch's figures then."""

    at_seconds: float
    """In seconds since the epoch."""

    uuid: str | None = None
    asked_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    seen: int | None = None
    """How many errors the process has raised; an incident's record has it by this name."""


class ProbedProcess(Struct, frozen=True, kw_only=True):
    """The newest file of one process; times are in seconds since the epoch."""

    pid: int
    """Its pid in its own namespace."""

    started_at_seconds: float
    since_boot_seconds: float | None = None
    """Its start on the boot clock."""

    written_at_seconds: float
    interval_seconds: float
    role: Role
    stopped: str | None = None
    """Why its probe stopped for good."""

    data_parallel_rank: int | None = None
    vllm_version: str | None = None
    devices: tuple[AllocatorReading, ...] = ()
    parts: EngineParts | None = None
    scheduler: SchedulerReading | None = None
    host: HostReading | None = None
    oom: OomRecord | None = None


class ProbeReadings(Struct, frozen=True, kw_only=True):
    """The newest files of all processes with a probe."""

    present: tuple[ProbedProcess, ...] = ()
    """Those of this run that write."""

    silent: tuple[ProbedProcess, ...] = ()
    """Those of this run that are alive and no longer write."""

    others: tuple[ProbedProcess, ...] = ()
    """All others, as they were at the end."""

    @property
    def processes(self) -> tuple[ProbedProcess, ...]:
        """All of them, including exited ones."""
        return self.present + self.silent + self.others

    @property
    def has_silent_core(self) -> bool:
        """Whether the probe in a live core is silent and another writes.

        Without another the folder may be the cause.
        """
        return bool(self.present) and any(process.scheduler for process in self.silent)


class Inside(Struct, frozen=True, kw_only=True):
    """The engine's report on one GPU: torch's allocator, and the ledger of its memory."""

    granted_bytes: int | None = None
    """The device's size as the processes see it."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    parts: tuple[tuple[MemoryPart, int], ...] = ()
    """The sizes of the known parts; unknown ones are left out."""


_PART: Final = re.compile(
    r"(MIG-.{1,8}).*|(?:GPU-[0-9a-f]+|PCI-[0-9a-f:.]+)-([0-9]+)", re.IGNORECASE
)
"""The UUID of a part of a GPU: a MIG instance, or a partition of an AMD card and its number."""


class Vendor(Enum):
    """The vendor of a GPU's driver."""

    NVIDIA = "nvidia"
    AMD = "amd"


class GpuMemory(Struct, frozen=True, kw_only=True):
    """The memory of a device: NVML's memory info v2, or v1, or AMD's."""

    total_bytes: int
    used_bytes: int
    """What any process uses; in v1 and from AMD the reserved memory too."""

    free_bytes: int
    reserved_bytes: int | None
    """What driver and firmware reserve; None in v1 and from AMD."""

    machine_available_bytes: int | None = None
    """Set for a GPU that uses the machine's memory: what the kernel reports as available for the
    GPU and everything else."""

    machine_free_blocks_bytes: int | None = None
    """What of it is free in blocks of 2 MiB and more."""

    @property
    def usable_bytes(self) -> int:
        """The GPU's total in CUDA, of which vLLM takes its share.

        That is NVML's total less the driver's reserve.
        Observed: 95.59 GiB in NVML, 94.97 in CUDA (ollama/ollama#18201). If the reserve is
        unknown this is NVML's total, which errs on the safe side.
        """
        return self.total_bytes - (self.reserved_bytes or 0)

    @property
    def left_bytes(self) -> int:
        """The part of usable_bytes not in use."""
        return self.usable_bytes - self.used_bytes

    @property
    def is_unified(self) -> bool:
        """Whether this is the machine's memory, which everything on the machine uses."""
        return self.machine_available_bytes is not None


class GpuProcess(Struct, frozen=True, kw_only=True):
    """A compute process on a GPU; `used_bytes` is None where the driver does not report it."""

    pid: int
    used_bytes: int | None


def find_part(uuid: str) -> str:
    """Return what identifies a part of a GPU among those of its index; "" for a whole GPU.

    That is the beginning of a MIG instance's UUID, or an AMD partition's number.
    """
    part = _PART.fullmatch(uuid)
    if part is None:
        return ""
    return part[1] or f"partition {part[2]}"


def name_device(index: int | str, uuid: str) -> str:
    """Return the name of a device in a sentence."""
    return f"GPU {index} {find_part(uuid)}".rstrip()


class Fate(StrEnum):
    """What became of a process that holds GPU memory and serves no engine."""

    ORPHANED = "orphaned"
    ZOMBIE = "zombie"
    VANISHED = "vanished"


class Leftover(Struct, frozen=True, kw_only=True):
    """GPU memory of a process that serves no engine."""

    pid: int
    fate: Fate
    used_bytes: int | None
    """None where the driver does not report it."""


class Device(Struct, frozen=True, kw_only=True):
    """A whole GPU or a part of one, by index and UUID."""

    index: int
    uuid: str

    @property
    def display_name(self) -> str:
        """Its name in a sentence."""
        return name_device(self.index, self.uuid)


class GpuReading(Device, frozen=True, kw_only=True):
    """The reading of a whole GPU or a part of one: a MIG instance, or a partition of an AMD card.

    Unsupported values are None. `index` is NVML's; AMD's cards are numbered after NVML's.
    """

    name: str
    memory: GpuMemory | None = None
    used_peak_bytes: int | None = None
    utilization_ratio: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    """None when the list could not be read, unlike an empty list."""

    xid_errors: tuple[tuple[int, int], ...] = ()
    """The XID codes with their counts since the daemon started."""

    failure: Failure | None = None
    """Set if the device cannot be read: then only its names and `xid_errors` are known."""

    vendor: Vendor = Vendor.NVIDIA

    def mark_failed(self, failure: Failure) -> "GpuReading":
        """Return the failed reading of this device.

        It keeps its XID errors, which the daemon counts.
        """
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
    """NVIDIA's, None where its driver does not report it."""

    devices: tuple[GpuReading, ...]


class Gpu(Struct, frozen=True, kw_only=True):
    """A device with its owner."""

    reading: GpuReading
    attribution: Attribution | None
    """How it was assigned to the engine; None if it is not the engine's."""

    engine_bytes: int | None = None
    """What the engine's processes hold; None where the device's processes cannot be
    distinguished."""

    other_bytes: int | None = None
    """What other processes hold; None likewise."""

    held_bytes: int | None = None
    """The engine's memory: `engine_bytes`, or, where that can never be known, all used memory that
    is not known to be others'; None while unknown, and on a device that is not the engine's."""

    process_count: int | None = None
    """NVML's number of compute processes."""

    leftovers: tuple[Leftover, ...] = ()
    """Those of the processes that serve no engine."""

    inside: Inside | None = None
    """The report of the engine's processes."""

    @property
    def is_left_out(self) -> bool:
        """Whether the engine's processes hold memory of it although the list excludes it."""
        return bool(self.engine_bytes) and self.attribution is None and not self.leftovers
