"""A real vLLM that is slow to start, stopped and killed, and the state that is shown. Takes five minutes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.engine.serving import Engine, words
from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.process import Daemon, Page, daemon
from vllm_headroom.model import ProcessReadings
from vllm_headroom.scrape.http.reader import find_port
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.vocabulary import Role

pytestmark = pytest.mark.engine

STATES = ("unknown", "down", "starting", "serving", "stalled", "asleep")
PATIENCE_SECONDS = 300
EVERY_SECONDS = 1.0
"""Between looks at the daemon's page: looking without a pause takes half a core, which vLLM then lacks."""


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    return FakeNvml(tmp_path_factory.mktemp("nvml"), [FakeGpu(uuid="GPU-a", used_bytes=GIB)])


@pytest.fixture(scope="module")
def sidecar(starting: Engine, nvml: FakeNvml, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that starts with vLLM."""
    state: Path = tmp_path_factory.mktemp("state")
    with daemon(
        ENGINE_URL=starting.url, GPUS="0", STATE_DIR=str(state), SAMPLE_INTERVAL_SECONDS="5", **nvml.environment()
    ) as running:
        yield running


def state(page: Page) -> str:
    (seen_state,) = (state for state in STATES if page.value("engine_state", state=state) == 1)
    return seen_state


def becomes(running: Daemon, *wanted: str) -> Page:
    return running.sees(lambda page: state(page) in wanted, f"the engine is {wanted}", PATIENCE_SECONDS, EVERY_SECONDS)


def core(engine: Engine) -> int:
    """Return the pid of the engine core."""
    processes = Processes(engine_port=find_port(httpx.URL(engine.url)), monotonic=time.monotonic)
    readings = asyncio.run(processes.read(30))
    assert isinstance(readings, ProcessReadings)
    (core_pid,) = (process.pid for process in readings.engine if process.role is Role.ENGINE_CORE)
    return core_pid


def test_it_is_starting_until_its_page_is_there_and_what_it_loads_is_no_leak(
    starting: Engine, sidecar: Daemon, nvml: FakeNvml
) -> None:
    first_page = becomes(sidecar, "starting")
    assert abs(first_page.value("engine_start_timestamp_seconds") - time.time()) < PATIENCE_SECONDS

    page = first_page
    while state(page) == "starting":
        nvml.gpus[0].used_bytes += 64 * 2**20
        nvml.write()
        assert page.value("leak_state", state="warming_up") == 1
        time.sleep(1)
        page = sidecar.page()

    assert state(page) == "serving"
    assert page.value("leak_state", state="warming_up") == 1, "it has not worked yet"
    starting.complete(words(1, 20), 5)
    assert sidecar.page().value("engine_restarts_total") == 0


def test_a_stopped_core_is_stalled_until_it_goes_on(engine: Engine, sidecar: Daemon) -> None:
    becomes(sidecar, "serving")
    enough = threading.Event()

    def ask() -> None:
        while not enough.is_set():
            engine.complete(words(0, 64), 400)

    client = threading.Thread(target=ask)
    client.start()
    running = (lambda page: page.value("engine_requests_running") > 0, "requests run", PATIENCE_SECONDS, EVERY_SECONDS)
    sidecar.sees(*running)
    stopped = core(engine)
    os.kill(stopped, signal.SIGSTOP)
    try:
        stalled = becomes(sidecar, "stalled")
        assert stalled.value("source_up", source="engine") == 1, "the page answers on"
        assert stalled.value("engine_progress_age_seconds") >= 60
    finally:
        enough.set()
        os.kill(stopped, signal.SIGCONT)
    becomes(sidecar, "serving")
    client.join()


def test_a_killed_core_is_stalled_while_the_page_answers_and_then_down(engine: Engine, sidecar: Daemon) -> None:
    becomes(sidecar, "serving")

    os.kill(core(engine), signal.SIGKILL)

    becomes(sidecar, "stalled", "down")
    down = becomes(sidecar, "down")
    assert down.value("engine_exits_total", reason="gone") == 1
    assert not down.has("engine_prefix_cache_hit_ratio")
    assert down.value("leak_state", state="unknown") == 1
