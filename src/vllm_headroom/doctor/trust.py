"""Would the daemon believe what this driver says of processes?"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_headroom.derive.attribution import AttributionState, Selection, attribute
from vllm_headroom.model import EngineProcess, GpuMemory, GpuProcess, GpuReading, GpuReadings, ProcessReadings
from vllm_headroom.vocabulary import Attribution, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """Whether NVML and /proc mean the same process by a pid, and whether the memory beside it is that process's."""

    pids: bool
    memory: bool


def trust(driver_version: str | None, *, sees_host_pids: bool) -> Trust:
    """Ask the daemon's attribution, with an engine's process on a GPU of one's own making."""
    pid, held_bytes = 1, 1
    device = GpuReading(
        index=0,
        uuid="",
        name="",
        memory=GpuMemory(total_bytes=held_bytes, used_bytes=held_bytes, free_bytes=0, reserved_bytes=0),
        processes=(GpuProcess(pid=pid, used_bytes=held_bytes),),
    )
    process = EngineProcess(pid=pid, role=Role.ENGINE_CORE, rss_bytes=0, started_at_seconds=0.0)
    seen = ProcessReadings(engine=(process,), visible_pids=frozenset({pid}), sees_host_pids=sees_host_pids)
    readings = GpuReadings(driver_version=driver_version, devices=(device,))
    _, (gpu,) = attribute(AttributionState(), readings, seen, Selection())
    return Trust(pids=gpu.attribution is Attribution.PROCESS, memory=gpu.engine_bytes is not None)
