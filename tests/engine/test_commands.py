"""The commands against a real vLLM. Run by `make engine-test`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.command import read_data
from tests.engine.serving import Engine
from tests.process import daemon
from vllm_headroom.scrape.proc.files import list_pids, read_command

pytestmark = pytest.mark.engine

PROC = Path("/proc")


def smoke(*words: str) -> tuple[int, Any, str]:
    """Return the exit status, the answer and what was said meanwhile."""
    process = subprocess.run(
        [sys.executable, "-m", "vllm_headroom", "smoke", "--json", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    return process.returncode, read_data(process.stdout), process.stderr


def _is_of(engine: Engine, pid: int) -> bool:
    return os.getpgid(pid) == engine.process.pid


def core_of(engine: Engine) -> int:
    """Return the pid of the engine's core, which has a separate title."""
    (core,) = (
        pid for pid in list_pids(PROC) if "EngineCore" in " ".join(read_command(PROC, pid)) and _is_of(engine, pid)
    )
    return core


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def steps(document: Any) -> dict[str, str]:
    return {step["name"]: step["state"] for step in document["steps"]}


def test_smoke_waits_while_the_model_loads(starting: Engine) -> None:
    status, document, stderr_text = smoke("--engine-url", starting.url, "--deadline", "5m")

    assert (status, steps(document)["health"]) == (0, "ok")
    assert stderr_text.startswith("waiting, 5 min 0 s left: ")


def test_smoke_makes_one_request_and_finds_it_counted(engine: Engine) -> None:
    with daemon(ENGINE_URL=engine.url, SAMPLE_INTERVAL_SECONDS="2") as sidecar:
        earlier_page = sidecar.sees(lambda page: page.has("engine_requests_finished_total"), "the engine is found")
        finished = earlier_page.value("engine_requests_finished_total")

        status, document, stderr_text = smoke("--engine-url", engine.url)

        sidecar.sees(
            lambda page: page.value("engine_requests_finished_total") == finished + 1, "one more request has finished"
        )

    assert (status, stderr_text) == (0, "")
    assert steps(document) == {"health": "ok", "completion": "ok", "metrics": "ok", "discrepancy": "skipped"}
    completion, metrics = document["steps"][1]["text"], document["steps"][2]["text"]
    assert completion.startswith("tiny gave ")
    assert metrics.endswith("; finished requests rose by 1")


def test_smoke_fails_on_an_engine_that_hangs_while_its_web_server_is_healthy(engine: Engine) -> None:
    with stopped(core_of(engine)):
        status, document, _ = smoke("--engine-url", engine.url, "--deadline", "1m", "--completion-deadline", "5s")

    assert status == 1
    assert steps(document)["health"] == "ok"
    assert steps(document)["completion"] == "failed"
    assert "/v1/completions did not answer within " in document["steps"][1]["text"]
