"""What the probe inside the engine says of its processes; None where it does not say."""

from __future__ import annotations

from msgspec import Struct

from vllm_headroom.vocabulary import MemoryPart, Role


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
