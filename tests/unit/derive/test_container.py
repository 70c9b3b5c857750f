from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from tests.samples import failure, snapshot, values
from vllm_headroom import catalog
from vllm_headroom.derive.host_memory import ContainerState, derive_host_memory, update_container
from vllm_headroom.model import (
    Cgroup,
    EngineProcess,
    Failure,
    HostMemory,
    HostReading,
    MachineMemory,
    ProbedProcess,
    ProbeReadings,
    ProcessReadings,
    Shm,
)
from vllm_headroom.vocabulary import HostBasis, Role, Source

GIB = 2**30
SERVER = EngineProcess(
    pid=20, role=Role.API_SERVER, rss_bytes=9 * GIB, started_at_seconds=1.0, anonymous_bytes=2 * GIB, file_bytes=6 * GIB
)
CORE = replace(SERVER, pid=21, role=Role.ENGINE_CORE, anonymous_bytes=3 * GIB)
CGROUP = Cgroup(identity="a", used_bytes=60 * GIB, cache_bytes=57 * GIB, limit_bytes=64 * GIB, oom_kills=0)
MACHINE = MachineMemory(total_bytes=512 * GIB, available_bytes=400 * GIB, oom_kills=5)


def readings(*engine: EngineProcess, **host_fields: Any) -> ProcessReadings:
    return ProcessReadings(
        engine=engine, visible_pids=frozenset(), sees_host_pids=True, host=HostReading(machine=MACHINE, **host_fields)
    )


def host(processes: ProcessReadings | Failure, **container_fields: Any) -> HostMemory | None:
    return update_container(ContainerState(), processes, **{"limit_bytes": None, **container_fields})[1]


def probed(block: HostReading | None) -> ProbeReadings:
    """Return what the probe of one process says, beside one that says nothing of the host."""
    other_probed_process = ProbedProcess(
        pid=7, started_at_seconds=1.0, written_at_seconds=2.0, interval_seconds=5.0, role=Role.WORKER
    )
    return ProbeReadings(present=(other_probed_process, replace(other_probed_process, pid=8, host=block)))


def followed(looks: Iterable[ProcessReadings | Failure], limit_bytes: int | None = None) -> list[int | None]:
    """Return the kills known after each look."""
    state, kills = ContainerState(), []
    for look in looks:
        state, host_memory = update_container(state, look, limit_bytes=limit_bytes)
        kills.append(None if host_memory is None else host_memory.oom_kills)
    return kills


def test_a_cgroup_tells_what_counts_against_its_limit() -> None:
    assert host(readings(SERVER, cgroup=CGROUP)) == HostMemory(
        basis=HostBasis.CGROUP, used_bytes=3 * GIB, limit_bytes=64 * GIB, oom_kills=0
    )


def test_a_page_cache_that_fills_95_percent_is_no_pressure() -> None:
    host_memory = host(readings(SERVER, cgroup=replace(CGROUP, used_bytes=64 * GIB, cache_bytes=61 * GIB)))

    assert host_memory is not None
    assert host_memory.room_bytes == 61 * GIB


def test_a_cgroup_without_a_limit_takes_the_machines() -> None:
    assert host(readings(SERVER, cgroup=replace(CGROUP, limit_bytes=None, oom_kills=None))) == HostMemory(
        basis=HostBasis.MACHINE, used_bytes=112 * GIB, limit_bytes=512 * GIB, swap_bytes=0
    )


def test_a_cgroup_without_a_limit_has_the_one_that_the_operator_tells() -> None:
    host_memory = host(readings(SERVER, cgroup=replace(CGROUP, limit_bytes=None)), limit_bytes=32 * GIB)

    assert host_memory is not None
    assert (host_memory.basis, host_memory.used_bytes, host_memory.limit_bytes) == (HostBasis.CGROUP, 3 * GIB, 32 * GIB)


def test_the_kernels_limit_comes_before_what_was_reported() -> None:
    host_memory = host(readings(SERVER, cgroup=CGROUP), limit_bytes=32 * GIB)

    assert host_memory is not None
    assert host_memory.limit_bytes == 64 * GIB


def test_without_the_tree_the_probe_tells() -> None:
    cgroup = Cgroup(identity="probe", used_bytes=40 * GIB, cache_bytes=30 * GIB, limit_bytes=None, oom_kills=None)
    block = HostReading(cgroup=cgroup, shm=Shm(total_bytes=2 * GIB, free_bytes=GIB))

    host_memory = host(readings(SERVER), probe=probed(block), limit_bytes=48 * GIB)

    assert host_memory is not None
    assert (host_memory.basis, host_memory.used_bytes, host_memory.limit_bytes) == (HostBasis.PROBE, 10 * GIB, 48 * GIB)
    assert (host_memory.shm_used_bytes, host_memory.shm_limit_bytes) == (GIB, 2 * GIB)


def test_the_probe_is_enough_where_no_process_can_be_seen() -> None:
    cgroup = Cgroup(identity="probe", used_bytes=5, cache_bytes=0, limit_bytes=9, oom_kills=2)

    host_memory = host(failure(Source.PROCESS), probe=probed(HostReading(cgroup=cgroup)))

    assert host_memory == HostMemory(basis=HostBasis.PROBE, used_bytes=5, limit_bytes=9, oom_kills=2)


def test_a_probe_that_says_nothing_of_the_host_is_none() -> None:
    assert host(failure(Source.PROCESS), probe=probed(None)) is None
    assert host(failure(Source.PROCESS), probe=probed(HostReading())) is None


def test_without_both_the_processes_own_memory_and_their_shared_memory_are_summed() -> None:
    host_memory = host(readings(SERVER, CORE, shm=Shm(total_bytes=8 * GIB, free_bytes=7 * GIB)), limit_bytes=48 * GIB)

    assert host_memory == HostMemory(
        basis=HostBasis.PROCESSES,
        used_bytes=6 * GIB,
        limit_bytes=48 * GIB,
        shm_used_bytes=GIB,
        shm_limit_bytes=8 * GIB,
    )


def test_a_limit_that_nobody_tells_is_unknown_and_not_the_machines() -> None:
    host_memory = host(readings(SERVER, CORE))

    assert host_memory is not None
    assert (host_memory.used_bytes, host_memory.limit_bytes, host_memory.room_bytes) == (5 * GIB, None, None)


@pytest.mark.parametrize(
    ("shm", "shared", "counted"),
    [
        (Shm(total_bytes=8 * GIB, free_bytes=7 * GIB), (5, 4), 8),
        (Shm(total_bytes=8 * GIB, free_bytes=2 * GIB), (5, 4), 6),
        (None, (5, 4), 5),
    ],
)
def test_what_the_processes_pin_counts_and_what_they_share_counts_once(
    shm: Shm | None, shared: tuple[int, int], counted: int
) -> None:
    processes = (replace(process, shared_bytes=n * GIB) for process, n in zip((SERVER, CORE), shared, strict=True))
    host_memory = host(readings(*processes, shm=shm))

    assert host_memory is not None
    assert host_memory.used_bytes == (5 + counted) * GIB


@pytest.mark.parametrize(
    "process_readings",
    [
        readings(),
        readings(SERVER, replace(CORE, anonymous_bytes=None)),
        failure(Source.PROCESS),
    ],
)
def test_nothing_is_made_up(process_readings: ProcessReadings | Failure) -> None:
    assert host(process_readings, limit_bytes=48 * GIB) is None


def test_kills_in_the_container_are_counted_over_its_ends() -> None:
    def alive(identity: str, kills: int) -> ProcessReadings:
        return readings(SERVER, cgroup=replace(CGROUP, identity=identity, oom_kills=kills, cache_bytes=20 * GIB))

    looks: list[ProcessReadings | Failure] = [
        alive("a", 2),
        alive("a", 3),
        failure(Source.PROCESS),
        alive("a", 3),
        readings(),
        alive("b", 0),
    ]

    assert followed([*looks, alive("b", 1)]) == [2, 3, None, 3, 3, 3, 4]


def killed(used_bytes: int, machine_kills: int) -> list[ProcessReadings]:
    """Return a container that has so much in use and is gone, while the machine killed so many since."""
    later_machine = replace(MACHINE, oom_kills=5 + machine_kills)
    return [
        readings(SERVER, cgroup=replace(CGROUP, used_bytes=used_bytes, cache_bytes=0)),
        ProcessReadings(
            engine=(), visible_pids=frozenset(), sees_host_pids=True, host=HostReading(machine=later_machine)
        ),
    ]


@pytest.mark.parametrize(
    ("used_gib", "machine_kills", "kills"),
    [(60, 2, 2), (60, 0, 0), (33, 1, 1), (31, 1, 0)],
    ids=["killed", "ended", "steeply", "somebody else"],
)
def test_a_container_that_went_with_its_count_was_killed_if_it_was_full_and_the_machine_killed(
    used_gib: int, machine_kills: int, kills: int
) -> None:
    assert followed(killed(used_gib * GIB, machine_kills)) == [0, kills]


def test_where_no_cgroup_is_seen_the_end_of_the_processes_tells() -> None:
    later_machine = replace(MACHINE, oom_kills=6)
    processes = ProcessReadings(
        engine=(), visible_pids=frozenset(), sees_host_pids=True, host=HostReading(machine=later_machine)
    )

    assert followed([readings(SERVER, CORE), processes], limit_bytes=6 * GIB) == [None, 1]
    assert followed([readings(SERVER, CORE), processes], limit_bytes=60 * GIB) == [None, None]
    assert followed([readings(SERVER, CORE), processes]) == [None, None]


def gone(machine_kills: int) -> ProcessReadings:
    later_machine = replace(MACHINE, oom_kills=machine_kills)
    return ProcessReadings(
        engine=(), visible_pids=frozenset(), sees_host_pids=True, host=HostReading(machine=later_machine)
    )


def test_one_kill_counts_once_whoever_reads_it_and_after_a_restart_in_the_same_container() -> None:
    full = replace(CGROUP, cache_bytes=0)
    inside = probed(HostReading(cgroup=replace(full, identity="probe", oom_kills=1)))
    again = replace(SERVER, pid=30)
    hit = replace(readings(again, cgroup=replace(full, oom_kills=1)).host, machine=replace(MACHINE, oom_kills=6))
    restarted = replace(readings(again), host=hit)
    looks: list[tuple[ProcessReadings | Failure, ProbeReadings | None]] = [
        (readings(SERVER, cgroup=full), None),
        (gone(6), None),
        (restarted, None),
        (failure(Source.PROCESS), inside),
        (restarted, inside),
        (gone(6), inside),
        (failure(Source.PROCESS), inside),
    ]
    state, kills = ContainerState(), []
    for look, probe in looks:
        state, host_memory = update_container(state, look, probe, limit_bytes=None)
        kills.append(None if host_memory is None else host_memory.oom_kills)

    assert kills == [0, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("kills_before", [0, 1])
def test_an_old_kill_is_no_new_one_where_the_probe_reads_on_after_the_engine_has_ended(kills_before: int) -> None:
    """Seen on a real vLLM: torch ran out of memory, and an older kill made the kernel the surely named cause."""
    there = readings(SERVER, cgroup=replace(CGROUP, oom_kills=kills_before))
    inside = probed(HostReading(cgroup=replace(CGROUP, identity="probe", oom_kills=kills_before)))
    later = probed(HostReading(cgroup=replace(CGROUP, identity="probe", oom_kills=kills_before + 1)))
    state, kills = ContainerState(), []
    again = readings(replace(SERVER, pid=30), cgroup=replace(CGROUP, oom_kills=kills_before + 1))
    for look, probe in ((there, inside), (gone(5), inside), (gone(5), later), (again, later)):
        state, host_memory = update_container(state, look, probe, limit_bytes=None)
        kills.append(host_memory and host_memory.oom_kills)

    assert kills == [kills_before, kills_before, kills_before + 1, kills_before + 1]


def test_a_container_that_starts_its_count_again_is_another() -> None:
    def inside(began: float, kills: int) -> ProbeReadings:
        block = HostReading(cgroup=replace(CGROUP, identity="probe", cache_bytes=0, oom_kills=kills))
        return ProbeReadings(
            present=tuple(replace(process, started_at_seconds=began) for process in probed(block).present)
        )

    state, kills = ContainerState(), []
    for began, count in ((1.0, 2), (2.0, 0), (2.0, 1), (3.0, 1)):
        state, host_memory = update_container(state, failure(Source.PROCESS), inside(began, count), limit_bytes=None)
        kills.append(host_memory and host_memory.oom_kills)

    assert kills == [2, 2, 3, 3]


def follow_figures(
    looks: Iterable[tuple[ProcessReadings | Failure, ProbeReadings | None]],
) -> list[tuple[HostBasis | None, int | None]]:
    """Return basis and limit after each look."""
    state, figures = ContainerState(), []
    for look, probe in looks:
        state, host_memory = update_container(state, look, probe, limit_bytes=32 * GIB)
        figures.append((None, None) if host_memory is None else (host_memory.basis, host_memory.limit_bytes))
    return figures


def test_while_a_run_lasts_its_figures_keep_their_scope() -> None:
    own = readings(SERVER, cgroup=CGROUP)
    inside = probed(HostReading(cgroup=replace(CGROUP, identity="probe")))
    outside = probed(HostReading(cgroup=replace(CGROUP, identity="probe", limit_bytes=9 * GIB)))
    nothing = readings(SERVER)
    lost = failure(Source.PROCESS)

    figures = follow_figures(
        [
            (nothing, None),
            (nothing, outside),
            (own, None),
            (nothing, None),
            (lost, inside),
            (lost, outside),
            (own, None),
        ]
    )

    assert figures == [
        (HostBasis.PROCESSES, 32 * GIB),
        (HostBasis.PROBE, 9 * GIB),
        (HostBasis.CGROUP, 64 * GIB),
        (None, None),
        (HostBasis.PROBE, 64 * GIB),
        (None, None),
        (HostBasis.CGROUP, 64 * GIB),
    ]
    assert follow_figures([(own, None), (gone(5), None), (nothing, None)])[-1] == (HostBasis.PROCESSES, 32 * GIB)


def test_what_is_swapped_out_is_that_of_the_scope() -> None:
    swapping = tuple(replace(process, swap_bytes=GIB) for process in (SERVER, CORE))
    machine = replace(MACHINE, swap_bytes=8 * GIB, swap_free_bytes=5 * GIB)
    on_machine = readings(SERVER, cgroup=replace(CGROUP, limit_bytes=None))
    looks = {
        readings(*swapping, cgroup=replace(CGROUP, swap_bytes=5 * GIB)): 5 * GIB,
        replace(on_machine, host=replace(on_machine.host, machine=machine)): 3 * GIB,
        readings(*swapping): 2 * GIB,
        readings(SERVER, CORE): None,
    }

    assert [host_memory and host_memory.swap_bytes for host_memory in map(host, looks)] == list(looks.values())


def test_resident_and_swapped_out_memory_are_summed_by_role() -> None:
    sample = snapshot(processes=(SERVER, replace(CORE, swap_bytes=5), replace(CORE, pid=22, swap_bytes=2)))

    assert values(derive_host_memory(sample), catalog.HOST_MEMORY) == {
        ("api_server",): 9.0 * GIB,
        ("engine_core",): 18.0 * GIB,
    }
    assert values(derive_host_memory(sample), catalog.HOST_SWAP) == {("engine_core",): 7.0}
    assert values(derive_host_memory(sample), catalog.HOST_MEMORY_KIND) == {
        ("api_server", "anonymous"): 2.0 * GIB,
        ("api_server", "file"): 6.0 * GIB,
        ("engine_core", "anonymous"): 6.0 * GIB,
        ("engine_core", "file"): 12.0 * GIB,
    }


def test_what_is_known_is_exported_and_what_is_not_is_absent() -> None:
    known_snapshot = replace(
        snapshot(processes=(SERVER,)),
        host=HostMemory(used_bytes=5, limit_bytes=9, shm_used_bytes=0, shm_limit_bytes=4, oom_kills=0),
    )
    metrics = (
        catalog.HOST_MEMORY_USED,
        catalog.HOST_MEMORY_LIMIT,
        catalog.HOST_SHM_USED,
        catalog.HOST_SHM_LIMIT,
        catalog.HOST_OOM_KILLS,
    )

    assert [values(derive_host_memory(known_snapshot), metric).get(()) for metric in metrics] == [5, 9, 0, 4, 0]
    unknown = replace(known_snapshot, host=HostMemory(used_bytes=5))
    assert [values(derive_host_memory(unknown), metric).get(()) for metric in metrics] == [5, None, None, None, None]
    metrics_left = {sample.metric for sample in derive_host_memory(replace(known_snapshot, host=None))}
    assert metrics_left == {catalog.HOST_MEMORY, catalog.HOST_MEMORY_KIND}


def test_the_pressure_is_the_containers_else_the_machines() -> None:
    machine = replace(MACHINE, pressure_ratio=0.5)
    host_memories = [
        host(ProcessReadings(
            engine=(SERVER,),
            visible_pids=frozenset(),
            sees_host_pids=True,
            host=HostReading(machine=machine, cgroup=cgroup),
        ))
        for cgroup in (replace(CGROUP, pressure_ratio=0.25), CGROUP, None)
    ]  # fmt: skip

    assert [None if host_memory is None else host_memory.pressure_ratio for host_memory in host_memories] == [
        0.25,
        0.5,
        0.5,
    ]
