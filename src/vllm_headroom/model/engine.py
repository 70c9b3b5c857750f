"""The engine's data: its page, processes, host memory and status."""

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Final, get_origin, get_type_hints

from msgspec import Struct, field

from vllm_headroom.vocabulary import HostBasis, HostPart, Role, ServerAnswer


class Cgroup(Struct, frozen=True, kw_only=True):
    """A container's memory counters."""

    identity: str
    """Distinguishes a container from a later container with the same name."""

    used_bytes: int
    cache_bytes: int
    """The part of `used_bytes` that the kernel reclaims before it kills a process. Examples are the
    page cache and mapped weights.
    """

    limit_bytes: int | None
    """The memory limit, or None if there is none."""

    oom_kills: int | None
    """The number of OOM kills in the container, or None if unknown."""

    swap_bytes: int | None = None
    """Swapped-out memory, which is not part of `used_bytes`, or None if unknown."""

    pressure_ratio: float | None = None
    """The share of the last ten seconds with a task waiting for memory, or None."""


class MachineMemory(Struct, frozen=True, kw_only=True):
    """The machine's memory according to /proc."""

    total_bytes: int
    available_bytes: int
    """Free memory plus memory that the kernel can reclaim."""

    swap_bytes: int = 0
    """The total size of the swap, including zram and zswap."""

    swap_free_bytes: int = 0
    oom_kills: int | None = None
    """The number of OOM kills since boot, or None if unknown."""

    pressure_ratio: float | None = None
    """The share of the last ten seconds with a task waiting for memory, or None."""


class Shm(Struct, frozen=True, kw_only=True):
    """The size and the free space of a /dev/shm."""

    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        """Return the used space."""
        return self.total_bytes - self.free_bytes


class HostReading(Struct, frozen=True, kw_only=True):
    """A reading of the engine's container, the machine and /dev/shm.

    A field is None if unknown.
    """

    cgroup: Cgroup | None = None
    machine: MachineMemory | None = None
    shm: Shm | None = None


class HostMemory(Struct, frozen=True, kw_only=True):
    """The host memory available to the engine; a figure is None if unknown."""

    basis: HostBasis | None = None
    """The source of the figures."""

    used_bytes: int | None = None
    """The memory that counts against the limit and cannot be reclaimed by the kernel."""

    limit_bytes: int | None = None
    swap_bytes: int | None = None
    """Swapped-out memory, which does not count against the limit."""

    shm_used_bytes: int | None = None
    shm_limit_bytes: int | None = None
    oom_kills: int | None = None
    """The number of OOM kills since the container was first seen."""

    pressure_ratio: float | None = None
    """The share of the last ten seconds with at least one task waiting for memory. In PSI, this is
    the line `some`.
    """

    @property
    def room_bytes(self) -> int | None:
        """Return the memory left before the kernel kills a process, or None if unknown."""
        if self.used_bytes is None or self.limit_bytes is None:
            return None
        return max(0, self.limit_bytes - self.used_bytes)


class Input(Struct, frozen=True):
    """A fact that an engine's page may provide."""

    name: str
    """The value of the label `input` of `headroom_input_available`."""

    metric: str | None = None
    """The metric that exports the fact unchanged, or None if no metric does."""


def _input(name: str, metric: str | None = None) -> Input:
    """Declare an input; `metric` is the metric's name without the prefix `headroom_engine_`.

    `metric` is None if no metric exports the input unchanged.
    """
    if metric is None:
        return Input(name)
    return Input(name, f"headroom_engine_{metric}")


class EngineReading(Struct, frozen=True, kw_only=True):
    """Readings of one engine (one data-parallel rank).

    A field is None if the page lacks it.
    """

    model_name: str
    engine: str
    """The name of the rank on the page, such as "0"."""
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

    # The fields below are not inputs. Their values come from the probe, the command line or another
    # series.
    max_num_seqs: float | None = None
    """The maximum number of requests that run at once."""

    kv_stranded_ratio: float | None = None
    """The share of the KV cache that is in use without a request."""

    kv_token_ratio: float | None = None
    """The share of the KV cache that holds tokens of requests."""

    kv_offload_bytes: float | None = None
    """The size of the KV cache tier in host memory."""

    multimodal_cache_queries_total: float | None = None


INPUTS: Final[Mapping[str, Input]] = {
    field: hint.__metadata__[0]
    for field, hint in get_type_hints(EngineReading, include_extras=True).items()
    if get_origin(hint) is Annotated
}
"""The input for each field of EngineReading."""


class EnginePage(Struct, frozen=True, kw_only=True):
    """One parsed page."""

    profile: str
    """The profile that was used to read the page."""

    engines: tuple[EngineReading, ...]
    inputs: tuple[tuple[str, bool], ...]
    """The name of each input of the profile, and whether the page offers it."""
    has_capacity_of_blocks: bool = False
    """Whether the capacities of the KV caches were computed from blocks. In that case, the page
    does not state the capacities in tokens.
    """


ProcessName = tuple[int, float]
"""A process, identified by its pid and its start time in seconds since the epoch. The pid alone is
not sufficient, because pids are reused.
"""

SAME_START_SECONDS: Final = 2.0
"""Two start times may be of one process if they differ by at most this. A start time is computed
from the kernel's boot time. The kernel's boot time changes when the clock is set.
"""


class EngineProcess(Struct, frozen=True, kw_only=True):
    """A process of the engine, as read from /proc; a field is None if unknown."""

    pid: int
    role: Role
    rss_bytes: int
    """The process's resident memory: anonymous, file and shared."""

    started_at_seconds: float
    """When the process started, in seconds since the epoch."""

    since_boot_seconds: float | None = None
    """When the process started, in seconds since boot."""

    cpu_seconds: float | None = None
    """The CPU time used by all threads of the process."""

    anonymous_bytes: int | None = None
    """The process's private memory."""

    file_bytes: int | None = None
    """The process's mapped files, which the kernel can reclaim."""

    state: str | None = None
    """The kernel's letter for the main thread's state, such as R, S or D."""

    cpu_pressure_ratio: float | None = None
    """The share of the last minute with a task on the machine waiting for CPU. Only the engine's
    root server has this value.
    """

    wait_seconds: float | None = None
    """How long the engine's newest slow request has been waiting, or None without one. Only the
    engine's root server has this value.
    """

    waiting_requests: int | None = None
    """The number of connections with a request that waits longer than usual. The number is None if
    the connections are not visible. Only the first server has this number.
    """

    swap_bytes: int | None = None
    """The process's swapped-out private memory, which is not part of `rss_bytes`."""

    shared_bytes: int | None = None
    """The process's memory that is in tmpfs or in a memfd, or pinned by CUDA."""


class EngineOptions(Struct, frozen=True, kw_only=True):
    """The options on the command line of vLLM's server, under vLLM's names.

    An option is None if it is not set. Sizes without `bytes` in their name are in GiB.
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
    """The size of one engine's KV cache in host memory, from `kv_transfer_config`."""

    lmcache_gb: float | None = None
    """The size of each worker's LMCache in host memory, from `kv_transfer_config`."""

    config: str | None = None
    """The path of a file that may set further options."""

    option_names: tuple[str, ...] = ()
    """The names of all options that are set, in the order of the command line."""

    command: str = ""
    """The command line, with secrets replaced by stars."""


class Pool(Struct, frozen=True, kw_only=True):
    """A memory pool that vLLM is configured to fill."""

    part: HostPart
    role: Role | None
    """The role of the processes that hold the pool. It is None for a pool on a GPU."""

    size_bytes: int
    """The size of the pool. Growth up to this size is not a leak."""


class ProcessReadings(Struct, frozen=True, kw_only=True):
    """What /proc shows about the engine and all other processes."""

    engine: tuple[EngineProcess, ...]
    """The engine's processes, starting with its first server."""

    visible_pids: frozenset[int]
    sees_host_pids: bool
    """Whether this is the machine's initial PID namespace. In that namespace, a pid refers to the
    same process in NVML and /proc.
    """

    ambiguous_engines: int = 0
    """The number of visible engines if the watched one is unknown, otherwise 0. If the watched
    engine is unknown, `engine` is empty.
    """

    neighbours: frozenset[ProcessName] = frozenset()
    """The root processes of all other engines."""

    ports: frozenset[int] = frozenset()
    """The ports on the command lines of all visible engines. If an engine is chosen, only its port
    is included.
    """

    orphans: frozenset[int] = frozenset()
    """The pids of processes that an exited run of the engine left behind."""

    strays: frozenset[int] = frozenset()
    """The pids of cores and workers left behind before their engine was observed. Their descendants
    are included.
    """

    exiting: frozenset[int] = frozenset()
    """The pids of the engine's processes that are exiting. Exiting processes no longer have
    resident memory. The driver is still releasing their GPU memory. For a large core, the release
    takes seconds.
    """

    zombies: frozenset[int] = frozenset()
    """The pids of processes that have exited but have not been reaped yet. The driver may still
    hold their memory.
    """

    options: EngineOptions | None = None
    """The options of vLLM's server, or None if its command line is not visible."""

    host: HostReading = field(default_factory=HostReading)

    @property
    def left_behind(self) -> frozenset[int]:
        """Return the pids of processes whose engine has exited: orphans and strays."""
        return self.orphans | self.strays


class ServerReply(Struct, frozen=True, kw_only=True):
    """The server's responses at `/health`, `/v1/models` and `/load`."""

    answer: ServerAnswer
    requests: float | None = None
    """The number of requests in the server, according to `/load`. In vLLM, counting them is an
    option.
    """


class HangSign(Enum):
    """A sign that an engine hangs even though its page shows no work."""

    STUCK = "a core or worker is stopped, or blocked in the kernel"
    MUTE = "the probe in the core is silent"
    UNANSWERED = "a request gets no answer"


class EngineName(Struct, frozen=True, kw_only=True):
    """The names of an engine, used if the daemon watches several engines."""

    namespace: str | None = None
    """The engine's Kubernetes namespace. It is set together with `pod`."""
    pod: str | None = None
    container: str | None = None
    """The container's name, or None if unknown."""
    unit: str | None = None
    """The systemd unit of an engine that runs outside Kubernetes."""
    engine_url: str = ""
    """The URL of the engine's page, without secrets. The URL names an engine outside Kubernetes
    that no unit starts.
    """

    @property
    def labels(self) -> tuple[tuple[str, str], ...]:
        """Return the labels that are added to the engine's series, with their values."""
        if self.pod is not None:
            return (
                ("namespace", self.namespace or ""),
                ("pod", self.pod),
                ("container", self.container or ""),
            )
        if self.unit is not None:
            return (("unit", self.unit),)
        return (("engine_url", self.engine_url),)

    @property
    def text(self) -> str:
        """Return the name for output and for --engine: NAMESPACE/POD, the unit or the URL."""
        if self.pod is not None:
            return f"{self.namespace}/{self.pod}" if self.namespace else self.pod
        return self.unit or self.engine_url
