"""The engine's data: its page, processes, host memory and status."""

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Final, get_origin, get_type_hints

from msgspec import Struct, field

from vllm_headroom.vocabulary import HostBasis, HostPart, Role


class Cgroup(Struct, frozen=True, kw_only=True):
    """A container's memory counters; `limit_bytes` is None without a limit.

    `cache_bytes` is part of `used_bytes` and is reclaimed before anything is killed: page cache, mapped weights.
    `swap_bytes` is swapped out and no part of it, None where unknown.
    `identity` distinguishes a container from its successor of the same name. `pressure_ratio` is as in HostMemory.
    """

    identity: str
    used_bytes: int
    cache_bytes: int
    limit_bytes: int | None
    oom_kills: int | None
    swap_bytes: int | None = None
    pressure_ratio: float | None = None


class MachineMemory(Struct, frozen=True, kw_only=True):
    """The machine's memory from /proc; `available_bytes` includes what the kernel can reclaim.

    `swap_bytes` is all swap, zram and zswap included, and `swap_free_bytes` its free part. `oom_kills` counts the
    kernel's kills anywhere on the machine since boot.
    """

    total_bytes: int
    available_bytes: int
    swap_bytes: int = 0
    swap_free_bytes: int = 0
    oom_kills: int | None = None
    pressure_ratio: float | None = None


class Shm(Struct, frozen=True, kw_only=True):
    """The size and free space of a /dev/shm."""

    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        """The space in use."""
        return self.total_bytes - self.free_bytes


class HostReading(Struct, frozen=True, kw_only=True):
    """One reading of the engine's container, the machine and /dev/shm; None where not visible."""

    cgroup: Cgroup | None = None
    machine: MachineMemory | None = None
    shm: Shm | None = None


class HostMemory(Struct, frozen=True, kw_only=True):
    """The host memory available to the engine, and the basis of the figures; None where unknown.

    `used_bytes` counts against `limit_bytes` and cannot be reclaimed; `swap_bytes` is swapped out and does not count.
    `oom_kills` are the kernel's kills since it was first seen. `pressure_ratio` is the share of the last ten seconds in
    which a task waited for memory (PSI, some).
    """

    basis: HostBasis | None = None
    used_bytes: int | None = None
    limit_bytes: int | None = None
    swap_bytes: int | None = None
    shm_used_bytes: int | None = None
    shm_limit_bytes: int | None = None
    oom_kills: int | None = None
    pressure_ratio: float | None = None

    @property
    def room_bytes(self) -> int | None:
        """What is left before the kernel kills; None where unknown."""
        if self.used_bytes is None or self.limit_bytes is None:
            return None
        return max(0, self.limit_bytes - self.used_bytes)


class Input(Struct, frozen=True):
    """An input's name in `headroom_input_available`, and the metric that exports it unchanged."""

    name: str
    metric: str | None = None


def _input(name: str, metric: str | None = None) -> Input:
    return Input(name, metric and f"headroom_engine_{metric}")


class EngineReading(Struct, frozen=True, kw_only=True):
    """The readings of one engine (one data-parallel rank); None where the page does not offer it."""

    model_name: str
    engine: str
    running: Annotated[float | None, _input("requests_running", "requests_running")] = None
    waiting: Annotated[float | None, _input("requests_waiting", "requests_waiting")] = None
    finished_total: Annotated[
        float | None, _input("requests_finished", "requests_finished_total")
    ] = None
    preemptions_total: Annotated[float | None, _input("preemptions", "preemptions_total")] = None
    prompt_tokens_total: Annotated[float | None, _input("prompt_tokens", "prompt_tokens_total")] = (
        None
    )
    generation_tokens_total: Annotated[
        float | None, _input("generation_tokens", "generation_tokens_total")
    ] = None
    steps_total: Annotated[float | None, _input("scheduler_steps")] = None
    kv_used_ratio: Annotated[float | None, _input("kv_cache_usage", "kv_cache_used_ratio")] = None
    kv_capacity_tokens: Annotated[
        float | None, _input("kv_cache_capacity", "kv_cache_capacity_tokens")
    ] = None
    kv_cache_dtype: Annotated[str | None, _input("kv_cache_dtype")] = None
    prefix_queries_total: Annotated[
        float | None, _input("prefix_cache_queries", "prefix_cache_queries_total")
    ] = None
    prefix_hits_total: Annotated[
        float | None, _input("prefix_cache_hits", "prefix_cache_hits_total")
    ] = None
    prefix_hit_lifetime_ratio: Annotated[float | None, _input("prefix_cache_hit_rate")] = None
    awake: Annotated[bool | None, _input("sleep_state", "awake")] = None
    gpu_memory_utilization_ratio: Annotated[float | None, _input("gpu_memory_utilization")] = None
    kv_cache_memory_bytes: Annotated[float | None, _input("kv_cache_memory_bytes")] = None
    memory_bytes: Annotated[float | None, _input("memory_bytes")] = None
    started_at_seconds: Annotated[float | None, _input("process_start_time")] = None
    max_num_seqs: float | None = None
    kv_stranded_ratio: float | None = None
    kv_token_ratio: float | None = None
    kv_offload_bytes: float | None = None
    multimodal_cache_queries_total: float | None = None


INPUTS: Final[Mapping[str, Input]] = {
    field: hint.__metadata__[0]
    for field, hint in get_type_hints(EngineReading, include_extras=True).items()
    if get_origin(hint) is Annotated
}
"""The input of each field of EngineReading."""


class EnginePage(Struct, frozen=True, kw_only=True):
    """One parsed page; `inputs` pairs every input of the profile with whether it was present."""

    profile: str
    engines: tuple[EngineReading, ...]
    inputs: tuple[tuple[str, bool], ...]


ProcessName = tuple[int, float]
"""A process by its pid and its start in seconds since the epoch: a pid alone is reused."""

SAME_START_SECONDS: Final = 2.0
"""Two programs may read one process's start this far apart: the kernel's boot time moves when the clock is set."""


class EngineProcess(Struct, frozen=True, kw_only=True):
    """A process of the engine found in /proc.

    `started_at_seconds` is seconds since the epoch, `since_boot_seconds` since the boot. `cpu_seconds` is the CPU time
    of all its threads. Of `rss_bytes`, `anonymous_bytes` is its private memory, `file_bytes` its mapped files, which
    the kernel can reclaim, `shared_bytes` what is in tmpfs, in a memfd or pinned by CUDA. `swap_bytes` is its
    swapped-out private memory, which is in none of them. `state` is the letter of its main thread in /proc. The first
    server has two more: `cpu_pressure_ratio`, the share of the last minute in which a task of the machine waited for a
    CPU, and `wait_seconds`, how long its newest slow request has waited. None where unknown.
    """

    pid: int
    role: Role
    rss_bytes: int
    started_at_seconds: float
    since_boot_seconds: float | None = None
    cpu_seconds: float | None = None
    anonymous_bytes: int | None = None
    file_bytes: int | None = None
    state: str | None = None
    cpu_pressure_ratio: float | None = None
    wait_seconds: float | None = None
    swap_bytes: int | None = None
    shared_bytes: int | None = None


class EngineOptions(Struct, frozen=True, kw_only=True):
    """What the command line of vLLM's server sets, by the names of its options; None where it does not.

    A file named by `config` may set more. `option_names` are the names of all options in their order. `command` is the line
    with its secrets starred. Sizes without `bytes` in their name are in GiB. `kv_connector_bytes` of an engine and
    `lmcache_gb` of each worker are in `kv_transfer_config`.
    """

    model: str | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: str | None = None
    kv_cache_memory_bytes: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    api_server_count: int | None = None
    kv_offloading_size: float | None = None
    cpu_offload_gb: float | None = None
    mm_processor_cache_gb: float | None = None
    kv_connector_bytes: float | None = None
    lmcache_gb: float | None = None
    config: str | None = None
    option_names: tuple[str, ...] = ()
    command: str = ""


class Pool(Struct, frozen=True, kw_only=True):
    """Memory that vLLM was configured to fill: growth up to `size_bytes` is no leak.

    It lies on a GPU where `role` is None, else in the host memory of the processes with that role.
    """

    part: HostPart
    role: Role | None
    size_bytes: int


class ProcessReadings(Struct, frozen=True, kw_only=True):
    """The engine's processes, and every pid visible in /proc.

    `sees_host_pids` is True in the machine's first PID namespace, where NVML and /proc always mean the same pid.
    `ambiguous_roots` is the number of unrelated engines when none could be identified as the watched one: then `engine`
    is empty. `neighbours` are the servers, or first processes, of all other engines. `ports` are those in the engine's
    command line, or in the neighbours' where there is no engine. `orphans` are the pids left over from an exited run of
    the engine; `strays` those of cores and workers with a new parent, whose server was never seen, and their children.
    `zombies` have exited and still have a pid, and maybe memory in the driver. `options` are those of vLLM's server.
    """

    engine: tuple[EngineProcess, ...]
    visible_pids: frozenset[int]
    sees_host_pids: bool
    ambiguous_roots: int = 0
    neighbours: frozenset[ProcessName] = frozenset()
    ports: frozenset[int] = frozenset()
    orphans: frozenset[int] = frozenset()
    strays: frozenset[int] = frozenset()
    zombies: frozenset[int] = frozenset()
    options: EngineOptions | None = None
    host: HostReading = field(default_factory=HostReading)

    @property
    def left_behind(self) -> frozenset[int]:
        """The pids that serve no engine any more."""
        return self.orphans | self.strays


class HangSign(Enum):
    """What suggests that an engine hangs although its page shows no work."""

    STUCK = "a core or worker is stopped, or blocked in the kernel"
    MUTE = "the probe in the core is silent"
    UNANSWERED = "a request gets no answer"
