from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.proc_tree import BOOT_SECONDS, PAGE_BYTES, TICKS, ProcTree
from vllm_headroom.model import EngineProcess, Failure, ProcessReadings, Reason, Role, Source
from vllm_headroom.scrape.processes import Processes

SERVER = ("python3.11", "/venv/bin/vllm", "serve", "tiny")


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    return ProcTree(tmp_path)


@pytest.fixture
def processes(tree: ProcTree) -> Processes:
    return Processes(proc=tree.path, monotonic=lambda: 0.0)


def read(processes: Processes) -> ProcessReadings:
    readings = asyncio.run(processes.read(30))
    assert isinstance(readings, ProcessReadings), readings
    return readings


def roles(processes: Processes) -> dict[int, Role]:
    return {process.pid: process.role for process in read(processes).engine}


def test_the_engines_processes_are_measured(tree: ProcTree, processes: Processes) -> None:
    tree.add(4380, 1, *SERVER, started_ticks=112293, rss_pages=157450)
    tree.add(4426, 4380, "VLLM::EngineCore", *[""] * 138, started_ticks=113917, rss_pages=148451)
    tree.add(4425, 4380, "python3.11", "-B", "-c", "from multiprocessing.resource_tracker import main;main(32)")
    tree.add(5000, 1, "nginx")

    api_server, tracker, core = read(processes).engine

    assert api_server == EngineProcess(
        pid=4380,
        role=Role.API_SERVER,
        rss_bytes=157450 * PAGE_BYTES,
        started_at_seconds=BOOT_SECONDS + 112293 / TICKS,
    )
    assert (core.pid, core.role, core.rss_bytes) == (4426, Role.ENGINE_CORE, 148451 * PAGE_BYTES)
    assert tracker.role is Role.OTHER


def test_every_pid_shows(tree: ProcTree, processes: Processes) -> None:
    tree.add(4380, 1, *SERVER)
    tree.add(5000, 1, state="Z", name="dead")

    assert read(processes).visible_pids == {1, 4380, 5000, 9999}


def test_no_engine_is_no_failure(processes: Processes) -> None:
    assert read(processes).engine == ()


@pytest.mark.parametrize(("namespace", "expected"), [("pid:[4026531836]", True), ("pid:[4026532281]", False)])
def test_the_first_pid_namespace_is_known_by_its_inode(tmp_path: Path, namespace: str, *, expected: bool) -> None:
    processes = Processes(proc=ProcTree(tmp_path, namespace=namespace).path, monotonic=lambda: 0.0)

    assert read(processes).sees_host_pids is expected


def test_a_namespace_that_cannot_be_told_is_not_the_first(tree: ProcTree, processes: Processes) -> None:
    (tree.path / "self" / "ns" / "pid").unlink()

    assert read(processes).sees_host_pids is False


@pytest.mark.parametrize("name", ["a b", "x) S 1 (y", ") Z 5 5", "((", "tab\tname", ""])
def test_a_process_may_have_any_name(tree: ProcTree, processes: Processes, name: str) -> None:
    tree.add(7, 1, *SERVER, name=name)
    tree.add(8, 7, "sh", name=name)

    assert roles(processes) == {7: Role.API_SERVER, 8: Role.OTHER}


def test_a_title_without_a_command_line_is_found_by_the_name(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, name="VLLM::EngineCore")

    assert roles(processes) == {7: Role.ENGINE_CORE}


def test_zombies_do_not_count(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, *SERVER)
    tree.add(8, 7, "VLLM::Worker_TP0", state="Z")

    assert roles(processes) == {7: Role.API_SERVER}


def test_a_process_that_has_given_back_its_memory_is_gone(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, *SERVER)
    tree.add(8, 7, "VLLM::Worker_TP0", rss_pages=0)

    assert roles(processes) == {7: Role.API_SERVER}


def test_files_that_vanish_or_are_cut_short_are_skipped(tree: ProcTree, processes: Processes) -> None:
    for pid, file in ((7, "stat"), (8, "statm"), (9, "cmdline")):
        tree.add(pid, 1, "VLLM::Worker")
        (tree.path / str(pid) / file).unlink()
    for pid, file in ((17, "stat"), (18, "statm")):
        tree.add(pid, 1, "VLLM::Worker")
        (tree.path / str(pid) / file).write_text("18 ")
    tree.add(20, 1, "VLLM::Worker")

    assert roles(processes) == {20: Role.WORKER}


@pytest.mark.parametrize(
    "break_it",
    [
        lambda tree: Path.rename(tree.path, tree.path.with_name("elsewhere")),
        lambda tree: (tree.path / "stat").unlink(),
        lambda tree: (tree.path / "stat").write_text("cpu 1\n"),
        lambda tree: (tree.path / "self").unlink(),
    ],
    ids=["no /proc", "no stat", "no boot time", "no self"],
)
def test_where_there_is_no_proc_that_is_a_failure(
    tree: ProcTree, processes: Processes, break_it: Callable[[ProcTree], object]
) -> None:
    tree.add(7, 1, *SERVER)
    break_it(tree)

    problem = asyncio.run(processes.read(30))

    assert isinstance(problem, Failure)
    assert (problem.source, problem.reason) == (Source.PROCESS, Reason.UNAVAILABLE)
    assert problem.message.startswith(f"{tree.path} cannot be read (")


def test_a_file_that_blocks_is_a_timeout_until_it_lets_go(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, *SERVER)
    cmdline = tree.path / "7" / "cmdline"
    cmdline.unlink()
    os.mkfifo(cmdline)  # opening it blocks until somebody writes

    async def run() -> list[ProcessReadings | Failure]:
        hung = [await processes.read(0.1), await processes.read(0.1)]
        await asyncio.to_thread(cmdline.write_bytes, b"vllm\0serve\0")
        return [*hung, await processes.read(30)]

    *hung, readings = asyncio.run(run())

    assert [problem.reason for problem in hung if isinstance(problem, Failure)] == [Reason.TIMEOUT] * 2
    assert isinstance(readings, ProcessReadings)
    assert [process.pid for process in readings.engine] == [7]
