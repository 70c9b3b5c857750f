from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fakes.proc_tree import BOOT_SECONDS, TICKS, ProcTree
from vllm_headroom.model import ProcessReadings
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.vocabulary import Role

SERVER = ("python3.11", "/venv/bin/vllm", "serve", "tiny")


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    return ProcTree(tmp_path)


@pytest.fixture
def processes(tree: ProcTree, clock: Clock) -> Processes:
    return Processes(engine_port=8000, proc=tree.path, monotonic=clock)


def read(processes: Processes) -> ProcessReadings:
    readings = asyncio.run(processes.read(30))
    assert isinstance(readings, ProcessReadings), readings
    return readings


def roles(processes: Processes) -> dict[int, Role]:
    return {process.pid: process.role for process in read(processes).engine}


def test_a_new_process_is_seen_at_once(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, *SERVER)
    read(processes)
    tree.add(8, 7, "VLLM::EngineCore")

    assert roles(processes) == {7: Role.API_SERVER, 8: Role.ENGINE_CORE}


def test_a_title_that_comes_late_is_seen_by_the_next_scan(tree: ProcTree, processes: Processes, clock: Clock) -> None:
    tree.add(7, 1, *SERVER)
    tree.add(8, 7, *SERVER)
    read(processes)
    tree.add(8, 7, "VLLM::EngineCore")
    clock.seconds = 14.9
    before = roles(processes)
    clock.seconds = 15.0

    assert before[8] is Role.OTHER
    assert roles(processes)[8] is Role.ENGINE_CORE


def test_a_process_that_has_gone_makes_a_scan(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, *SERVER)
    tree.add(8, 7, *SERVER)
    tree.add(9, 7, "VLLM::Worker")
    read(processes)
    tree.add(8, 7, "VLLM::EngineCore")
    tree.remove(9)

    assert roles(processes) == {7: Role.API_SERVER, 8: Role.ENGINE_CORE}


def test_a_neighbour_is_not_taken_while_the_engine_is_down(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, *SERVER)
    tree.add(8, 1, *SERVER, "--port", "9000")
    before = roles(processes)
    tree.remove(7)
    down = roles(processes)
    tree.add(9, 1, *SERVER)

    assert (before, down, roles(processes)) == ({7: Role.API_SERVER}, {}, {9: Role.API_SERVER})


def test_engines_are_told_apart_as_soon_as_they_can_be(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, *SERVER)
    tree.add(8, 1, *SERVER)
    before = read(processes)
    tree.remove(8)
    after = read(processes)

    assert (before.ambiguous_roots, after.ambiguous_roots) == (2, 0)
    assert [process.pid for process in after.engine] == [7]


def test_a_zombie_makes_no_scan(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, *SERVER)
    tree.add(8, 7, *SERVER)
    tree.add(9, 7, name="gcc", state="Z", rss_pages=0)
    read(processes)
    tree.add(8, 7, "VLLM::EngineCore")

    assert roles(processes)[8] is Role.OTHER  # not yet looked at again


@pytest.mark.parametrize("command", [("nginx",), ("vllm", "serve")])
def test_a_pid_that_is_used_again_is_another_process(
    tree: ProcTree, processes: Processes, command: tuple[str, ...]
) -> None:
    tree.add(7, 1, *SERVER, started_ticks=1 * TICKS)
    read(processes)
    tree.add(7, 1, *command, started_ticks=2 * TICKS)

    started = [process.started_at_seconds for process in read(processes).engine]

    assert started == ([BOOT_SECONDS + 2] if "vllm" in command else [])


def test_a_step_of_the_clock_moves_no_start_time(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, *SERVER)
    before = read(processes)
    (tree.path / "stat").write_text(f"btime {BOOT_SECONDS + 3600}\n")

    assert read(processes) == before
