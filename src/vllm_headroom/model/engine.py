"""What is known of the engine: its page, its processes, its life."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from vllm_headroom.model.host import HostReading
from vllm_headroom.vocabulary import EngineState, ExitReason, Role


def _input(name: str, metric: str | None = None) -> Any:  # noqa: ANN401 - as dataclasses.field
    """Return the field of an input, by its name in `headroom_input_available`; `metric` shows it as it is."""
    return field(default=None, metadata={"input": name, "metric": metric})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """What one engine (one data-parallel rank) says of itself; None where the page does not offer it."""

    model_name: str
    engine: str
    running: float | None = _input("requests_running", "headroom_engine_requests_running")
    waiting: float | None = _input("requests_waiting", "headroom_engine_requests_waiting")
    finished_total: float | None = _input("requests_finished", "headroom_engine_requests_finished_total")
    preemptions_total: float | None = _input("preemptions", "headroom_engine_preemptions_total")
    prompt_tokens_total: float | None = _input("prompt_tokens", "headroom_engine_prompt_tokens_total")
    generation_tokens_total: float | None = _input("generation_tokens", "headroom_engine_generation_tokens_total")
    steps_total: float | None = _input("scheduler_steps")
    kv_used_ratio: float | None = _input("kv_cache_usage", "headroom_engine_kv_cache_used_ratio")
    kv_capacity_tokens: float | None = _input("kv_cache_capacity", "headroom_engine_kv_cache_capacity_tokens")
    kv_cache_dtype: str | None = _input("kv_cache_dtype")
    prefix_queries_total: float | None = _input("prefix_cache_queries", "headroom_engine_prefix_cache_queries_total")
    prefix_hits_total: float | None = _input("prefix_cache_hits", "headroom_engine_prefix_cache_hits_total")
    prefix_hit_lifetime_ratio: float | None = _input("prefix_cache_hit_rate")
    awake: bool | None = _input("sleep_state", "headroom_engine_awake")
    gpu_memory_utilization_ratio: float | None = _input("gpu_memory_utilization")
    kv_cache_memory_bytes: float | None = _input("kv_cache_memory_bytes")
    memory_bytes: float | None = _input("memory_bytes")
    started_at_seconds: float | None = _input("process_start_time")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePage:
    """One page of an engine server, understood; `inputs` pairs every input of the profile with whether it was there."""

    profile: str
    engines: tuple[EngineReading, ...]
    inputs: tuple[tuple[str, bool], ...]


ProcessName = tuple[int, float]
"""A process by its pid and its start, in seconds since the epoch: a pid alone is given to another one later."""

SAME_START_SECONDS: Final = 2.0
"""Two programs tell the start of one process so far apart: the kernel's boot time moves when the clock is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcess:
    """A process of the engine found in /proc.

    `started_at_seconds` is seconds since the epoch. `cpu_seconds` is what it has computed so far, in all its threads.
    Of `rss_bytes`, `anonymous_bytes` is the process's own and `file_bytes` maps files, which the kernel can take back;
    the rest is shared memory. None where it is not told, as of the time computed in a trace.
    """

    pid: int
    role: Role
    rss_bytes: int
    started_at_seconds: float
    cpu_seconds: float | None = None
    anonymous_bytes: int | None = None
    file_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReadings:
    """The engine's processes, and every pid that /proc shows.

    `sees_host_pids` is True in the machine's first PID namespace, where NVML and /proc always mean the same pid.
    `ambiguous_roots` is how many unrelated engines were found when none of them could be told to be the one that is
    watched: then `engine` is empty. `neighbours` are the servers, or first processes, of all engines in sight that were
    not taken for it. `orphans` are the pids of processes that a life of the engine left behind when it
    ended; `strays` are those of cores and workers that init has taken over from a server which nobody saw alive, and of
    what hangs from them: no engine. `zombies` have ended and still have a pid: nothing runs in them but what a driver
    may hold. `host` is the memory of the machine and of the engine's container.
    """

    engine: tuple[EngineProcess, ...]
    visible_pids: frozenset[int]
    sees_host_pids: bool
    ambiguous_roots: int = 0
    neighbours: frozenset[ProcessName] = frozenset()
    orphans: frozenset[int] = frozenset()
    strays: frozenset[int] = frozenset()
    zombies: frozenset[int] = frozenset()
    host: HostReading = field(default_factory=HostReading)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What is known of the engine's life at one tick.

    `in_service` is whether what is seen now belongs to a life that has worked and goes on: what else is seen says
    nothing of leaks. `began_seconds` is seconds since the epoch. `recent_ends` is how many lives ended in the last 90
    minutes. `progress_age_seconds` is None while there is nothing to do. `stranded` pairs the labels of an engine that
    has been idle for a minute with what its KV cache still holds, `to_wake` the UUID of a GPU with what a sleeping
    engine takes of it when it wakes, `first_rooms` with what was free on it when this life became ready;
    `first_host_room_bytes` is what was left of the host's memory then.
    """

    state: EngineState
    in_service: bool = True
    began_seconds: float | None = None
    restarts: int = 0
    exits: tuple[tuple[ExitReason, int], ...] = ()
    recent_ends: int = 0
    progress_age_seconds: float | None = None
    stranded: tuple[tuple[tuple[str, str], float], ...] = ()
    to_wake: tuple[tuple[str, int], ...] = ()
    first_rooms: tuple[tuple[str, int], ...] = ()
    first_host_room_bytes: int | None = None
