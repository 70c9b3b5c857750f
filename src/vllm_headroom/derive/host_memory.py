"""The engine's host memory: its container or machine, and how much is in use."""

from collections.abc import Iterable, Iterator, Mapping
from math import inf
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.series import limit_remembered, make_facts
from vllm_headroom.derive.sums import sum_known
from vllm_headroom.model import (
    Cgroup,
    EngineProcess,
    Failure,
    HostMemory,
    HostReading,
    MachineMemory,
    Metric,
    Pool,
    ProbeReadings,
    ProcessReadings,
    Sample,
    Shm,
    Snapshot,
)
from vllm_headroom.vocabulary import HostBasis, HostPart, Role

HOST_KINDS: Final = ("anonymous", "file", "shared")
"""The kinds of a process's resident memory: the values of the label `kind`."""

FULL_SHARE: Final = 0.5
"""Below this share of its limit, a container did not lack memory. Its last sample counts. Samples
are 5 s apart. The fastest reported leak takes 2 GB in 5 s (vllm-project/vllm#35191). Half of the
limit is more than a leak takes between two samples.
"""


SCOPES: Final[Mapping[HostBasis | None, str]] = {
    HostBasis.CGROUP: " in the engine's container",
    HostBasis.MACHINE: " on the machine",
    HostBasis.PROBE: " in the engine's container, as the probe reads it",
    HostBasis.PROCESSES: " by the engine's processes and its /dev/shm",
}
"""What the figure for the memory in use covers, as the end of a sentence. Older traces have no
basis, and therefore no entry here.
"""


PROBE_PREFIX: Final = "probe:"
"""The prefix of a container's identity if only the probe inside can read the container."""


class ContainerState(Struct, frozen=True, kw_only=True):
    """The last reading of the host memory, and the state for comparing later readings."""

    memory: HostMemory = field(default_factory=HostMemory)
    """The last reading; a figure is None if it is unknown."""

    root: str | None = None
    """Identifies the run by the engine's root process. If only the probe can read the container,
    the container identifies the run.
    """

    scope: HostMemory = field(default_factory=HostMemory)
    """The reading with the most reliable basis in this run. Figures with a less reliable basis
    would describe something else. For example, they would describe the machine instead of the
    container.
    """

    kills: int | None = None
    """The kernel's OOM kills so far, in all containers. The value is None if no counter was read.
    """

    newest_container: str = ""
    """The container whose kill counter was read last."""

    kills_by_container: dict[str, int] = field(default_factory=dict)
    """The newest value of each container's kill counter."""

    machine_kills: int | None = None
    """The newest value of the machine's kill counter."""


def update_container(
    state: ContainerState,
    processes: ProcessReadings | Failure,
    probe: ProbeReadings | Failure | None = None,
    *,
    limit_bytes: int | None,
) -> tuple[ContainerState, HostMemory | None]:
    """Return the state and the host memory, from the most reliable source available.

    The sources, from the most to the least reliable, are:

    - the cgroup of the engine's processes, or the machine if the cgroup is unlimited;
    - the cgroup that the probe reads;
    - the sum of the processes' memory and /dev/shm.

    `limit_bytes`, from the settings, is used as the limit if the kernel reports none. The host
    memory is None if nothing is known. Within a run, figures from a less reliable source than
    before are dropped. The dropped figures are not comparable with the earlier ones.
    """
    probed_cgroup, probed_shm = _find_probed_host(probe)
    reading = HostReading()
    engine: tuple[EngineProcess, ...] = ()
    if not isinstance(processes, Failure):
        reading = processes.host
        engine = processes.engine
    elif probed_cgroup is None:
        return state, None
    # The probe sees the engine's own /dev/shm, even if the engine's /proc is hidden.
    reading = replace(reading, shm=reading.shm or probed_shm)
    cgroup = reading.cgroup or probed_cgroup

    root = _identify_root(state, processes, probed_cgroup)
    memory = _choose_memory(reading, probed_cgroup, engine, limit_bytes)
    # The next run may be in another container, so its scope starts empty.
    scope = state.scope if root == state.root else HostMemory()
    # A jump between the container's and the machine's figures would look like a leak. A jump down
    # would look like the end of a leak.
    if _has_lost_scope(memory, scope):
        memory = HostMemory()
    # `scope` keeps the most reliable basis of this run so far.
    scope = max(memory, scope, key=_rank_basis)

    if reading.shm is not None:
        memory = replace(
            memory,
            shm_used_bytes=reading.shm.used_bytes,
            shm_limit_bytes=reading.shm.total_bytes,
        )
    state = _count_kills(state, cgroup, reading.machine, root)
    memory = replace(
        memory,
        oom_kills=state.kills,
        pressure_ratio=_find_pressure(cgroup, reading.machine),
    )
    state = replace(state, memory=memory, root=root, scope=scope)
    if memory == HostMemory():
        return state, None
    return state, memory


def _identify_root(
    state: ContainerState, processes: ProcessReadings | Failure, probed_cgroup: Cgroup | None
) -> str | None:
    """Return the identity of this run, as in `ContainerState.root`, or None if there is none."""
    if isinstance(processes, Failure):
        # While /proc cannot be read, the last visible root process identifies the run.
        was_seen = state.root is not None and not state.root.startswith(PROBE_PREFIX)
        if was_seen:
            return state.root
    elif processes.engine:
        server = processes.engine[0]
        return f"{server.pid}:{server.started_at_seconds:.2f}"
    return None if probed_cgroup is None else probed_cgroup.identity


def _has_lost_scope(memory: HostMemory, scope: HostMemory) -> bool:
    """Return whether a reading's basis is less reliable than that of `scope`.

    `scope` is the most reliable reading of this run.
    """
    if _rank_basis(memory) >= _rank_basis(scope):
        return False
    # If the limits are equal, the probe reads the container that /proc showed. The probe's figures
    # are therefore comparable with those from /proc.
    is_same_container = scope.basis is HostBasis.CGROUP and memory.basis is HostBasis.PROBE
    return not (is_same_container and scope.limit_bytes == memory.limit_bytes)


def _rank_basis(memory: HostMemory) -> int:
    """Return a reading's reliability as a number, or 0 if it has no figures."""
    return (None, *reversed(HostBasis)).index(memory.basis)


def _find_pressure(cgroup: Cgroup | None, machine: MachineMemory | None) -> float | None:
    """Return the memory pressure of the container.

    If that is unknown, the machine's memory pressure is returned.
    """
    if cgroup is not None and cgroup.pressure_ratio is not None:
        return cgroup.pressure_ratio
    return None if machine is None else machine.pressure_ratio


def _find_probed_host(
    probe: ProbeReadings | Failure | None,
) -> tuple[Cgroup | None, Shm | None]:
    """Return the container and /dev/shm as the probe reads them.

    The container and /dev/shm are each None if unknown. All processes of the engine share the
    container and /dev/shm. The report of one process is therefore sufficient.
    """
    if not isinstance(probe, ProbeReadings):
        return None, None
    hosts = [process.host for process in probe.present if process.host is not None]
    if not hosts:
        return None, None
    host = hosts[0]
    if host.cgroup is None:
        return None, host.shm
    # The probe does not report its cgroup's identity. The start time of the oldest process is used
    # instead.
    started_at_seconds = min(process.started_at_seconds for process in probe.present)
    return replace(host.cgroup, identity=f"{PROBE_PREFIX}{started_at_seconds:.0f}"), host.shm


def _choose_memory(
    reading: HostReading,
    probed_cgroup: Cgroup | None,
    engine: tuple[EngineProcess, ...],
    limit_bytes: int | None,
) -> HostMemory:
    """Return the memory from the most reliable source, as described in `update_container`.

    If nothing is known, all figures of the result are None.
    """
    if reading.cgroup is None and probed_cgroup is not None:
        return _measure_cgroup(probed_cgroup, HostBasis.PROBE, limit_bytes)
    if reading.cgroup is not None:
        has_limit = reading.cgroup.limit_bytes is not None or limit_bytes is not None
        # A container without a limit may take all of the machine's memory.
        if has_limit:
            return _measure_cgroup(reading.cgroup, HostBasis.CGROUP, limit_bytes)
        if reading.machine is not None:
            return _measure_machine(reading.machine)
    return _measure_processes(engine, reading.shm, limit_bytes)


def _measure_cgroup(cgroup: Cgroup, basis: HostBasis, limit_bytes: int | None) -> HostMemory:
    """Return a cgroup's unreclaimable memory and its limit."""
    return HostMemory(
        basis=basis,
        used_bytes=max(0, cgroup.used_bytes - cgroup.cache_bytes),
        limit_bytes=limit_bytes if cgroup.limit_bytes is None else cgroup.limit_bytes,
        swap_bytes=cgroup.swap_bytes,
    )


def _measure_machine(machine: MachineMemory) -> HostMemory:
    """Return the machine's memory that is not available to a new process."""
    return HostMemory(
        basis=HostBasis.MACHINE,
        used_bytes=max(0, machine.total_bytes - machine.available_bytes),
        limit_bytes=machine.total_bytes,
        swap_bytes=machine.swap_bytes - machine.swap_free_bytes,
    )


def _measure_processes(
    engine: tuple[EngineProcess, ...], shm: Shm | None, limit_bytes: int | None
) -> HostMemory:
    """Return the private and shared memory of the processes, excluding mapped files.

    All figures are None if there are no processes, or if any process's private memory is unknown.
    """
    # Mapped files are excluded, because the kernel can drop them.
    private_bytes = sum_known(process.anonymous_bytes for process in engine)
    if private_bytes is None:
        return HostMemory()
    shm_bytes = None if shm is None else shm.used_bytes
    # The size of /dev/shm may be unknown, or include files that no process has mapped. Therefore,
    # the larger of this size and the processes' shared memory is used.
    shared_bytes = max(shm_bytes or 0, count_shared(engine, shm_bytes))
    return HostMemory(
        basis=HostBasis.PROCESSES,
        used_bytes=private_bytes + shared_bytes,
        limit_bytes=limit_bytes,
        swap_bytes=sum_known(process.swap_bytes for process in engine),
    )


def count_shared(processes: Iterable[EngineProcess], shm_bytes: int | None) -> int:
    """Return a lower bound on the shared memory that these processes hold together, in bytes.

    `shm_bytes` is how much of /dev/shm is in use, or None if that is unknown. Memory in /dev/shm
    counts once, no matter how many processes map it. Memory pinned by CUDA counts for each process,
    because processes cannot share it. In vllm-project/vllm#53042, four workers reported 192 GiB of
    shared memory each. The whole machine had only 769 GiB.
    """
    shared_sizes = [process.shared_bytes or 0 for process in processes]
    if shm_bytes is None:
        return max(shared_sizes, default=0)
    pinned_bytes = sum(max(0, n_bytes - shm_bytes) for n_bytes in shared_sizes)
    return min(sum(shared_sizes), shm_bytes + pinned_bytes)


def _count_kills(
    state: ContainerState, cgroup: Cgroup | None, machine: MachineMemory | None, root: str | None
) -> ContainerState:
    """Return the state after adding the kernel's OOM kills since the last reading.

    Each kill counts once, even if several sources show it. `root` identifies the container that is
    read now. If the previous reading had another root, the previous run has ended. The container of
    the previous run may be gone, along with its kill counter. If that container was at least half
    full, the machine's counter is used instead. If the container becomes visible again later, kills
    taken from the machine's counter are not counted twice.
    """
    has_ended = state.root is not None and root != state.root
    # The machine counts the kills of all containers. New kills are therefore attributed only to a
    # container that was full enough.
    if has_ended and _was_full(state.memory):
        state = _count_machine_kills(state, machine)
    if cgroup is not None and cgroup.oom_kills is not None:
        state = _count_container_kills(state, cgroup, cgroup.oom_kills, root)
    if machine is not None and machine.oom_kills is not None:
        state = replace(state, machine_kills=machine.oom_kills)
    return state


def _was_full(memory: HostMemory) -> bool:
    """Return whether the container was full enough for a kill, or False if unknown."""
    full_bytes = FULL_SHARE * (memory.limit_bytes or inf)
    return (memory.used_bytes or 0) >= full_bytes


def _count_machine_kills(state: ContainerState, machine: MachineMemory | None) -> ContainerState:
    """Add the machine's new kills to the last container that was read.

    Nothing is counted if the machine's previous or current count is unknown.
    """
    if machine is None or machine.oom_kills is None or state.machine_kills is None:
        return state
    new_kills = machine.oom_kills - state.machine_kills
    if new_kills <= 0:
        return state
    counted_kills = state.kills_by_container.get(state.newest_container, 0) + new_kills
    return replace(
        state,
        kills=(state.kills or 0) + new_kills,
        kills_by_container={**state.kills_by_container, state.newest_container: counted_kills},
    )


def _count_container_kills(
    state: ContainerState, cgroup: Cgroup, oom_kills: int, root: str | None
) -> ContainerState:
    """Return the state with a container's new kills; `oom_kills` is the value of its counter."""
    container = PROBE_PREFIX if cgroup.identity.startswith(PROBE_PREFIX) else cgroup.identity
    names = {container}
    # The probe and /proc read the same container under two names, which share one counter.
    if PROBE_PREFIX in (container, state.newest_container):
        names.add(state.newest_container)
    counters = state.kills_by_container
    earlier_kills = [counters[name] for name in names if name in counters]
    if not earlier_kills and root == state.root:
        # In the first reading of a run, the kills may predate the run.
        earlier_kills = [oom_kills]
    # If a counter fell, it was reset to 0, so all its kills are new.
    counted_kills = max((kills for kills in earlier_kills if kills <= oom_kills), default=0)
    kills_by_container = limit_remembered(counters, {container})
    kills_by_container[container] = oom_kills
    return replace(
        state,
        kills=(state.kills or 0) + oom_kills - counted_kills,
        newest_container=container,
        kills_by_container=kills_by_container,
    )


HOST_FACTS: Final[tuple[tuple[Metric, str], ...]] = (
    (catalog.HOST_MEMORY_USED, "used_bytes"),
    (catalog.HOST_MEMORY_LIMIT, "limit_bytes"),
    (catalog.HOST_OOM_KILLS, "oom_kills"),
    (catalog.HOST_SHM_USED, "shm_used_bytes"),
    (catalog.HOST_SHM_LIMIT, "shm_limit_bytes"),
    (catalog.MEMORY_PRESSURE, "pressure_ratio"),
)
"""The metrics of the host memory, and the fields of HostMemory that they export."""

PROCESS_FACTS: Final[tuple[tuple[Metric, tuple[str, ...], str], ...]] = (
    (catalog.HOST_MEMORY, (), "rss_bytes"),
    (catalog.HOST_SWAP, (), "swap_bytes"),
    *((catalog.HOST_MEMORY_KIND, (kind,), f"{kind}_bytes") for kind in HOST_KINDS),
)
"""Each metric of process memory, its labels besides the role, and its source. The source is a field
of EngineProcess, which is summed up.
"""


def derive_host_memory(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the samples for each role's processes, the pools and the container.

    An unknown figure has no sample.
    """
    return (
        *_sum_processes(snapshot.engine_processes),
        *_sum_pools(snapshot.pools),
        *make_facts(HOST_FACTS, (), snapshot.host),
    )


def _sum_processes(processes: tuple[EngineProcess, ...]) -> Iterator[Sample]:
    """Yield each role's sums over its processes.

    A role has no sum if any process's figure is unknown.
    """
    for metric, labels, fact in PROCESS_FACTS:
        for role in Role:
            n_bytes = sum_known(
                getattr(process, fact) for process in processes if process.role is role
            )
            if n_bytes is not None:
                yield Sample(metric, (str(role), *labels), float(n_bytes))


def _sum_pools(pools: tuple[Pool, ...]) -> Iterator[Sample]:
    """Yield, for each purpose, the configured size of its pools in host memory."""
    host_pools = [pool for pool in pools if pool.role]
    for part in HostPart:
        sizes = [pool.size_bytes for pool in host_pools if pool.part is part]
        if sizes:
            yield Sample(catalog.HOST_MEMORY_PLANNED, (str(part),), float(sum(sizes)))
