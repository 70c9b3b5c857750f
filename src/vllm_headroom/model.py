"""The facts that flow through the daemon: frozen values whose names end in their unit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_headroom.vocabulary import Attribution, EngineState, ExitReason, Kind, Reason, Role, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One exported family, a counter's name in `_total`; `needs` are the engine's facts that it is absent without."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric; `labels` are the values in the order of `metric.labels`."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A reading that failed; `message` is one sentence for the operator that says what to do."""

    source: Source
    reason: Reason
    message: str


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """NVML memory info v2; in v1, `reserved_bytes` is None and `used_bytes` contains the reserved memory."""

    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A compute process on a GPU; `used_bytes` is None where the driver does not tell."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """What NVML says of one device, a whole GPU or a MIG instance; None where the device does not support it.

    `failure` is set when the device cannot be read: then everything but index, uuid, name and xid_errors is None.
    `processes` is None when the list could not be read, which is not the same as an empty list.
    `xid_errors` pairs XID codes with their count since the daemon started.
    """

    index: int
    uuid: str
    name: str
    memory: GpuMemory | None = None
    used_peak_bytes: int | None = None
    utilization_ratio: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    xid_errors: tuple[tuple[int, int], ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReadings:
    """All devices NVML shows; `driver_version` is None where the driver does not tell it."""

    driver_version: str | None
    devices: tuple[GpuReading, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcess:
    """A process of the engine found in /proc; `started_at_seconds` is seconds since the epoch."""

    pid: int
    role: Role
    rss_bytes: int
    started_at_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReadings:
    """The engine's processes, and every pid that /proc shows.

    `sees_host_pids` is True in the machine's first PID namespace, where NVML and /proc always mean the same pid.
    `ambiguous_roots` is how many unrelated engines were found when none of them could be told to be the one that is
    watched: then `engine` is empty. `orphans` are the pids of processes that a life of the engine left behind when it
    ended. `sees_others` is False where /proc shows nothing but the daemon's own processes.
    """

    engine: tuple[EngineProcess, ...]
    visible_pids: frozenset[int]
    sees_host_pids: bool
    ambiguous_roots: int = 0
    orphans: frozenset[int] = frozenset()
    sees_others: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A device with its owner: `attribution` is None where it is not taken for the engine's.

    `engine_bytes` and `other_bytes` are None where the processes on the device cannot be told apart.
    `held_bytes` is what the engine is taken to hold: `engine_bytes`, or where these can never be known all that is used
    and not known to be others'; None while they are unknown for now, and on a device that is not the engine's.
    `process_count` is the number of compute processes NVML lists.
    """

    reading: GpuReading
    attribution: Attribution | None
    engine_bytes: int | None = None
    other_bytes: int | None = None
    held_bytes: int | None = None
    process_count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingTime:
    """When the reading of one source ended, and how long it took, both on the machine's monotonic clock."""

    source: Source
    seconds: float
    ended_monotonic_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What is known of the engine's life at one tick.

    `in_service` is whether what is seen now belongs to a life that has worked and goes on: what else is seen says
    nothing of leaks. `began_seconds` is seconds since the epoch. `progress_age_seconds` is None while there is nothing
    to do. `stranded` pairs the labels of an engine that has been idle for a minute with what its KV cache still holds.
    """

    state: EngineState
    in_service: bool = True
    began_seconds: float | None = None
    restarts: int = 0
    exits: tuple[tuple[ExitReason, int], ...] = ()
    progress_age_seconds: float | None = None
    stranded: tuple[tuple[tuple[str, str], float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything one tick saw: the only input of a derivation besides its own state.

    `time_seconds` is seconds since the epoch, for showing; `monotonic_seconds` is for arithmetic. `life` is None where
    nobody follows the engine's life.
    """

    time_seconds: float
    monotonic_seconds: float
    engines: EnginePage | Failure
    gpus: tuple[Gpu, ...] | Failure
    processes: tuple[EngineProcess, ...] | Failure
    reading_times: tuple[ReadingTime, ...] = ()
    life: Life | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a scrape sees: the samples of one tick and when that tick ended."""

    samples: tuple[Sample, ...]
    monotonic_seconds: float
