from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from vllm_headroom.model import EngineProcess, ProcessReadings, Role
from vllm_headroom.scrape.processes import Processes

Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start shell commands, each in a session of its own that is killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def popen(script: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, start_new_session=True))
        return started[-1]

    yield popen
    for process in started:
        with process, contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def processes() -> Processes:
    return Processes(monotonic=time.monotonic, rescan_seconds=0)


def read(processes: Processes) -> ProcessReadings:
    readings = asyncio.run(processes.read(30))
    assert isinstance(readings, ProcessReadings), readings
    return readings


def found(processes: Processes, pid: int) -> EngineProcess | None:
    return next((process for process in read(processes).engine if process.pid == pid), None)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_with_a_title_is_found_and_measured(processes: Processes, start: Start) -> None:
    began = time.time()
    core = start("exec -a VLLM::EngineCore sleep 60")
    wait_until(lambda: found(processes, core.pid))

    process = found(processes, core.pid)

    assert process is not None
    assert process.role is Role.ENGINE_CORE
    assert 0 < process.rss_bytes < 2**30
    assert abs(process.started_at_seconds - began) < 60
    assert {core.pid, os.getpid(), 1} <= read(processes).visible_pids


def test_what_a_process_of_the_engine_starts_is_the_engines(processes: Processes, start: Start) -> None:
    worker = start("exec -a VLLM::Worker_TP1 bash -c 'sleep 60 & echo $!; wait'")
    assert worker.stdout is not None
    child = int(worker.stdout.readline())

    process = found(processes, child)

    assert process is not None
    assert process.role is Role.OTHER


def test_a_killed_process_is_gone_even_before_it_is_reaped(start: Start) -> None:
    processes = Processes(monotonic=time.monotonic)
    core = start("exec -a VLLM::EngineCore sleep 60")
    wait_until(lambda: found(Processes(monotonic=time.monotonic), core.pid))
    assert found(processes, core.pid)

    core.kill()
    os.waitid(os.P_PID, core.pid, os.WEXITED | os.WNOWAIT)

    assert found(processes, core.pid) is None
    assert core.pid in read(processes).visible_pids  # a zombie still shows
    core.wait()
    assert core.pid not in read(processes).visible_pids


def test_a_process_in_a_namespace_of_its_own_knows_it_is_not_in_the_first() -> None:
    script = (
        "import asyncio, time; from vllm_headroom.scrape.processes import Processes; "
        "print(asyncio.run(Processes(monotonic=time.monotonic).read(30)))"
    )
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives out no namespaces")

    result = subprocess.run([*unshare, sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert result.stdout == ("ProcessReadings(engine=(), visible_pids=frozenset({1}), sees_host_pids=False)\n")
