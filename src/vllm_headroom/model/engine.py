"""What is known of the engine: its page, its processes, its life."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, get_origin, get_type_hints

from msgspec import Struct, field

from vllm_headroom.vocabulary import EngineState, ExitReason, HostBasis, Role


class Cgroup(Struct, frozen=True, kw_only=True):
    """What the kernel counts of a container; `limit_bytes` is None where it may take all that the machine has.

    `cache_bytes` is part of `used_bytes` and is taken back before anything is killed: files that were read, weights
    that are mapped. `identity` tells a container from the next one of the same name.
    """

    identity: str
    used_bytes: int
    cache_bytes: int
    limit_bytes: int | None
    oom_kills: int | None


class MachineMemory(Struct, frozen=True, kw_only=True):
    """The memory of the machine as /proc tells it; `available_bytes` counts what the kernel can take back.

    `swap_bytes` is the size of all swap, zram and zswap included, and `swap_free_bytes` what of it is free. `oom_kills`
    counts what the kernel killed anywhere on the machine since it booted.
    """

    total_bytes: int
    available_bytes: int
    swap_bytes: int = 0
    swap_free_bytes: int = 0
    oom_kills: int | None = None


class Shm(Struct, frozen=True, kw_only=True):
    """The size of a /dev/shm and what is free in it."""

    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        """What is in use in it."""
        return self.total_bytes - self.free_bytes


class HostReading(Struct, frozen=True, kw_only=True):
    """What one look showed: the container of the engine's processes, the machine, their /dev/shm; None where unseen."""

    cgroup: Cgroup | None = None
    machine: MachineMemory | None = None
    shm: Shm | None = None


class HostMemory(Struct, frozen=True, kw_only=True):
    """The host memory that the engine runs in, and how it is known; None where it is not.

    `used_bytes` is what counts against `limit_bytes` and cannot be taken back. `oom_kills` is what the kernel killed in
    it since it was first seen.
    """

    basis: HostBasis | None = None
    used_bytes: int | None = None
    limit_bytes: int | None = None
    shm_used_bytes: int | None = None
    shm_limit_bytes: int | None = None
    oom_kills: int | None = None

    @property
    def room_bytes(self) -> int | None:
        """What is left before the kernel kills; None where it is not known."""
        if self.used_bytes is None or self.limit_bytes is None:
            return None
        return max(0, self.limit_bytes - self.used_bytes)


class Input(Struct, frozen=True):
    """An input by its name in `headroom_input_available`, and the metric that shows it as it is."""

    name: str
    metric: str | None = None


class EngineReading(Struct, frozen=True, kw_only=True):
    """What one engine (one data-parallel rank) says of itself; None where the page does not offer it."""

    model_name: str
    engine: str
    running: Annotated[float | None, Input("requests_running", "headroom_engine_requests_running")] = None
    waiting: Annotated[float | None, Input("requests_waiting", "headroom_engine_requests_waiting")] = None
    finished_total: Annotated[float | None, Input("requests_finished", "headroom_engine_requests_finished_total")] = (
        None
    )
    preemptions_total: Annotated[float | None, Input("preemptions", "headroom_engine_preemptions_total")] = None
    prompt_tokens_total: Annotated[float | None, Input("prompt_tokens", "headroom_engine_prompt_tokens_total")] = None
    generation_tokens_total: Annotated[
        float | None, Input("generation_tokens", "headroom_engine_generation_tokens_total")
    ] = None
    steps_total: Annotated[float | None, Input("scheduler_steps")] = None
    kv_used_ratio: Annotated[float | None, Input("kv_cache_usage", "headroom_engine_kv_cache_used_ratio")] = None
    kv_capacity_tokens: Annotated[
        float | None, Input("kv_cache_capacity", "headroom_engine_kv_cache_capacity_tokens")
    ] = None
    kv_cache_dtype: Annotated[str | None, Input("kv_cache_dtype")] = None
    prefix_queries_total: Annotated[
        float | None, Input("prefix_cache_queries", "headroom_engine_prefix_cache_queries_total")
    ] = None
    prefix_hits_total: Annotated[
        float | None, Input("prefix_cache_hits", "headroom_engine_prefix_cache_hits_total")
    ] = None
    prefix_hit_lifetime_ratio: Annotated[float | None, Input("prefix_cache_hit_rate")] = None
    awake: Annotated[bool | None, Input("sleep_state", "headroom_engine_awake")] = None
    gpu_memory_utilization_ratio: Annotated[float | None, Input("gpu_memory_utilization")] = None
    kv_cache_memory_bytes: Annotated[float | None, Input("kv_cache_memory_bytes")] = None
    memory_bytes: Annotated[float | None, Input("memory_bytes")] = None
    started_at_seconds: Annotated[float | None, Input("process_start_time")] = None


INPUTS: Final[Mapping[str, Input]] = {
    field: hint.__metadata__[0]
    for field, hint in get_type_hints(EngineReading, include_extras=True).items()
    if get_origin(hint) is Annotated
}
"""The input that each field of EngineReading is filled from."""


class EnginePage(Struct, frozen=True, kw_only=True):
    """One page of an engine server, understood; `inputs` pairs every input of the profile with whether it was there."""

    profile: str
    engines: tuple[EngineReading, ...]
    inputs: tuple[tuple[str, bool], ...]


ProcessName = tuple[int, float]
"""A process by its pid and its start, in seconds since the epoch: a pid alone is given to another one later."""

SAME_START_SECONDS: Final = 2.0
"""Two programs tell the start of one process so far apart: the kernel's boot time moves when the clock is set."""


class EngineProcess(Struct, frozen=True, kw_only=True):
    """A process of the engine found in /proc.

    `started_at_seconds` is seconds since the epoch, `since_boot_seconds` since the boot. `cpu_seconds` is what it has
    computed so far, in all its threads. Of `rss_bytes`, `anonymous_bytes` is the process's own and `file_bytes` maps
    files, which the kernel can take back; the rest is shared memory. None where it is not told, as of the time computed
    in a trace.
    """

    pid: int
    role: Role
    rss_bytes: int
    started_at_seconds: float
    since_boot_seconds: float | None = None
    cpu_seconds: float | None = None
    anonymous_bytes: int | None = None
    file_bytes: int | None = None


class ProcessReadings(Struct, frozen=True, kw_only=True):
    """The engine's processes, and every pid that /proc shows.

    `sees_host_pids` is True in the machine's first PID namespace, where NVML and /proc always mean the same pid.
    `ambiguous_roots` is how many unrelated engines were found when none of them could be told to be the one that is
    watched: then `engine` is empty. `neighbours` are the servers, or first processes, of all engines in sight that were
    not taken for it. `ports` are those that the engine's command line names, or theirs where none is it. `orphans` are
    the pids of processes that a life of the engine left behind when it ended; `strays` are those of cores and workers
    whose server nobody saw alive, whom another has taken over, and of what hangs from them: no engine. `zombies` have
    ended and still have a pid: nothing runs in them but what a driver may hold. `host` is the memory of the machine and
    of the engine's container.
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
    host: HostReading = field(default_factory=HostReading)

    @property
    def left_behind(self) -> frozenset[int]:
        """The pids of what serves no engine any more."""
        return self.orphans | self.strays


class Life(Struct, frozen=True, kw_only=True):
    """What is known of the engine's life at one tick.

    `in_service` is whether what is seen now belongs to a life that has worked and goes on: what else is seen says
    nothing of leaks. It is None where the page tells nothing of work. `began_seconds` is seconds since the epoch.
    `ended` is why a life ended since the look before, None where none did.
    `recent_ends` is how many lives ended in the last 90 minutes. `progress_age_seconds` is None while there is nothing
    to do. `stranded` pairs the labels of an engine that has been idle for a minute with what its KV cache still holds,
    `to_wake` the UUID of a GPU with what a sleeping engine takes of it when it wakes, `first_rooms` with what was free
    on it when this life became ready; `first_host_room_bytes` is what was left of the host's memory then.
    """

    state: EngineState
    in_service: bool | None = True
    began_seconds: float | None = None
    restarts: int = 0
    exits: tuple[tuple[ExitReason, int], ...] = ()
    ended: ExitReason | None = None
    recent_ends: int = 0
    progress_age_seconds: float | None = None
    stranded: tuple[tuple[tuple[str, str], float], ...] = ()
    to_wake: tuple[tuple[str, int], ...] = ()
    first_rooms: tuple[tuple[str, int], ...] = ()
    first_host_room_bytes: int | None = None
