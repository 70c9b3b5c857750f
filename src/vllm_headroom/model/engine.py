"""The engine's data: its page, processes, host memory and status."""

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Final, get_origin, get_type_hints

from msgspec import Struct, field

from vllm_headroom.vocabulary import HostBasis, HostPart, Role


class Cgroup(Struct, frozen=True, kw_only=True):
    """A container's memory counters."""

    identity: str
    """What distinguishes a container from its successor of the same name."""

    used_bytes: int
    cache_bytes: int
    """The part of `used_bytes` that is reclaimed before anything is killed: page cache, mapped
    weights."""

    limit_bytes: int | None
    """None without a limit."""

    oom_kills: int | None
    """The kernel's kills in it, None where unknown."""

    swap_bytes: int | None = None
    """What is swapped out, no part of `used_bytes`; None where unknown."""

    pressure_ratio: float | None = None
    """As in HostMemory."""


class MachineMemory(Struct, frozen=True, kw_only=True):
    """The machine's memory from /proc."""

    total_bytes: int
    available_bytes: int
    """What is free, and what the kernel can reclaim."""

    swap_bytes: int = 0
    """All swap, zram and zswap included."""

    swap_free_bytes: int = 0
    oom_kills: int | None = None
    """The kernel's kills anywhere on the machine since boot."""

    pressure_ratio: float | None = None
    """As in HostMemory."""


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
    """The host memory available to the engine; None where unknown."""

    basis: HostBasis | None = None
    """Where the figures are from."""

    used_bytes: int | None = None
    """What counts against the limit and cannot be reclaimed."""

    limit_bytes: int | None = None
    swap_bytes: int | None = None
    """What is swapped out; it does not count against the limit."""

    shm_used_bytes: int | None = None
    shm_limit_bytes: int | None = None
    oom_kills: int | None = None
    """The kernel's kills since the container was first seen."""

    pressure_ratio: float | None = None
    """The share of the last ten seconds in which a task waited for memory (PSI, some)."""

    @property
    def room_bytes(self) -> int | None:
        """What is left before the kernel kills; None where unknown."""
        if self.used_bytes is None or self.limit_bytes is None:
            return None
        return max(0, self.limit_bytes - self.used_bytes)


class Input(Struct, frozen=True):
    """What an engine's page may offer."""

    name: str
    """The value of the label `input` of `headroom_input_available`."""

    metric: str | None = None
    """The metric that exports it unchanged, None where none does."""


def _input(name: str, metric: str | None = None) -> Input:
    """Declare an input; `metric` is the metric's name after `headroom_engine_`."""
    if metric is None:
        return Input(name)
    return Input(name, f"headroom_engine_{metric}")


class EngineReading(Struct, frozen=True, kw_only=True):
    """The readings of one engine, which is one data-parallel rank.

    None where the page does not offer it.
    """

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

    # What follows is no input of a page: the probe, the command line or another series has it.
    max_num_seqs: float | None = None
    """The requests that may run at once."""

    kv_stranded_ratio: float | None = None
    """The share of the KV cache that is in use by no request."""

    kv_token_ratio: float | None = None
    """The share of the KV cache that holds a request's token."""

    kv_offload_bytes: float | None = None
    """The size of the KV cache's tier in host memory."""

    multimodal_cache_queries_total: float | None = None


INPUTS: Final[Mapping[str, Input]] = {
    field: hint.__metadata__[0]
    for field, hint in get_type_hints(EngineReading, include_extras=True).items()
    if get_origin(hint) is Annotated
}
"""The input of each field of EngineReading."""


class EnginePage(Struct, frozen=True, kw_only=True):
    """One parsed page."""

    profile: str
    """The profile that it was read with."""

    engines: tuple[EngineReading, ...]
    inputs: tuple[tuple[str, bool], ...]
    """Every input of the profile, and whether it was present."""


ProcessName = tuple[int, float]
"""A process by its pid and its start in seconds since the epoch: a pid alone is reused."""

SAME_START_SECONDS: Final = 2.0
"""Two programs may read one process's start this far apart: the kernel's boot time moves when the
clock is set."""


class EngineProcess(Struct, frozen=True, kw_only=True):
    """A process of the engine found in /proc; None where unknown."""

    pid: int
    role: Role
    rss_bytes: int
    """Its resident memory: anonymous, file and shared."""

    started_at_seconds: float
    """Its start in seconds since the epoch."""

    since_boot_seconds: float | None = None
    """Its start in seconds since the boot."""

    cpu_seconds: float | None = None
    """The CPU time of all its threads."""

    anonymous_bytes: int | None = None
    """Its private memory."""

    file_bytes: int | None = None
    """Its mapped files, which the kernel can reclaim."""

    state: str | None = None
    """The letter of its main thread in /proc."""

    cpu_pressure_ratio: float | None = None
    """The share of the last minute in which a task of the machine waited for a CPU; of the first
    server only."""

    wait_seconds: float | None = None
    """How long the newest slow request has waited; of the first server only."""

    swap_bytes: int | None = None
    """Its swapped-out private memory, no part of `rss_bytes`."""

    shared_bytes: int | None = None
    """What is in tmpfs, in a memfd or pinned by CUDA."""


class EngineOptions(Struct, frozen=True, kw_only=True):
    """What the command line of vLLM's server sets, by the names of its options.

    None where it does not. Sizes without `bytes` in their name are in GiB.
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
    """The tier of one engine, from `kv_transfer_config`."""

    lmcache_gb: float | None = None
    """The cache of each worker, from `kv_transfer_config`."""

    config: str | None = None
    """A file that may set more."""

    option_names: tuple[str, ...] = ()
    """The names of all options, in their order."""

    command: str = ""
    """The line, with its secrets starred."""


class Pool(Struct, frozen=True, kw_only=True):
    """Memory that vLLM was configured to fill."""

    part: HostPart
    role: Role | None
    """The role of the processes in whose host memory it lies; None for a GPU."""

    size_bytes: int
    """Growth up to this size is no leak."""


class ProcessReadings(Struct, frozen=True, kw_only=True):
    """What /proc shows of the engine, and of all other processes."""

    engine: tuple[EngineProcess, ...]
    """The engine's processes, its first server first."""

    visible_pids: frozenset[int]
    sees_host_pids: bool
    """True in the machine's first PID namespace, where NVML and /proc always mean the same pid."""

    ambiguous_engines: int = 0
    """The number of unrelated engines when none could be identified as the watched one: then
    `engine` is empty."""

    neighbours: frozenset[ProcessName] = frozenset()
    """The servers, or first processes, of all other engines."""

    ports: frozenset[int] = frozenset()
    """Those in the engine's command line, or in the neighbours' where there is no engine."""

    orphans: frozenset[int] = frozenset()
    """The pids left over from an exited run of the engine."""

    strays: frozenset[int] = frozenset()
    """The pids of cores and workers with a new parent, whose server was never seen, and of their
    children."""

    zombies: frozenset[int] = frozenset()
    """The pids that have exited and still show, and may hold memory in the driver."""

    options: EngineOptions | None = None
    """Those of vLLM's server."""

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
