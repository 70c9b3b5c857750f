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
    """torch's caching allocator on one device; the counts start with the process.

    `inactive_split_bytes` is unused but cannot be freed, as the rest of its segment is in use. `total_bytes` is the
    device's size as the process sees it: less where a layer limits it.
    """

    uuid: str
    total_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    inactive_split_bytes: int | None = None
    retries: int | None = None
    ooms: int | None = None


class EngineParts(Struct, frozen=True, kw_only=True):
    """vLLM's own measurements in a worker: weights and graphs at their creation, and the KV cache's tensors.

    `activation_peak_bytes` is from profiling, `requested_bytes` is the budget. `pool` has the weights and the KV cache
    in vLLM's memory pool, which replaces torch's allocator where the engine can sleep.
    """

    weights_bytes: int | None = None
    kv_cache_bytes: int | None = None
    cuda_graphs_bytes: int | None = None
    activation_peak_bytes: int | None = None
    requested_bytes: int | None = None
    asleep: bool | None = None
    pool: "EngineParts | None" = None


class SchedulerReading(Struct, frozen=True, kw_only=True):
    """A core's scheduler: the shares of the KV cache that are in use by no request, and that hold a request's token."""

    steps_total: int | None = None
    max_num_seqs: int | None = None
    kv_stranded_ratio: float | None = None
    kv_token_ratio: float | None = None


class OomRecord(Struct, frozen=True, kw_only=True):
    """The newest of a process's `seen` OutOfMemoryErrors, in seconds since the epoch, with torch's figures then."""

    at_seconds: float
    uuid: str | None = None
    asked_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    seen: int | None = None


class ProbedProcess(Struct, frozen=True, kw_only=True):
    """The newest file of one process, with the pid of its namespace; times in seconds since the epoch.

    `since_boot_seconds` is its start on the boot clock, `stopped` why its probe stopped for good.
    """

    pid: int
    started_at_seconds: float
    since_boot_seconds: float | None = None
    written_at_seconds: float
    interval_seconds: float
    role: Role
    stopped: str | None = None
    data_parallel_rank: int | None = None
    vllm_version: str | None = None
    devices: tuple[AllocatorReading, ...] = ()
    parts: EngineParts | None = None
    scheduler: SchedulerReading | None = None
    host: HostReading | None = None
    oom: OomRecord | None = None


class ProbeReadings(Struct, frozen=True, kw_only=True):
    """This run's processes that write, its live ones that no longer write, and all others, as they were at the end."""

    present: tuple[ProbedProcess, ...] = ()
    silent: tuple[ProbedProcess, ...] = ()
    others: tuple[ProbedProcess, ...] = ()

    @property
    def processes(self) -> tuple[ProbedProcess, ...]:
        """All of them, including exited ones."""
        return self.present + self.silent + self.others

    @property
    def has_silent_core(self) -> bool:
        """Whether the probe in a live core is silent and another writes: without one the folder may be the cause."""
        return bool(self.present) and any(each.scheduler for each in self.silent)


class Inside(Struct, frozen=True, kw_only=True):
    """The engine's report on one GPU: torch's allocator, and the ledger of its memory.

    `granted_bytes` is the device's size as the processes see it. Unknown parts are not in `parts`.
    """

    granted_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    parts: tuple[tuple[MemoryPart, int], ...] = ()


_PART: Final = re.compile(
    r"(MIG-.{1,8}).*|(?:GPU-[0-9a-f]+|PCI-[0-9a-f:.]+)-([0-9]+)", re.IGNORECASE
)


class Vendor(Enum):
    """The vendor of a GPU's driver."""

    NVIDIA = "nvidia"
    AMD = "amd"


class GpuMemory(Struct, frozen=True, kw_only=True):
    """NVML memory info v2; in v1 and from AMD, `reserved_bytes` is None and `used_bytes` contains the reserved memory.

    `machine_available_bytes` is set for a GPU that uses the machine's memory: what the kernel reports as available for
    the GPU and everything else; `machine_free_blocks_bytes` is what is free of it in blocks of 2 MiB and more.
    """

    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int | None
    machine_available_bytes: int | None = None
    machine_free_blocks_bytes: int | None = None

    @property
    def usable_bytes(self) -> int:
        """The GPU's total in CUDA, of which vLLM takes its share: NVML's total less the driver's reserve.

        Seen: 95.59 GiB in NVML, 94.97 in CUDA (ollama/ollama#18201). If the reserve is unknown this is NVML's total,
        which errs on the safe side.
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
    """Return what identifies a MIG instance, cut, or an AMD partition among those of its index; "" for a whole GPU."""
    found = _PART.fullmatch(uuid)
    return "" if found is None else found[1] or f"partition {found[2]}"


def name_device(index: int | str, uuid: str) -> str:
    """Return the name of a device in a sentence."""
    return f"GPU {index} {find_part(uuid)}".rstrip()


class Fate(StrEnum):
    """What became of a process that holds GPU memory and serves no engine."""

    ORPHANED = "orphaned"
    ZOMBIE = "zombie"
    VANISHED = "vanished"


class Leftover(Struct, frozen=True, kw_only=True):
    """GPU memory of a process that serves no engine; `used_bytes` is None where the driver does not report it."""

    pid: int
    fate: Fate
    used_bytes: int | None


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

    Unsupported values are None. `index` is NVML's; AMD's cards are numbered after NVML's. `failure` is set if the
    device cannot be read: then everything but index, uuid, name and xid_errors is None. `processes` is None when the
    list could not be read, unlike an empty list. `xid_errors` pairs XID codes with their count since the daemon
    started.
    """

    name: str
    memory: GpuMemory | None = None
    used_peak_bytes: int | None = None
    utilization_ratio: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    xid_errors: tuple[tuple[int, int], ...] = ()
    failure: Failure | None = None
    vendor: Vendor = Vendor.NVIDIA

    def failed(self, failure: Failure) -> "GpuReading":
        """Return the failed reading of this device; it keeps its XID errors, which the daemon counts."""
        kept = {
            name: getattr(self, name) for name in ("index", "uuid", "name", "xid_errors", "vendor")
        }
        return GpuReading(**kept, failure=failure)


class GpuReadings(Struct, frozen=True, kw_only=True):
    """All visible devices; `driver_version` is NVIDIA's, None where its driver does not report it."""

    driver_version: str | None
    devices: tuple[GpuReading, ...]


class Gpu(Struct, frozen=True, kw_only=True):
    """A device with its owner: `attribution` is None if it is not the engine's.

    `engine_bytes` and `other_bytes` are None where the device's processes cannot be distinguished. `held_bytes` is the
    engine's memory: `engine_bytes`, or, where that can never be known, all used memory that is not known to be others';
    None while unknown, and on a device that is not the engine's. `process_count` is NVML's number of compute processes,
    `leftovers` those of them that serve no engine. `inside` is the report of the engine's processes.
    """

    reading: GpuReading
    attribution: Attribution | None
    engine_bytes: int | None = None
    other_bytes: int | None = None
    held_bytes: int | None = None
    process_count: int | None = None
    leftovers: tuple[Leftover, ...] = ()
    inside: Inside | None = None

    @property
    def is_left_out(self) -> bool:
        """Whether the engine's processes hold memory of it although the configured list excludes it."""
        return bool(self.engine_bytes) and self.attribution is None and not self.leftovers
