"""What attribution is given, tick by tick."""

from __future__ import annotations

from vllm_headroom.derive.attribution import AttributionState, Selection, attribute
from vllm_headroom.model import (
    EngineProcess,
    Failure,
    Gpu,
    GpuMemory,
    GpuProcess,
    GpuReading,
    GpuReadings,
    ProcessReadings,
)
from vllm_headroom.vocabulary import Reason, Role, Source

MIB = 2**20
GIB = 2**30
AUTO = Selection()
START = AttributionState()
NEW_DRIVER, MIDDLE_DRIVER, OLD_DRIVER = "565.57.01", "560.35.03", "535.104.12"
NO_PROC = Failure(source=Source.PROCESS, reason=Reason.UNAVAILABLE, message="no /proc")


def device(
    index: int, *holders: tuple[int, int | None], used: int = 80 * GIB, listed: bool = True, memory: bool = True
) -> GpuReading:
    """Return a device on which the `holders`, pairs of pid and bytes, are."""
    return GpuReading(
        index=index,
        uuid=f"GPU-{index}",
        name="H100",
        memory=GpuMemory(total_bytes=96 * GIB, used_bytes=used, free_bytes=0, reserved_bytes=0) if memory else None,
        processes=tuple(GpuProcess(pid=pid, used_bytes=held_bytes) for pid, held_bytes in holders) if listed else None,
    )


def gpus(*devices: GpuReading, driver: str | None = NEW_DRIVER) -> GpuReadings:
    return GpuReadings(driver_version=driver, devices=devices)


def engine(
    *pids: int,
    visible: tuple[int, ...] = (),
    host: bool = False,
    started: float = 1.0,
    ambiguous: int = 0,
    orphans: tuple[int, ...] = (),
) -> ProcessReadings:
    processes = tuple(
        EngineProcess(pid=pid, role=Role.WORKER, rss_bytes=1, started_at_seconds=started + pid) for pid in pids
    )
    return ProcessReadings(
        engine=processes,
        visible_pids=frozenset({*pids, *visible, *orphans}),
        sees_host_pids=host,
        ambiguous_engines=ambiguous,
        orphans=frozenset(orphans),
    )


def last(*ticks: tuple[GpuReadings, ProcessReadings | Failure], selection: Selection = AUTO) -> tuple[Gpu, ...]:
    """Return the GPUs after the last of the ticks."""
    state = START
    seen_gpus: tuple[Gpu, ...] = ()
    for readings, processes in ticks:
        state, seen_gpus = attribute(state, readings, processes, selection)
    return seen_gpus


def ledger(seen_gpus: tuple[Gpu, ...]) -> list[tuple[int | None, int | None]]:
    return [(gpu.engine_bytes, gpu.other_bytes) for gpu in seen_gpus]
