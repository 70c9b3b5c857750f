"""What is known of a GPU: what its driver says, and whose it is."""

from __future__ import annotations

import re
from enum import Enum, StrEnum
from typing import Final

from msgspec import Struct

from vllm_headroom.vocabulary import Attribution, MemoryPart, Reason, Role, Source


class Failure(Struct, frozen=True, kw_only=True):
    """A reading that failed; `message` is one sentence for the operator that says what to do."""

    source: Source
    reason: Reason
    message: str


class ReadingTime(Struct, frozen=True, kw_only=True):
    """When the reading of one source ended, and how long it took, both on the machine's monotonic clock."""

    source: Source
    seconds: float
    ended_monotonic_seconds: float


class AllocatorReading(Struct, frozen=True, kw_only=True):
    """torch's caching allocator on one device; the counts are of this process, since it began.

    `inactive_split_bytes` is what it holds, nobody uses and it cannot give back, as the rest of the segment is used.
    `total_bytes` is what the process takes for the device's memory: less than that where a layer grants it a share.
    """

    uuid: str
    total_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    inactive_split_bytes: int | None = None
    retries: int | None = None
    ooms: int | None = None


class PoolReading(Struct, frozen=True, kw_only=True):
    """vLLM's own pool, which stands in for torch's allocator where the engine can sleep, by what it is used for."""

    weights_bytes: int | None = None
    kv_cache_bytes: int | None = None


class EngineParts(Struct, frozen=True, kw_only=True):
    """What vLLM itself has measured of a worker: weights and graphs when they were made, the KV cache's tensors.

    `activation_peak_bytes` is of its profiling, `requested_bytes` the budget it was given.
    """

    weights_bytes: int | None = None
    kv_cache_bytes: int | None = None
    cuda_graphs_bytes: int | None = None
    activation_peak_bytes: int | None = None
    requested_bytes: int | None = None
    asleep: bool | None = None
    pool: PoolReading | None = None


class SchedulerReading(Struct, frozen=True, kw_only=True):
    """What an engine core's scheduler knows and the page does not say; `steps_total` counts what it has done."""

    steps_total: int | None = None
    max_num_seqs: int | None = None


class HostBlock(Struct, frozen=True, kw_only=True):
    """Host memory as the container of the process sees it: its cgroup, and /dev/shm.

    `file_bytes` is page cache, which counts in `used_bytes` and can be reclaimed.
    """

    used_bytes: int | None = None
    file_bytes: int | None = None
    limit_bytes: int | None = None
    oom_kills: int | None = None
    shm_used_bytes: int | None = None
    shm_limit_bytes: int | None = None


class OomRecord(Struct, frozen=True, kw_only=True):
    """The newest OutOfMemoryError of a process: when torch raised it, in seconds since the epoch, and how it stood.

    `seen` is how many there were.
    """

    at_seconds: float
    uuid: str | None = None
    asked_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    seen: int | None = None


class ProbedProcess(Struct, frozen=True, kw_only=True):
    """The newest file of one process, whose pid is that of its own namespace; times in seconds since the epoch.

    `since_boot_seconds` is when it began by a count that no clock moves, `stopped` why its probe gave up for good.
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
    host: HostBlock | None = None
    oom: OomRecord | None = None


class ProbeReadings(Struct, frozen=True, kw_only=True):
    """The processes of this life that say something now, those that live and no longer write, and all the others.

    What the others left is of the past: their counts and their end are all that is to be had of them.
    """

    present: tuple[ProbedProcess, ...] = ()
    silent: tuple[ProbedProcess, ...] = ()
    others: tuple[ProbedProcess, ...] = ()


class Inside(Struct, frozen=True, kw_only=True):
    """What the engine's processes say of one GPU: torch's allocator, and the ledger of what they hold there.

    `granted_bytes` is what they may take there, by what each takes for the device's memory. A part that is not known is
    not in `parts`.
    """

    granted_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    parts: tuple[tuple[MemoryPart, int], ...] = ()


_PART: Final = re.compile(r"(MIG-.{1,8}).*|(?:GPU-[0-9a-f]+|PCI-[0-9a-f:.]+)-([0-9]+)", re.IGNORECASE)


class Vendor(Enum):
    """Whose driver shows a GPU."""

    NVIDIA = "nvidia"
    AMD = "amd"


class GpuMemory(Struct, frozen=True, kw_only=True):
    """NVML memory info v2; in v1, `reserved_bytes` is None and `used_bytes` contains the reserved memory.

    AMD's driver tells it as v1 does. `machine_available_bytes` is set where the GPU works on the machine's memory: what
    the kernel calls available there, for the GPU and all else.
    """

    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int | None
    machine_available_bytes: int | None = None

    @property
    def usable_bytes(self) -> int:
        """What CUDA calls the GPU's total, of which vLLM takes its share: NVML's less what the driver reserves.

        Seen: 95.59 GiB in NVML, 94.97 in CUDA (ollama/ollama#18201). Where NVML does not tell what is reserved, this is
        NVML's total, and what follows errs on the safe side.
        """
        return self.total_bytes - (self.reserved_bytes or 0)

    @property
    def left_bytes(self) -> int:
        """What is left of that."""
        return self.usable_bytes - self.used_bytes

    @property
    def unified(self) -> bool:
        """Whether it is the machine's own memory: what is used of it is used by all that runs there."""
        return self.machine_available_bytes is not None


class GpuProcess(Struct, frozen=True, kw_only=True):
    """A compute process on a GPU; `used_bytes` is None where the driver does not tell."""

    pid: int
    used_bytes: int | None


def part_of(uuid: str) -> str:
    """Return what tells a MIG instance, or a partition of an AMD card, from the others of its index; "" of a whole GPU.

    Of a MIG instance's UUID that is as much as a person compares.
    """
    found = _PART.fullmatch(uuid)
    return "" if found is None else found[1] or f"partition {found[2]}"


def called(index: int | str, uuid: str) -> str:
    """Return what a person calls a device in a sentence."""
    return f"GPU {index} {part_of(uuid)}".rstrip()


class Fate(StrEnum):
    """What became of a process that holds GPU memory for no engine any more."""

    ORPHANED = "orphaned"
    ZOMBIE = "zombie"
    VANISHED = "vanished"


class Leftover(Struct, frozen=True, kw_only=True):
    """What a process holds of a GPU for no engine any more; `used_bytes` is None where the driver does not tell."""

    pid: int
    fate: Fate
    used_bytes: int | None


class Device(Struct, frozen=True, kw_only=True):
    """A whole GPU or a part of one, as it is told from others."""

    index: int
    uuid: str

    @property
    def called(self) -> str:
        """What a person calls it in a sentence."""
        return called(self.index, self.uuid)


class GpuReading(Device, frozen=True, kw_only=True):
    """What is told of one device, a whole GPU or a part of one: a MIG instance, or a partition of an AMD card.

    What the device does not support is None. `index` is NVML's; AMD's cards are counted on from there.

    `failure` is set when the device cannot be read: then everything but index, uuid, name and xid_errors is None.
    `processes` is None when the list could not be read, which is not the same as an empty list.
    `xid_errors` pairs XID codes with their count since the daemon started.
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

    def failed(self, failure: Failure) -> GpuReading:
        """Return the reading of the same device when it cannot be read; XID errors are counted here and stay known."""
        return GpuReading(
            index=self.index,
            uuid=self.uuid,
            name=self.name,
            xid_errors=self.xid_errors,
            failure=failure,
            vendor=self.vendor,
        )


class GpuReadings(Struct, frozen=True, kw_only=True):
    """All devices that show; `driver_version` is NVIDIA's, None where its driver does not tell it."""

    driver_version: str | None
    devices: tuple[GpuReading, ...]


class Gpu(Struct, frozen=True, kw_only=True):
    """A device with its owner: `attribution` is None where it is not taken for the engine's.

    `engine_bytes` and `other_bytes` are None where the processes on the device cannot be told apart.
    `held_bytes` is what the engine is taken to hold: `engine_bytes`, or where these can never be known all that is used
    and not known to be others'; None while they are unknown for now, and on a device that is not the engine's.
    `process_count` is the number of compute processes NVML lists, `leftovers` those of them that are sure to serve no
    engine any more. `inside` is what the engine's processes say themselves.
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
    def left_out(self) -> bool:
        """Whether processes that serve the engine hold memory of it, and the operator's list leaves it out."""
        return bool(self.engine_bytes) and self.attribution is None and not self.leftovers
