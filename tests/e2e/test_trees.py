"""The trees of processes that an engine comes in, and what the real daemon says when a part of one is killed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.life import Start, becomes, settings, state
from tests.e2e.recycling import LAST_PID
from tests.e2e.test_whose import ends, held, looked_again, serves_its_first_life
from tests.fakes.nvml.library import FakeNvml
from tests.process import Page, daemon

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
        assert held(stalled) == (60, 0)
        assert (ends(stalled), stalled.value("source_up", source="engine")) == (0, 1)
        assert stalled.value("engine_requests_running") == 2
        assert stalled.has("gpu_memory_left_behind_bytes") == (rank == 0)


def test_an_api_server_that_outlives_the_process_that_began_it_is_the_engine(
    start: Start, nvml: FakeNvml, port: int
) -> None:
    vllm = start(part="root")
    with daemon(**settings(port, nvml)) as running:
        serves_its_first_life(running, 60, 0)

        vllm.kill(vllm.server)
        alone = looked_again(running)
        assert (state(alone), held(alone), ends(alone)) == ("serving", (60, 0), 0)
        assert alone.has("host_memory_bytes", process="engine_core")
        assert not alone.has("gpu_memory_left_behind_bytes")

        vllm.kill(vllm.page_server)
        down = becomes(running, "down")
        assert (held(down), down.value("engine_exits_total", reason="gone")) == ((60, 0), 1)
        assert down.has("gpu_memory_left_behind_bytes")


def test_a_stranger_that_gets_all_the_pids_of_a_dead_engine_is_not_it() -> None:
    alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*alone, "sh", "-c", f"echo 9 > {LAST_PID}"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives out no namespaces, or no pids of one's choice")
    recycled = [*alone, sys.executable, "-m", "tests.e2e.recycling"]
    told = subprocess.run(recycled, capture_output=True, text=True, check=True, timeout=100).stdout

    page = Page(told)
    assert state(page) == "down"
    assert (ends(page), page.value("engine_restarts_total")) == (1, 0)
    assert held(page) == (0, 30)
    assert not page.has("host_memory_bytes")
