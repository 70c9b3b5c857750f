"""Which host memory does the engine run in, and how much of it is in use?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.readings import facts, together
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
"""A container that ended when it was less full than this was not killed for want of memory: between two looks, 5 s,
the fastest leak that was reported takes 2 GB (vllm-project/vllm#35191), and what is killed has more."""


class ContainerState(Struct, frozen=True, kw_only=True):
    """What was last seen: the memory, the container it was counted in, and both counts of kills at that time."""

    memory: HostMemory = field(default_factory=HostMemory)
    identity: str | None = None
    counted: int = 0
    machine_kills: int | None = None


def container(
    state: ContainerState,
    processes: ProcessReadings | Failure,
    probe: ProbeReadings | Failure | None = None,
    *,
    limit_bytes: int | None,
) -> tuple[ContainerState, HostMemory | None]:
    """Return the state and what is known of the host memory, from the surest source there is.

    The cgroup of the engine's processes; what the probe reads of its own; where the cgroup has no limit, the machine;
    else the processes' own memory and their /dev/shm, against the `limit_bytes` that the operator tells. That
    stands in wherever the kernel tells no limit. None where nothing at all is known.
    """
    inside, shm = _inside(probe)
    if isinstance(processes, Failure) and inside is None:
        return state, None
    reading = HostReading() if isinstance(processes, Failure) else processes.host
    engine = () if isinstance(processes, Failure) else processes.engine
    reading = replace(reading, shm=reading.shm or shm)
    memory = _memory(reading.cgroup, inside, engine, reading, limit_bytes)
    if reading.shm is not None:
        memory = replace(memory, shm_used_bytes=reading.shm.used_bytes, shm_limit_bytes=reading.shm.total_bytes)
    state = _counted(state, reading.cgroup or inside, reading, memory)
    return state, state.memory if state.memory != HostMemory() else None


def _inside(probe: ProbeReadings | Failure | None) -> tuple[Cgroup | None, Shm | None]:
    """Return the container and the shared memory as the engine's own processes read them; they have the same."""
    present = probe.present if isinstance(probe, ProbeReadings) else ()
    told = next((each.host for each in present if each.host is not None), None)
    if told is None:
        return None, None
    cgroup = shm = None
    if told.used_bytes is not None:
        cgroup = Cgroup(
            identity=f"probe:{min(each.started_at_seconds for each in present):.0f}",
            used_bytes=told.used_bytes,
            cache_bytes=told.file_bytes or 0,
            limit_bytes=told.limit_bytes,
            oom_kills=told.oom_kills,
        )
    if told.shm_used_bytes is not None and told.shm_limit_bytes is not None:
        shm = Shm(total_bytes=told.shm_limit_bytes, free_bytes=told.shm_limit_bytes - told.shm_used_bytes)
    return cgroup, shm


def _memory(
    cgroup: Cgroup | None,
    inside: Cgroup | None,
    engine: tuple[EngineProcess, ...],
    reading: HostReading,
    limit_bytes: int | None,
) -> HostMemory:
    told = cgroup or inside
    if told is not None and (told.limit_bytes is not None or limit_bytes is not None or cgroup is None):
        return HostMemory(
            basis=HostBasis.PROBE if cgroup is None else HostBasis.CGROUP,
            used_bytes=max(0, told.used_bytes - told.cache_bytes),
            limit_bytes=limit_bytes if told.limit_bytes is None else told.limit_bytes,
        )
    if cgroup is not None and reading.machine is not None:
        machine = reading.machine
        used_bytes = max(0, machine.total_bytes - machine.available_bytes)
        return HostMemory(basis=HostBasis.MACHINE, used_bytes=used_bytes, limit_bytes=machine.total_bytes)
    own = _own_bytes(engine, reading)
    return HostMemory() if own is None else replace(own, limit_bytes=limit_bytes)


def _own_bytes(engine: tuple[EngineProcess, ...], reading: HostReading) -> HostMemory | None:
    """Return the memory that is the processes' own, files that they map left out, and their shared memory once."""
    own_bytes = together(process.anonymous_bytes for process in engine)
    if own_bytes is None:
        return None
    shared_bytes = 0 if reading.shm is None else reading.shm.used_bytes
    return HostMemory(basis=HostBasis.PROCESSES, used_bytes=int(own_bytes) + shared_bytes)


def _counted(state: ContainerState, cgroup: Cgroup | None, reading: HostReading, memory: HostMemory) -> ContainerState:
    """Return the state with what was killed since: a container that has gone took its own count along.

    Then the machine's count tells, where the container was near its limit.
    """
    kills, machine_kills = state.memory.oom_kills, None if reading.machine is None else reading.machine.oom_kills
    identity = _identity(cgroup, memory)
    ended = state.identity is not None and identity != state.identity and _was_full(state.memory)
    if ended and (killed := _risen(state.machine_kills, machine_kills)):
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


def _identity(cgroup: Cgroup | None, memory: HostMemory) -> str | None:
    if cgroup is not None:
        return cgroup.identity
    return None if memory.basis is None else str(memory.basis)


def _risen(before: int | None, now: int | None) -> int:
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


def host_memory(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return resident bytes summed by role, and what is known of the container; what is unknown has no sample."""
    return (*_by_role(snapshot), *facts(FACTS, (), snapshot.host))


def _by_role(snapshot: Snapshot) -> Iterator[Sample]:
    if isinstance(snapshot.processes, Failure):
        return
    resident: Counter[Role] = Counter()
    for process in snapshot.processes:
        resident[process.role] += process.rss_bytes
    yield from (Sample(catalog.HOST_MEMORY, (str(role),), float(resident[role])) for role in Role if role in resident)
