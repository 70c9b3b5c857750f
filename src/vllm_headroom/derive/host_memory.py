"""The engine's host memory: its container or machine, and how much is in use."""

from __future__ import annotations

from collections import Counter
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.readings import make_facts, sum_known
from vllm_headroom.model import (
    Cgroup,
    EngineProcess,
    Failure,
    HostMemory,
    HostReading,
    Metric,
    ProbeReadings,
    ProcessReadings,
    Sample,
    Shm,
    Snapshot,
)
from vllm_headroom.vocabulary import HostBasis, Role

FULL_SHARE: Final = 0.5
"""A container that was less full than this when it ended was not killed for memory: between two samples, 5 s, the
fastest reported leak takes 2 GB (vllm-project/vllm#35191), and a killed engine holds more."""


class ContainerState(Struct, frozen=True, kw_only=True):
    """The last memory reading, the container it was counted in, and the kill counts of container and machine."""

    memory: HostMemory = field(default_factory=HostMemory)
    identity: str | None = None
    counted: int = 0
    machine_kills: int | None = None


def update_container(
    state: ContainerState,
    processes: ProcessReadings | Failure,
    probe: ProbeReadings | Failure | None = None,
    *,
    limit_bytes: int | None,
) -> tuple[ContainerState, HostMemory | None]:
    """Return the state and the host memory, from the most reliable source available.

    In order: the cgroup of the engine's processes; the cgroup the probe reads; if the cgroup has no limit, the machine;
    else the processes' memory and /dev/shm. `limit_bytes`, from the settings, is the limit where the kernel reports
    none. None where nothing is known.
    """
    inside, shm = _find_inside(probe)
    if isinstance(processes, Failure) and inside is None:
        return state, None
    reading = HostReading() if isinstance(processes, Failure) else processes.host
    engine = () if isinstance(processes, Failure) else processes.engine
    reading = replace(reading, shm=reading.shm or shm)
    memory = _choose_memory(reading.cgroup, inside, engine, reading, limit_bytes)
    if reading.shm is not None:
        memory = replace(memory, shm_used_bytes=reading.shm.used_bytes, shm_limit_bytes=reading.shm.total_bytes)
    state = _count_kills(state, reading.cgroup or inside, reading, memory)
    return state, state.memory if state.memory != HostMemory() else None


def _find_inside(probe: ProbeReadings | Failure | None) -> tuple[Cgroup | None, Shm | None]:
    """Return the container and shared memory as the engine's processes read them; all share one container."""
    present = probe.present if isinstance(probe, ProbeReadings) else ()
    reading = next((each.host for each in present if each.host is not None), HostReading())
    if reading.cgroup is None:
        return None, reading.shm
    started_at_seconds = min(each.started_at_seconds for each in present)
    return replace(reading.cgroup, identity=f"probe:{started_at_seconds:.0f}"), reading.shm


def _choose_memory(
    cgroup: Cgroup | None,
    inside: Cgroup | None,
    engine: tuple[EngineProcess, ...],
    reading: HostReading,
    limit_bytes: int | None,
) -> HostMemory:
    block = cgroup or inside
    if block is not None and (block.limit_bytes is not None or limit_bytes is not None or cgroup is None):
        return HostMemory(
            basis=HostBasis.PROBE if cgroup is None else HostBasis.CGROUP,
            used_bytes=max(0, block.used_bytes - block.cache_bytes),
            limit_bytes=limit_bytes if block.limit_bytes is None else block.limit_bytes,
        )
    if cgroup is not None and reading.machine is not None:
        machine = reading.machine
        used_bytes = max(0, machine.total_bytes - machine.available_bytes)
        return HostMemory(basis=HostBasis.MACHINE, used_bytes=used_bytes, limit_bytes=machine.total_bytes)
    own_bytes = sum_known(process.anonymous_bytes for process in engine)  # without the files that they map
    if own_bytes is None:
        return HostMemory()
    used_bytes = int(own_bytes) + (0 if reading.shm is None else reading.shm.used_bytes)  # shared memory counts once
    return HostMemory(basis=HostBasis.PROCESSES, used_bytes=used_bytes, limit_bytes=limit_bytes)


def _count_kills(
    state: ContainerState, cgroup: Cgroup | None, reading: HostReading, memory: HostMemory
) -> ContainerState:
    """Add the kills since the last reading; when a container has gone, its own counter is gone too.

    Then the machine's counter is used, if the container was near its limit.
    """
    kills, machine_kills = state.memory.oom_kills, None if reading.machine is None else reading.machine.oom_kills
    identity = memory.basis and str(memory.basis) if cgroup is None else cgroup.identity
    ended = state.identity is not None and identity != state.identity and _was_full(state.memory)
    if ended and (killed := _count_rise(state.machine_kills, machine_kills)):
        kills = (kills or 0) + killed
    counted = None if cgroup is None else cgroup.oom_kills
    if counted is not None:
        kills = (kills or 0) + max(0, counted - (state.counted if identity == state.identity else 0))
    return ContainerState(
        memory=replace(memory, oom_kills=kills),
        identity=identity,
        counted=counted or 0,
        machine_kills=machine_kills,
    )


def _count_rise(before: int | None, now: int | None) -> int:
    return 0 if before is None or now is None else max(0, now - before)


def _was_full(memory: HostMemory) -> bool:
    used_bytes, limit_bytes = memory.used_bytes, memory.limit_bytes
    return used_bytes is not None and limit_bytes is not None and used_bytes >= FULL_SHARE * limit_bytes


FACTS: Final[tuple[tuple[Metric, str], ...]] = (
    (catalog.HOST_MEMORY_USED, "used_bytes"),
    (catalog.HOST_MEMORY_LIMIT, "limit_bytes"),
    (catalog.HOST_OOM_KILLS, "oom_kills"),
    (catalog.HOST_SHM_USED, "shm_used_bytes"),
    (catalog.HOST_SHM_LIMIT, "shm_limit_bytes"),
)


def derive_host_memory(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return resident bytes by role and the container's memory; unknown values have no sample."""
    resident: Counter[Role] = Counter()
    for process in () if isinstance(snapshot.processes, Failure) else snapshot.processes:
        resident[process.role] += process.rss_bytes
    roles = (Sample(catalog.HOST_MEMORY, (str(role),), float(resident[role])) for role in Role if role in resident)
    return (*roles, *make_facts(FACTS, (), snapshot.host))
