from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.proc_tree import BOOT_SECONDS, PAGE_BYTES, TICKS, ProcTree
from tests.unit.scrape.proc.engines import SERVER, read, roles
from vllm_headroom.model import EngineProcess, Failure
from vllm_headroom.scrape.proc import files as proc_files
from vllm_headroom.scrape.proc import reader
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.vocabulary import Reason, Role, Source


@pytest.fixture
def processes(tree: ProcTree) -> Processes:
    return Processes(engine_port=8000, proc=tree.path, monotonic=lambda: 0.0)


def test_the_engines_processes_are_measured(tree: ProcTree, processes: Processes) -> None:
    tree.add(4380, 1, *SERVER, started_ticks=112293, rss_pages=157450, cpu_ticks=(700, 50))
    tree.add(4426, 4380, "VLLM::EngineCore", *[""] * 138, started_ticks=113917, rss_pages=148451)
    tree.add(4425, 4380, "python3.11", "-B", "-c", "from multiprocessing.resource_tracker import main;main(32)")
    tree.add(5000, 1, "nginx")

    api_server, tracker, core = read(processes).engine

    assert api_server == EngineProcess(
        pid=4380,
        role=Role.API_SERVER,
        rss_bytes=157450 * PAGE_BYTES,
        started_at_seconds=BOOT_SECONDS + 112293 / TICKS,
        since_boot_seconds=112293 / TICKS,
        cpu_seconds=750 / TICKS,
        state="S",
    )
    assert (core.pid, core.role, core.rss_bytes) == (4426, Role.ENGINE_CORE, 148451 * PAGE_BYTES)
    assert tracker.role is Role.OTHER


def test_each_process_has_its_state_and_only_the_first_server_the_cpu_pressure(
    tree: ProcTree, processes: Processes
) -> None:
    (tree.path / "pressure").mkdir()
    (tree.path / "pressure" / "cpu").write_text("some avg10=9.00 avg60=81.50 avg300=1.00 total=1\n")
    tree.add(10, 1, *SERVER)
    tree.add(11, 10, "VLLM::EngineCore", state="T")
    tree.add(12, 10, "VLLM::APIServer_0", state="D")

    states = [(process.state, process.cpu_pressure_ratio) for process in read(processes).engine]

    assert states == [("S", 0.815), ("T", None), ("D", None)]


def test_the_connections_of_the_machine_are_read_every_few_seconds(
    tree: ProcTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read at each tick of the usual interval, 5 s."""
    now_seconds = 0.0
    waits_seconds: list[tuple[float, ...]] = []

    def list_waits(_ports: frozenset[int]) -> tuple[float, ...]:
        waits_seconds.append((50.0 + len(waits_seconds),))
        return waits_seconds[-1]

    monkeypatch.setattr(reader, "list_waits", list_waits)
    monkeypatch.setattr(proc_files, "has_same_network", lambda *_, **__: True)
    tree.add(10, 1, *SERVER)
    subject = Processes(engine_port=8000, proc=tree.path, monotonic=lambda: now_seconds)

    def read_wait(at_seconds: float) -> float | None:
        nonlocal now_seconds
        now_seconds = at_seconds
        return read(subject).engine[0].wait_seconds

    shown_seconds = [read_wait(at_seconds) for at_seconds in (0.0, 1.0, 3.0, 5.0, 10.0)]

    assert shown_seconds == [50, 50, 50, 51, 52]


def test_of_two_api_servers_without_the_program_above_them_one_has_the_cpu_pressure(
    tree: ProcTree, processes: Processes
) -> None:
    (tree.path / "pressure").mkdir()
    (tree.path / "pressure" / "cpu").write_text("some avg10=9.00 avg60=81.50 avg300=1.00 total=1\n")
    for pid, title in ((11, "VLLM::EngineCore"), (12, "VLLM::APIServer_0"), (13, "VLLM::APIServer_1")):
        tree.add(pid, 1, title, group=10)

    readings = read(processes)

    assert [(process.pid, process.cpu_pressure_ratio) for process in readings.engine] == [
        (11, None),
        (12, 0.815),
        (13, None),
    ]


def test_of_two_servers_only_the_one_that_serves_the_port_is_measured(tree: ProcTree, processes: Processes) -> None:
    tree.add(10, 1, *SERVER, "--port", "9000")
    tree.add(11, 10, "VLLM::EngineCore")
    tree.add(20, 1, *SERVER)
    tree.add(21, 20, "VLLM::EngineCore")

    readings = read(processes)

    assert [process.pid for process in readings.engine] == [20, 21]
    assert readings.ambiguous_engines == 0
    assert {10, 11} < readings.visible_pids


def test_two_servers_that_the_port_does_not_tell_apart_are_counted_and_not_taken(
    tree: ProcTree, processes: Processes
) -> None:
    tree.add(10, 1, *SERVER)
    tree.add(20, 1, *SERVER)

    assert (read(processes).engine, read(processes).ambiguous_engines) == ((), 2)


def test_a_port_far_down_a_long_command_line_is_found(tree: ProcTree, processes: Processes) -> None:
    tree.add(10, 1, *SERVER, "--chat-template", "x" * 100_000, "--port", "9000")
    tree.add(20, 1, *SERVER)

    assert roles(processes) == {20: Role.API_SERVER}


def test_every_pid_shows(tree: ProcTree, processes: Processes) -> None:
    tree.add(4380, 1, *SERVER)
    tree.add(5000, 1, state="Z", name="dead")

    assert read(processes).visible_pids == {1, 4380, 5000, 9999}


def test_no_engine_is_no_failure(processes: Processes) -> None:
    assert read(processes).engine == ()


@pytest.mark.parametrize(("namespace", "expected"), [("pid:[4026531836]", True), ("pid:[4026532281]", False)])
def test_the_first_pid_namespace_is_known_by_its_inode(tmp_path: Path, namespace: str, *, expected: bool) -> None:
    tree = ProcTree(tmp_path, namespace=namespace)
    processes = Processes(engine_port=8000, proc=tree.path, monotonic=lambda: 0.0)

    assert read(processes).sees_host_pids is expected


def test_a_namespace_that_is_unknown_is_not_the_first(tree: ProcTree, processes: Processes) -> None:
    (tree.path / "self" / "ns" / "pid").unlink()

    assert read(processes).sees_host_pids is False


@pytest.mark.parametrize("name", ["a b", "x) S 1 (y", ") Z 5 5", "((", "tab\tname", ""])
def test_a_process_may_have_any_name(tree: ProcTree, processes: Processes, name: str) -> None:
    tree.add(7, 1, *SERVER, name=name)
    tree.add(8, 7, "sh", name=name)

    assert roles(processes) == {7: Role.API_SERVER, 8: Role.OTHER}


def test_a_title_without_a_command_line_is_found_by_the_name(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 30, name="VLLM::EngineCore")

    assert roles(processes) == {7: Role.ENGINE_CORE}


def test_zombies_do_not_count(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, *SERVER)
    tree.add(8, 7, "VLLM::Worker_TP0", state="Z")

    assert roles(processes) == {7: Role.API_SERVER}


def test_a_process_that_has_given_back_its_memory_is_gone(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, *SERVER)
    tree.add(8, 7, "VLLM::Worker_TP0", rss_pages=0)

    assert roles(processes) == {7: Role.API_SERVER}
    assert read(processes).exiting == {8}


def test_files_that_vanish_or_are_cut_short_are_skipped(tree: ProcTree, processes: Processes) -> None:
    for pid, file in ((7, "stat"), (8, "statm"), (9, "cmdline")):
        tree.add(pid, 30, "VLLM::Worker")
        (tree.path / str(pid) / file).unlink()
    for pid, file in ((17, "stat"), (18, "statm")):
        tree.add(pid, 30, "VLLM::Worker")
        (tree.path / str(pid) / file).write_text("18 ")
    tree.add(20, 30, "VLLM::Worker")

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

    hung = [asyncio.run(processes.read(0.1)) for _ in range(2)]
    writing = os.open(cmdline, os.O_RDWR)  # to write alone would block where nobody has opened it yet
    cmdline.unlink()
    cmdline.write_bytes(b"vllm\0serve\0")
    os.write(writing, b"vllm\0serve\0")
    os.close(writing)
    deadline = time.monotonic() + 30
    while isinstance(readings := asyncio.run(processes.read(30)), Failure):
        assert time.monotonic() < deadline
        time.sleep(0.01)

    assert [problem.reason for problem in hung if isinstance(problem, Failure)] == [Reason.TIMEOUT] * 2
    assert [process.pid for process in readings.engine] == [7]


def test_the_options_are_those_of_the_engines_own_server(tree: ProcTree, processes: Processes) -> None:
    tree.add(4380, 1, *SERVER, "--max-num-seqs", "64")
    tree.add(4426, 4380, "VLLM::EngineCore")
    tree.add(5000, 1, "vllm", "serve", "other", "--port", "9000", "--max-num-seqs", "1")

    options = read(processes).options

    assert options is not None
    assert options.max_num_seqs == 64


@pytest.mark.parametrize("noise", [b"\xff\xfe\0" * 10, b"--x\0" * 500_000])
def test_a_command_line_of_megabytes_or_of_no_text_costs_nothing_else(
    tree: ProcTree, processes: Processes, noise: bytes
) -> None:
    tree.add(4380, 1, *SERVER, "--max-num-seqs", "64")
    file = tree.path / "4380" / "cmdline"
    file.write_bytes(file.read_bytes() + noise)

    readings = read(processes)

    assert [process.pid for process in readings.engine] == [4380]
    assert readings.options is not None
    assert readings.options.max_num_seqs == 64


def test_without_an_engine_there_are_no_options(tree: ProcTree, processes: Processes) -> None:
    tree.add(4380, 1, *SERVER)
    assert read(processes).options is not None

    tree.remove(4380)

    assert read(processes).options is None
