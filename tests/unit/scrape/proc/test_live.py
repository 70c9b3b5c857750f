from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.scrape.proc.engines import read
from vllm_headroom.model import EngineProcess
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.vocabulary import Role

PORT = 10_000 + os.getpid() % 50_000
"""Distinguishes the servers of these tests from any other on this machine."""

SERVER = """
import subprocess, sys
child = subprocess.Popen(["bash", "-c", sys.argv[-1]], stdin=subprocess.DEVNULL)
sys.stdin.readline()
child.wait()
sys.stdin.readline()
"""
CORE = "echo $$; exec -a VLLM::EngineCore sleep 60"
Start = Callable[..., "Served"]


class Served:
    """A server whose child has printed its pid; a line to the server makes it reap the child."""

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        assert server.stdout is not None
        self.server = server
        self.pid = int(server.stdout.readline())

    def reap(self) -> None:
        assert self.server.stdin is not None
        self.server.stdin.write(b"\n")
        self.server.stdin.flush()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a `vllm serve` that runs a shell command, in a separate session that is killed at the end."""
    started: list[subprocess.Popen[bytes]] = []
    program = tmp_path / "vllm"
    program.write_text(SERVER)

    def serve(script: str, port: int = PORT) -> Served:
        command = [sys.executable, str(program), "serve", "--port", str(port), script]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True))
        return Served(started[-1])

    yield serve
    for process in started:
        with process, contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def reader(rescan_seconds: float = 0.0) -> Processes:
    return Processes(engine_port=PORT, monotonic=time.monotonic, rescan_seconds=rescan_seconds)


@pytest.fixture
def processes() -> Processes:
    return reader()


def find_process(processes: Processes, pid: int) -> EngineProcess | None:
    return next((process for process in read(processes).engine if process.pid == pid), None)


def is_titled(processes: Processes, pid: int) -> bool:
    process = find_process(processes, pid)
    return process is not None and process.role is Role.ENGINE_CORE


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_with_a_title_is_found_and_measured(processes: Processes, start: Start) -> None:
    began = time.time()
    core = start(CORE)
    wait_until(lambda: is_titled(processes, core.pid))

    process = find_process(processes, core.pid)

    assert process is not None
    assert process.role is Role.ENGINE_CORE
    assert 0 < process.rss_bytes < 2**30
    assert abs(process.started_at_seconds - began) < 60
    assert {core.pid, os.getpid(), 1} <= read(processes).visible_pids


def test_cpu_time_is_taken_by_what_computes_and_by_nothing_that_is_stopped(processes: Processes, start: Start) -> None:
    core = start("echo $$; exec -a VLLM::EngineCore bash -c 'while :; do :; done'")

    def seconds() -> float:
        process = find_process(processes, core.pid)
        assert process is not None
        assert process.cpu_seconds is not None
        return process.cpu_seconds

    wait_until(lambda: seconds() > 0.1)
    os.kill(core.pid, signal.SIGSTOP)
    wait_until(lambda: ") T " in Path(f"/proc/{core.pid}/stat").read_text())
    stopped = seconds()
    time.sleep(0.2)

    assert seconds() == stopped


def test_what_a_process_of_the_engine_starts_is_the_engines(processes: Processes, start: Start) -> None:
    child = start("exec -a VLLM::Worker_TP1 bash -c 'sleep 60 & echo $!; wait'")

    process = find_process(processes, child.pid)

    assert process is not None
    assert process.role is Role.OTHER


def test_of_two_servers_the_one_with_the_port_is_the_engine(processes: Processes, start: Start) -> None:
    neighbour, core = start(CORE, port=PORT + 1), start(CORE)
    wait_until(lambda: is_titled(processes, core.pid))

    pids = {process.pid for process in read(processes).engine}

    assert pids == {core.server.pid, core.pid}
    assert {neighbour.server.pid, neighbour.pid} < read(processes).visible_pids


def test_a_killed_process_is_gone_even_before_it_is_reaped(start: Start) -> None:
    processes, core = reader(rescan_seconds=15.0), start(CORE)
    wait_until(lambda: is_titled(reader(), core.pid))
    assert find_process(processes, core.pid)

    os.kill(core.pid, signal.SIGKILL)

    wait_until(lambda: find_process(processes, core.pid) is None)
    assert core.pid in read(processes).visible_pids  # a zombie still shows
    core.reap()
    wait_until(lambda: core.pid not in read(processes).visible_pids)


def test_a_process_in_a_namespace_of_its_own_knows_it_is_not_in_the_first() -> None:
    script = (
        "import asyncio, time; from vllm_headroom.scrape.proc.reader import Processes; "
        "print(asyncio.run(Processes(engine_port=8000, monotonic=time.monotonic).read(30)))"
    )
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives out no namespaces")

    result = subprocess.run([*unshare, sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert result.stdout.startswith(
        "ProcessReadings(engine=(), visible_pids=frozenset({1}), sees_host_pids=False, ambiguous_engines=0,"
        " neighbours=frozenset(), ports=frozenset(), orphans=frozenset(), strays=frozenset(), exiting=frozenset(),"
        " zombies=frozenset(), options=None, host=HostReading("
    )
