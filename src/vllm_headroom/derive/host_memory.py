"""The engine's host memory: its container or machine, and how much is in use."""

from collections.abc import Iterable, Mapping
from math import inf
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.readings import limit_remembered, make_facts, sum_known
from vllm_headroom.model import (
    Cgroup,
    EngineProcess,
    Failure,
    HostMemory,
    HostReading,
    MachineMemory,
    Metric,
    ProbeReadings,
    ProcessReadings,
    Sample,
    Shm,
    Snapshot,
)
from vllm_headroom.vocabulary import HOST_KINDS, HostBasis, HostPart, Role

FULL_SHARE: Final = 0.5
"""A container that was less full than this when it ended was not killed for memory: between two samples, 5 s, the
fastest reported leak takes 2 GB (vllm-project/vllm#35191), and a killed engine holds more."""


SCOPES: Final[Mapping[HostBasis | None, str]] = {
    HostBasis.CGROUP: " in the engine's container",
    HostBasis.MACHINE: " on the machine",
    HostBasis.PROBE: " in the engine's container, as the probe reads it",
    HostBasis.PROCESSES: " by the engine's processes and its /dev/shm",
}
"""Where the memory in use is counted, at the end of a sentence; a trace without it says nothing."""


class ContainerState(Struct, frozen=True, kw_only=True):
    """The last memory reading, and the scope of its figures: the engine's first process and what it was counted in.

    `kills` are all so far, `counted` the counter of each container, of which `container` is the newest.
    """

    memory: HostMemory = field(default_factory=HostMemory)
    root: str | None = None
    scope: HostMemory = field(default_factory=HostMemory)
    kills: int | None = None
    container: str = ""
    counted: dict[str, int] = field(default_factory=dict)
    machine_kills: int | None = None


def update_container(
    state: ContainerState,
    processes: ProcessReadings | Failure,
    probe: ProbeReadings | Failure | None = None,
    *,
    limit_bytes: int | None,
) -> tuple[ContainerState, HostMemory | None]:
    """Return the state and the host memory, from the most reliable source available.

    In order: the cgroup of the engine's processes; if it has no limit, the machine; the cgroup that the probe reads;
    else the processes' memory and /dev/shm. `limit_bytes`, from the settings, is the limit where the kernel reports
    none. None where nothing is known. While a run lasts its figures keep their scope, or are unknown.
    """
    inside, shm = _find_inside(probe)
    if isinstance(processes, Failure) and inside is None:
        return state, None
    reading = HostReading() if isinstance(processes, Failure) else processes.host
    engine = () if isinstance(processes, Failure) else processes.engine
    reading = replace(reading, shm=reading.shm or shm)
    root = None if inside is None else inside.identity
    if engine:
        root = f"{engine[0].pid}:{engine[0].started_at_seconds:.2f}"
    if (
        isinstance(processes, Failure)
        and state.root is not None
        and not state.root.startswith(PROBE)
    ):
        root = state.root
    memory = _choose_memory(reading.cgroup, inside, engine, reading, limit_bytes)
    scope = state.scope if root == state.root else HostMemory()
    same = (scope.basis, memory.basis) == (
        HostBasis.CGROUP,
        HostBasis.PROBE,
    )  # it reads the same container
    if _rank(memory) < _rank(scope) and not (same and scope.limit_bytes == memory.limit_bytes):
        memory = HostMemory()
    scope = max(memory, scope, key=_rank)
    if reading.shm is not None:
        memory = replace(
            memory, shm_used_bytes=reading.shm.used_bytes, shm_limit_bytes=reading.shm.total_bytes
        )
    state = _count_kills(state, reading.cgroup or inside, reading.machine, root)
    scopes = (reading.cgroup or inside, reading.machine)
    pressures = (scope.pressure_ratio for scope in scopes if scope is not None)
    pressure_ratio = next((ratio for ratio in pressures if ratio is not None), None)
    memory = replace(memory, oom_kills=state.kills, pressure_ratio=pressure_ratio)
    return replace(
        state, memory=memory, root=root, scope=scope
    ), None if memory == HostMemory() else memory


PROBE: Final = "probe:"


def _rank(memory: HostMemory) -> int:
    return (None, *reversed(HostBasis)).index(memory.basis)


def _find_inside(probe: ProbeReadings | Failure | None) -> tuple[Cgroup | None, Shm | None]:
    """Return the container and shared memory as the engine's processes read them; all share one container."""
    present = probe.present if isinstance(probe, ProbeReadings) else ()
    reading = next((each.host for each in present if each.host is not None), HostReading())
    if reading.cgroup is None:
        return None, reading.shm
    started_at_seconds = min(each.started_at_seconds for each in present)
    return replace(reading.cgroup, identity=f"{PROBE}{started_at_seconds:.0f}"), reading.shm


def _choose_memory(
    cgroup: Cgroup | None,
    inside: Cgroup | None,
    engine: tuple[EngineProcess, ...],
    reading: HostReading,
    limit_bytes: int | None,
) -> HostMemory:
    block = cgroup or inside
    if block is not None and (
        block.limit_bytes is not None or limit_bytes is not None or cgroup is None
    ):
        return HostMemory(
            basis=HostBasis.PROBE if cgroup is None else HostBasis.CGROUP,
            used_bytes=max(0, block.used_bytes - block.cache_bytes),
            limit_bytes=limit_bytes if block.limit_bytes is None else block.limit_bytes,
            swap_bytes=block.swap_bytes,
        )
    if cgroup is not None and reading.machine is not None:
        machine = reading.machine
        used_bytes = max(0, machine.total_bytes - machine.available_bytes)
        return HostMemory(
            basis=HostBasis.MACHINE,
            used_bytes=used_bytes,
            limit_bytes=machine.total_bytes,
            swap_bytes=machine.swap_bytes - machine.swap_free_bytes,
        )
    own_bytes = sum_known(
        process.anonymous_bytes for process in engine
    )  # without the files that they map
    if own_bytes is None:
        return HostMemory()
    shm_bytes = None if reading.shm is None else reading.shm.used_bytes
    used_bytes = own_bytes + max(shm_bytes or 0, count_shared(engine, shm_bytes))
    swap_bytes = sum_known(process.swap_bytes for process in engine)
    return HostMemory(
        basis=HostBasis.PROCESSES,
        used_bytes=used_bytes,
        limit_bytes=limit_bytes,
        swap_bytes=swap_bytes,
    )


def count_shared(processes: Iterable[EngineProcess], shm_bytes: int | None) -> int:
    """Return the least shared memory that these processes can hold, where so much of /dev/shm is in use.

    What is there counts once, however many of them map it. What CUDA pins is another process's never
    (vllm-project/vllm#53042: four workers had 192 GiB each, the machine 769).
    """
    shared = [each.shared_bytes or 0 for each in processes]
    if shm_bytes is None:
        return max(shared, default=0)
    return min(sum(shared), shm_bytes + sum(max(0, n_bytes - shm_bytes) for n_bytes in shared))


def _count_kills(
    state: ContainerState, cgroup: Cgroup | None, machine: MachineMemory | None, root: str | None
) -> ContainerState:
    """Add the kills since the last reading, each once, whoever reads the container and however often.

    When the engine has ended, its container's counter may be gone too. Then the machine's counter is used, if the
    container was near its limit. In a container that comes back, those kills are counted already.
    """
    kills, counted, machine_kills = (
        state.kills,
        state.counted,
        None if machine is None else machine.oom_kills,
    )
    used_bytes, full_bytes = (
        state.memory.used_bytes or 0,
        FULL_SHARE * (state.memory.limit_bytes or inf),
    )
    ended = state.root is not None and root != state.root and used_bytes >= full_bytes
    known = state.machine_kills if machine_kills is None else machine_kills
    killed = 0 if known is None or state.machine_kills is None else known - state.machine_kills
    if ended and killed > 0:
        kills = (kills or 0) + killed
        counted = {**counted, state.container: counted.get(state.container, 0) + killed}
    container = state.container
    if cgroup is not None and cgroup.oom_kills is not None:
        container = PROBE if cgroup.identity.startswith(PROBE) else cgroup.identity
        names = (
            {container, state.container} if PROBE in (container, state.container) else {container}
        )
        before = [
            counted[name] for name in names if name in counted
        ]  # the probe reads the container that /proc shows
        if not before and root == state.root:
            before = [cgroup.oom_kills]
        kills = (
            (kills or 0)
            + cgroup.oom_kills
            - max((n for n in before if n <= cgroup.oom_kills), default=0)
        )
        counted = {**limit_remembered(counted, {container}), container: cgroup.oom_kills}
    return replace(state, kills=kills, container=container, counted=counted, machine_kills=known)


FACTS: Final[tuple[tuple[Metric, str], ...]] = (
    (catalog.HOST_MEMORY_USED, "used_bytes"),
    (catalog.HOST_MEMORY_LIMIT, "limit_bytes"),
    (catalog.HOST_OOM_KILLS, "oom_kills"),
    (catalog.HOST_SHM_USED, "shm_used_bytes"),
    (catalog.HOST_SHM_LIMIT, "shm_limit_bytes"),
    (catalog.MEMORY_PRESSURE, "pressure_ratio"),
)


def derive_host_memory(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the memory of each role's processes and of the container; unknown values have no sample."""
    processes = () if isinstance(snapshot.processes, Failure) else snapshot.processes
    facts: list[tuple[Metric, tuple[str, ...], str]] = [
        (catalog.HOST_MEMORY, (), "rss_bytes"),
        (catalog.HOST_SWAP, (), "swap_bytes"),
    ]
    facts += [(catalog.HOST_MEMORY_KIND, (kind,), f"{kind}_bytes") for kind in HOST_KINDS]
    sums = (
        (
            metric,
            (str(role), *kind),
            sum_known(getattr(each, fact) for each in processes if each.role is role),
        )
        for metric, kind, fact in facts
        for role in Role
    )
    roles = (
        Sample(metric, labels, float(known)) for metric, labels, known in sums if known is not None
    )
    pools = (
        (part, [each.size_bytes for each in snapshot.pools if each.role and each.part is part])
        for part in HostPart
    )
    planned = (
        Sample(catalog.HOST_MEMORY_PLANNED, (str(part),), float(sum(sizes)))
        for part, sizes in pools
        if sizes
    )
    return (*roles, *planned, *make_facts(FACTS, (), snapshot.host))
