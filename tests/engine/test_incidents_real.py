"""What postmortem reports about a real vLLM that is stopped, killed, and shut down. Takes five minutes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.command import read_data
from tests.engine.serving import FOLDER, Engine, serving, started, words
from tests.engine.test_life_real import PATIENCE_SECONDS, becomes, core
from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.fakes.ports import free_port
from tests.process import Daemon, daemon

pytestmark = pytest.mark.engine

HELD: Final = 40 * GIB
"""Of 80: a card with room, for vLLM on the CPU has none."""


@contextmanager
def watched(engine: Engine, folder: Path) -> Iterator[Daemon]:
    """Run a daemon, whose state is in `folder`, from when it has seen the engine serve."""
    nvml = FakeNvml(folder, [FakeGpu(uuid="GPU-a", used_bytes=HELD)])
    with daemon(ENGINE_URL=engine.url, GPUS="0", STATE_DIR=str(folder), **nvml.environment()) as running:
        becomes(running, "serving")
        yield running


@contextmanager
def busy(engine: Engine, running: Daemon) -> Iterator[None]:
    """Let a request run from when the daemon has seen one until the block or the engine ends."""
    enough = threading.Event()

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):
            while not enough.is_set():
                engine.complete(words(0, 64), 400)

    client = threading.Thread(target=ask)
    client.start()
    running.sees(lambda page: page.value("engine_requests_running") > 0, "requests run", PATIENCE_SECONDS, 1.0)
    try:
        yield
    finally:
        enough.set()
    client.join()


def named(running: Daemon, folder: Path) -> dict[str, Any]:
    """Return what postmortem says once an incident was set aside."""
    running.sees(lambda page: page.has("last_incident_timestamp_seconds"), "an incident", PATIENCE_SECONDS, 1.0)
    command = [sys.executable, "-m", "vllm_headroom", "postmortem", str(folder), "--json"]
    report: dict[str, Any] = read_data(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print({key: report[key] for key in ("what", "reason", "cause", "sure", "evidence")})  # noqa: T201 - for the record
    return report


def test_a_stopped_core_is_a_hang(engine: Engine, tmp_path: Path) -> None:
    stopped = core(engine)
    with watched(engine, tmp_path) as running, busy(engine, running):
        os.kill(stopped, signal.SIGSTOP)
        try:
            report = named(running, tmp_path)
        finally:
            os.kill(stopped, signal.SIGCONT)

    assert (report["what"], report["cause"]) == ("stalled", "hang")


def test_a_core_that_is_killed_at_work_is_a_crash_and_that_is_not_sure(engine: Engine, tmp_path: Path) -> None:
    with watched(engine, tmp_path) as running, busy(engine, running):
        os.kill(core(engine), signal.SIGKILL)
        report = named(running, tmp_path)

    assert (report["what"], report["cause"]) == ("ended", "crash")
    assert report["sure"] != "sure"


def test_an_engine_that_is_asked_to_end_while_idle_ended_so(tmp_path: Path) -> None:
    with serving(free_port(), FOLDER / "serve.log") as engine:
        started(engine)
        engine.complete(words(1, 20), 5)
        with watched(engine, tmp_path) as running:
            running.sees(lambda page: page.value("engine_requests_running") == 0, "nothing runs", PATIENCE_SECONDS, 1.0)
            os.kill(engine.process.pid, signal.SIGTERM)
            report = named(running, tmp_path)

    assert (report["what"], report["cause"]) == ("ended", "ended_while_idle")
    assert report["sure"] != "sure"
