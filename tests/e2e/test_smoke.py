"""The real command, after vLLM has started, over real sockets and a C library as NVML."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import read_data
from tests.fakes.engine_server import page
from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.unit.commands.smoke.serving import Vllm, error

OWN = {name: value for name, value in os.environ.items() if not name.startswith("HEADROOM_")}


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path, [FakeGpu(uuid="GPU-a", used_bytes=74 * GIB)])


def smoke(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_headroom", "smoke", *words],
        env=OWN | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_vllm_that_serves_ends_with_status_0(nvml: FakeNvml) -> None:
    with Vllm() as server:
        process = smoke("--engine-url", server.url, **nvml.environment())

    assert (process.returncode, process.stderr) == (0, "")
    assert [line.split()[:2] for line in process.stdout.splitlines()] == [
        ["ok", "health"],
        ["ok", "completion"],
        ["ok", "metrics"],
        ["ok", "discrepancy"],
        ["vLLM", "serves."],
    ]


def test_one_that_runs_out_of_memory_ends_with_status_1(nvml: FakeNvml) -> None:
    oom = error("500 Internal Server Error", "CUDA out of memory. Tried to allocate 2.00 GiB")
    with Vllm({"/v1/completions": oom}) as server:
        process = smoke("--json", HEADROOM_ENGINE_URL=server.url, **nvml.environment())

    data = read_data(process.stdout)
    assert (process.returncode, process.stderr) == (1, "")
    assert data["serves"] is False
    assert data["engine_url"] == server.url
    assert {step["name"]: step["state"] for step in data["steps"]} == {
        "health": "ok",
        "completion": "failed",
        "metrics": "skipped",
        "discrepancy": "ok",
    }
    assert "CUDA out of memory" in data["steps"][1]["text"]


def test_one_that_never_gets_healthy_ends_with_status_1_and_says_what_was_waited_for() -> None:
    with Vllm({"/health": page("", status="503 Service Unavailable")}) as server:
        process = smoke("--engine-url", server.url, "--deadline", "1s")

    assert process.returncode == 1
    assert re.match(r"waiting, [01] s left: http://127.0.0.1:", process.stderr)
    assert process.stdout.startswith("FAILED   health       not healthy within 1 s: ")


def test_bad_settings_end_with_status_2_and_a_line_for_each() -> None:
    process = smoke("--deadline", "soon", "--max-discrepancy=x", "--completion-deadline", "0s", "--listen-port", "1")

    assert (process.returncode, process.stdout) == (2, "")
    assert [line.removeprefix("vllm-headroom smoke: ") for line in process.stderr.splitlines()] == [
        "--listen-port: not an option, see --help",
        "--deadline: got 'soon', accepts a duration above 0, at most a day, such as 90s or 15m",
        "--max-discrepancy: got 'x', accepts a share such as 5% or 0.05, at most 100%",
        "--completion-deadline: got '0s', accepts a duration above 0, at most a day, such as 90s or 15m",
    ]


def test_it_runs_in_the_daemons_environment() -> None:
    process = smoke("--deadline", "0.1s", HEADROOM_LISTEN_PORT="1", HEADROOM_ENGINE_URL="http://127.0.0.1:1")

    assert process.returncode == 1
