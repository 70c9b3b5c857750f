"""The trees of processes that an engine comes in, and what the real daemon says when a part of one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.life import Start, becomes, settings, state
from tests.e2e.recycling import LAST_PID
from tests.e2e.test_whose import ends, looked_again, read_held_bytes, serves_its_first_life
from tests.e2e.vllm import ROOT
from tests.fakes.nvml.library import GIB, FakeNvml
from tests.fakes.ports import free_port
from tests.process import Page, daemon, eventually

WRAPPERS = {
    "bash": ("bash", "-c", '"$@"; true', "bash"),
    "sh-exec": ("sh", "-c", 'exec "$@"', "sh"),
    "timeout": ("timeout", "600"),
    "a-file-named-vllm": ("bash", "-c", 'exec -a "vllm serve" bash -c "\\"\\$@\\"; true" bash "$@"', "bash"),
}


@pytest.mark.parametrize("launcher", WRAPPERS.values(), ids=WRAPPERS)
def test_an_engine_is_found_below_what_runs_it(
    start: Start, nvml: FakeNvml, port: int, launcher: tuple[str, ...]
) -> None:
    vllm = start(launcher=launcher)
    with daemon(**settings(port, nvml)) as running:
        serves_its_first_life(running, 60, 0)

        vllm.kill(vllm.worker)
        assert becomes(running, "stalled").has("host_memory_bytes", process="engine_core")


@pytest.mark.parametrize("rank", [0, 1], ids=["that-holds-the-memory", "another"])
def test_one_of_several_workers_that_dies_stalls_the_engine_at_once(
    start: Start, nvml: FakeNvml, port: int, rank: int
) -> None:
    """The driver goes on listing what the first one held."""
    vllm = start(workers=3)
    with daemon(**settings(port, nvml)) as running:
        serves_its_first_life(running, 60, 0)

        vllm.kill(vllm.workers[rank])

        stalled = becomes(running, "stalled")
        assert read_held_bytes(stalled) == (60, 0)
        assert (ends(stalled), stalled.value("source_up", source="engine")) == (0, 1)
        assert stalled.value("engine_requests_running") == 2
        assert stalled.has("gpu_memory_left_behind_bytes") == (rank == 0)


@pytest.mark.alone
@pytest.mark.parametrize("neighbour_gib", [0, 10], ids=["alone", "beside-another"])
def test_an_api_server_that_outlives_the_process_that_began_it_is_the_engine(
    start: Start, nvml: FakeNvml, port: int, another_port: int, neighbour_gib: int
) -> None:
    vllm = start(part="root")
    if neighbour_gib:
        start("another", port=another_port, held_gib=neighbour_gib)
    with daemon(**settings(port, nvml)) as running:
        serves_its_first_life(running, 60, neighbour_gib)

        vllm.kill(vllm.server)
        alone = looked_again(running)
        assert (state(alone), read_held_bytes(alone), ends(alone)) == ("serving", (60, neighbour_gib), 0)
        assert alone.has("host_memory_bytes", process="engine_core")
        assert not alone.has("gpu_memory_left_behind_bytes")

        vllm.kill(vllm.page_server)
        down = becomes(running, "down")
        assert (read_held_bytes(down), down.value("engine_exits_total", reason="gone")) == ((60, neighbour_gib), 1)
        assert down.has("gpu_memory_left_behind_bytes")


@pytest.mark.alone
@pytest.mark.parametrize("keeps", [False, True], ids=["without-a-state", "with-a-state"])
def test_the_core_that_a_server_left_is_no_engine_for_a_daemon_that_starts_later(
    start: Start, nvml: FakeNvml, port: int, tmp_path: Path, *, keeps: bool
) -> None:
    vllm, daemon_settings = start(), {"STATE_DIR": str(tmp_path / "state")} if keeps else {}
    with daemon(**settings(port, nvml), **daemon_settings) as running:
        serves_its_first_life(running, 60, 0)
    vllm.kill(vllm.server)

    with daemon(**settings(port, nvml), **daemon_settings) as running:
        down = looked_again(running)
        assert (state(down), down.value("engine_restarts_total")) == ("down", 0)
        assert not down.has("host_memory_bytes")
        assert down.value("gpu_memory_left_behind_bytes") == 60 * GIB


RANK = "import os, runpy, sys; sys.executable = os.environ['PYTHON']; runpy.run_path(sys.argv[1], run_name='__main__')"
SUPERVISOR = """
import os, subprocess, sys
port, below = int(sys.argv[-1]), {**os.environ, "PYTHON": sys.executable}
for rank, folder in enumerate(os.environ["FOLDERS"].split(":")):
    command = [f"VLLM::ExternalLBRank_{rank}", "-c", os.environ["RANK"], os.environ["PROGRAM"], str(port + rank)]
    subprocess.Popen(command, executable=sys.executable, env={**below, "FOLDER": folder}, process_group=0)
sys.stdin.read()
"""


def test_of_the_ranks_below_a_supervisor_each_daemon_tells_its_own(nvml: FakeNvml, tmp_path: Path) -> None:
    program, folders, port = tmp_path / "vllm", [tmp_path / "zero", tmp_path / "one"], free_port(in_a_row=2)
    program.write_text(SUPERVISOR)
    for folder in folders:
        folder.mkdir()
        (folder / "ready").touch()
    working = str(ROOT / "tests" / "fakes" / "working_vllm.py")
    environ = {**os.environ, "PROGRAM": working, "RANK": RANK, "PYTHONPATH": str(ROOT)}
    options = ["--data-parallel-multi-port-external-lb", "--data-parallel-size-local", "2", "--port", str(port)]
    with subprocess.Popen(
        [sys.executable, str(program), "serve", "m", *options],
        env={**environ, "FOLDERS": ":".join(map(str, folders))},
        stdin=subprocess.PIPE,
    ) as supervisor:
        eventually(lambda: all((folder / "pids").exists() for folder in folders), "the ranks run")
        ranks = [tuple(map(int, (folder / "pids").read_text().split())) for folder in folders]
        nvml.gpus[0].processes = {ranks[0][-1]: 20 * GIB, ranks[1][-1]: 30 * GIB}
        nvml.gpus[0].used_bytes = 50 * GIB
        nvml.write()
        try:
            with daemon(**settings(port + 1, nvml)) as running:
                serves_its_first_life(running, 30, 20)
        finally:
            for pid in (pid for rank in ranks for pid in rank):
                os.kill(pid, signal.SIGKILL)
            supervisor.kill()


def test_a_stranger_that_gets_all_the_pids_of_a_dead_engine_is_not_it() -> None:
    alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*alone, "sh", "-c", f"echo 9 > {LAST_PID}"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives out no namespaces, or no pids of one's choice")
    recycled = [*alone, sys.executable, "-m", "tests.e2e.recycling"]
    printed = subprocess.run(recycled, capture_output=True, text=True, check=True, timeout=100).stdout

    page = Page(printed)
    assert state(page) == "down"
    assert (ends(page), page.value("engine_restarts_total")) == (1, 0)
    assert read_held_bytes(page) == (0, 30)
    assert not page.has("host_memory_bytes")
