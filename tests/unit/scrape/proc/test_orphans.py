"""What a killed core or server leaves behind is known again until it has gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.proc_tree import ProcTree
from tests.unit.scrape.proc.engines import SERVER, Clock, read
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.vocabulary import Role

CORE, WORKER = "VLLM::EngineCore", "VLLM::Worker_TP0"


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    tree = ProcTree(tmp_path)
    tree.add(7, 1, *SERVER)
    tree.add(8, 7, CORE)
    tree.add(9, 8, WORKER)
    return tree


@pytest.fixture
def processes(tree: ProcTree) -> Processes:
    return Processes(engine_port=8000, proc=tree.path, monotonic=Clock())


def read_roles_and_orphans(processes: Processes) -> tuple[dict[int, Role], frozenset[int]]:
    """Return the roles of the engine's processes, and what earlier runs left."""
    readings = read(processes)
    return {process.pid: process.role for process in readings.engine}, readings.orphans


def kill(tree: ProcTree, *pids: int, leaving: int) -> None:
    """Take processes away; what they leave becomes a child of init."""
    for pid in pids:
        tree.remove(pid)
    tree.add(leaving, 1, WORKER if leaving == 9 else CORE)


def test_a_living_engine_has_none(processes: Processes) -> None:
    assert read_roles_and_orphans(processes) == ({7: Role.API_SERVER, 8: Role.ENGINE_CORE, 9: Role.WORKER}, frozenset())
    assert read_roles_and_orphans(processes)[1] == frozenset()


def test_the_worker_of_a_killed_core_is_left_behind_beside_its_server(tree: ProcTree, processes: Processes) -> None:
    read_roles_and_orphans(processes)

    kill(tree, 8, leaving=9)

    assert read_roles_and_orphans(processes) == ({7: Role.API_SERVER}, frozenset({9}))


def test_a_core_that_was_killed_and_not_reaped_yet_has_gone(tree: ProcTree, processes: Processes) -> None:
    read_roles_and_orphans(processes)

    tree.add(8, 7, CORE, state="Z")
    tree.add(9, 1, WORKER)

    assert read_roles_and_orphans(processes) == ({7: Role.API_SERVER}, frozenset({9}))


@pytest.mark.parametrize("init", [1, 40])
def test_what_is_left_is_no_engine_nor_the_next_ones(tree: ProcTree, processes: Processes, init: int) -> None:
    tree.add(40, 1, "systemd", "--user")
    read_roles_and_orphans(processes)
    kill(tree, 7, 8, leaving=9)
    tree.add(9, init, WORKER)

    assert read_roles_and_orphans(processes) == ({}, frozenset({9}))
    tree.add(17, 1, *SERVER)
    tree.add(18, 17, CORE)
    assert read_roles_and_orphans(processes) == ({17: Role.API_SERVER, 18: Role.ENGINE_CORE}, frozenset({9}))
    tree.remove(9)
    assert read_roles_and_orphans(processes)[1] == frozenset()


def test_the_core_of_a_killed_server_is_left_with_what_hangs_from_it(tree: ProcTree, processes: Processes) -> None:
    read_roles_and_orphans(processes)

    kill(tree, 7, leaving=8)

    assert read_roles_and_orphans(processes) == ({}, frozenset({8, 9}))


def test_a_pid_that_is_used_again_is_not_left_behind(tree: ProcTree, processes: Processes) -> None:
    read_roles_and_orphans(processes)

    tree.remove(7)
    tree.remove(8)
    tree.add(9, 1, "nginx", started_ticks=9000)

    assert read_roles_and_orphans(processes) == ({}, frozenset())


def test_cores_whose_program_has_gone_are_left_behind_at_the_next_scan(tmp_path: Path) -> None:
    tree, clock = ProcTree(tmp_path), Clock()
    tree.add(7, 1, "python", "serve.py")
    tree.add(8, 7, CORE)
    processes = Processes(engine_port=8000, proc=tree.path, monotonic=clock)
    assert read_roles_and_orphans(processes) == ({8: Role.ENGINE_CORE}, frozenset())

    kill(tree, 7, leaving=8)
    clock.seconds = 15.0

    assert read_roles_and_orphans(processes) == ({}, frozenset({8}))


def test_a_server_whose_shell_has_gone_is_no_orphan(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(6, 1, "sh")
    tree.add(7, 6, *SERVER)
    processes = Processes(engine_port=8000, proc=tree.path, monotonic=Clock())
    read_roles_and_orphans(processes)

    tree.remove(6)
    tree.add(7, 1, *SERVER)

    assert read_roles_and_orphans(processes) == ({7: Role.API_SERVER}, frozenset())


@pytest.mark.parametrize(
    ("parent", "group"),
    [("/lib/systemd/systemd", 18), ("process_api", 18), ("bash", 1)],
    ids=["an init", "one that stands in for it", "the shell of an entrypoint"],
)
def test_a_core_that_was_taken_over_before_anybody_looked_is_a_stray_with_its_workers(
    tree: ProcTree, parent: str, group: int
) -> None:
    tree.add(40, 1, parent)
    tree.add(18, 40, CORE, group=group)
    tree.add(19, 18, WORKER, group=group)

    readings = read(Processes(engine_port=8000, proc=tree.path, monotonic=Clock()))

    assert {process.pid for process in readings.engine} == {7, 8, 9}
    assert readings.strays == {18, 19}


def test_a_stray_alone_is_no_engine_that_starts(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(18, 1, CORE, group=18)

    readings = read(Processes(engine_port=8000, proc=tree.path, monotonic=Clock()))

    assert not readings.engine
    assert readings.strays == {18}


@pytest.mark.parametrize(
    ("parent", "core", "group"),
    [("my-app", CORE, 1), ("raylet", "ray::RayWorkerWrapper.execute", 18)],
    ids=["a program that embeds an engine", "Ray"],
)
def test_what_its_own_parent_began_is_no_stray(tree: ProcTree, parent: str, core: str, group: int) -> None:
    tree.add(1, 0, parent)
    tree.add(18, 1, core, group=group)

    assert read(Processes(engine_port=8000, proc=tree.path, monotonic=Clock())).strays == frozenset()


def test_a_zombie_is_distinguished_from_what_runs_and_from_what_cannot_be_read(
    tree: ProcTree, processes: Processes
) -> None:
    assert read(processes).zombies == frozenset()

    tree.add(9, 8, WORKER, state="Z")
    (tree.path / "77" / "stat").mkdir(parents=True)

    readings = read(processes)
    assert readings.zombies == {9}
    assert {9, 77} <= readings.visible_pids


def test_a_pid_that_was_reaped_after_it_was_listed_is_not_visible(tree: ProcTree, processes: Processes) -> None:
    (tree.path / "77").mkdir()

    assert 77 not in read(processes).visible_pids
