"""Hand-made facts for tests of the pure parts: small numbers, everything else unknown."""

from __future__ import annotations

from collections.abc import Iterable
from types import EllipsisType
from typing import Any, Final

from vllm_headroom.model import (
    EnginePage,
    EngineProcess,
    EngineReading,
    EngineStatus,
    Failure,
    Gpu,
    GpuMemory,
    GpuReading,
    HostMemory,
    Inside,
    LogReading,
    Metric,
    ProbedProcess,
    ProbeReadings,
    ReadingTime,
    Sample,
    Snapshot,
)
from vllm_headroom.vocabulary import Attribution, Reason, Role, Source

A_GPU: Final = ("0", "GPU-a")
AN_ENGINE: Final = ("m", "0")
_REASON: Final = {
    Source.ENGINE: Reason.UNREACHABLE,
    Source.NVML: Reason.DRIVER_MISSING,
    Source.PROCESS: Reason.UNAVAILABLE,
    Source.PROBE: Reason.NOT_FOUND,
    Source.LOG: Reason.NOT_FOUND,
}


def failure(source: Source) -> Failure:
    return Failure(source=source, reason=_REASON[source], message="it failed")


def engine(name: str = "0", model_name: str = "m", **engine_fields: Any) -> EngineReading:
    return EngineReading(model_name=model_name, engine=name, **engine_fields)


def page(*engines: EngineReading, inputs: tuple[tuple[str, bool], ...] = ()) -> EnginePage:
    return EnginePage(profile="vllm", engines=engines, inputs=inputs)


def gpu(
    *,
    index: int = 0,
    uuid: str = "GPU-a",
    total: int = 1000,
    used: int = 900,
    engine: int | None = None,
    other: int | None = None,
    held: int | EllipsisType | None = ...,
    attribution: Attribution | None = Attribution.PROCESS,
    memory: bool = True,
    inside: Inside | None = None,
    **reading_fields: Any,
) -> Gpu:
    """Return a GPU of the engine's, which is taken to hold all that is used unless `engine` or `held` says."""
    if held is ...:
        held = (used if engine is None else engine) if memory and attribution is not None else None
    gpu_memory = GpuMemory(total_bytes=total, used_bytes=used, free_bytes=total - used, reserved_bytes=None)
    return Gpu(
        reading=GpuReading(
            index=index, uuid=uuid, name="H100", memory=gpu_memory if memory else None, **reading_fields
        ),
        attribution=attribution,
        engine_bytes=engine,
        other_bytes=other,
        held_bytes=held,
        inside=inside,
    )


def probed(**probe_fields: Any) -> ProbedProcess:
    """Return a worker that wrote at second 1000 of the snapshots, and began with the epoch of their clock."""
    facts: dict[str, Any] = {
        "pid": 7,
        "started_at_seconds": 1_760_000_000.0,
        "written_at_seconds": 1_760_001_000.0,
        "interval_seconds": 5.0,
        "role": Role.WORKER,
    }
    return ProbedProcess(**facts | probe_fields)


def snapshot(
    *,
    at: float = 1000.0,
    engines: EnginePage | Failure | None = None,
    gpus: tuple[Gpu, ...] | Failure | None = None,
    processes: tuple[EngineProcess, ...] | Failure = (),
    reading_times: tuple[ReadingTime, ...] = (),
    host: HostMemory | None = None,
    probe: ProbeReadings | Failure | None = None,
    log: LogReading | Failure | None = None,
    engine_status: EngineStatus | None = None,
) -> Snapshot:
    return Snapshot(
        time_seconds=1_760_000_000.0 + at,
        monotonic_seconds=at,
        engines=page(engine()) if engines is None else engines,
        gpus=(gpu(),) if gpus is None else gpus,
        processes=processes,
        probe=probe,
        log=log,
        reading_times=reading_times,
        host=host,
        engine_status=engine_status,
    )


def only(samples: Iterable[Sample], metric: Metric) -> Sample:
    """Return the one sample of `metric`; fail where there is none or more."""
    (sample,) = (sample for sample in samples if sample.metric is metric)
    return sample


def values(samples: Iterable[Sample], metric: Metric) -> dict[tuple[str, ...], float]:
    """Return the values of `metric` by its label values."""
    return {sample.labels: sample.value for sample in samples if sample.metric is metric}
