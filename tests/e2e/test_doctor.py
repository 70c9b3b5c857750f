"""The real command as a process: beside a vLLM with nothing missing, and beside everything that hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.command import read_data
from tests.fakes.engine_server import EngineServer, hang
from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.fakes.vllm_processes import serving
from tests.process import daemon
from tests.unit.commands.doctor.looking import Vllm

DEADLINE_SECONDS = 60
"""Far beyond the ten seconds that are promised, for a machine that is busy."""

OTHER_VARIABLES = {"LD_LIBRARY_PATH", "LD_PRELOAD", "NVML_FAKE_FILE"}
OWN = {name: value for name, value in os.environ.items() if not name.startswith("HEADROOM_")}


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command; `environment` holds settings without their prefix, and other variables in full."""
    return subprocess.run(
        [sys.executable, "-m", "vllm_headroom", "doctor", *arguments],
        env=OWN | settings(environment),
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_SECONDS,
    )


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {name if name in OTHER_VARIABLES else f"HEADROOM_{name}": value for name, value in environment.items()}


def states(answer: subprocess.CompletedProcess[str]) -> dict[str, str]:
    checks: list[dict[str, Any]] = read_data(answer.stdout)["checks"]
    return {check["name"]: check["state"] for check in checks}


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path, [FakeGpu(uuid=f"GPU-{letter}", used_bytes=2 * GIB) for letter in "ab"])


def test_with_everything_there_it_ends_with_status_0(nvml: FakeNvml, tmp_path: Path) -> None:
    with Vllm() as engine, serving(tmp_path, engine.port) as core, daemon(**nvml.environment()) as running:
        nvml.gpus[1].processes = {core: GIB}
        nvml.write()
        doctor_settings = {
            "ENGINE_URL": engine.url,
            "KV_BYTES_PER_TOKEN": "131072",
            "STATE_DIR": str(tmp_path / "state"),
            "TRACE_FILE": str(tmp_path / "trace.jsonl"),
            "LISTEN_PORT": running.url.rpartition(":")[2],
            **nvml.environment(),
        }
        answer, words = doctor("--json", **doctor_settings), doctor(**doctor_settings)

    assert (answer.returncode, answer.stderr) == (0, "")
    assert read_data(answer.stdout)["ok"] is True
    # Neither is configured here.
    assert {name for name, state in states(answer).items() if state != "ok"} == {"probe", "engine_log"}
    assert (words.returncode, words.stderr) == (0, "")
    assert "MISSING" not in words.stdout
    assert "GPU 1 (GPU-b) the engine's (process: " in words.stdout
    assert "a daemon is running here" in words.stdout
    assert words.stdout.endswith("\nNothing is missing.\n")


def test_without_vllm_and_library_it_says_what_needs_them() -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has an NVIDIA driver")
    words, answer = doctor(ENGINE_URL="http://127.0.0.1:1"), doctor("--json", ENGINE_URL="http://127.0.0.1:1")

    assert (words.returncode, answer.returncode) == (1, 1)
    assert words.stdout.startswith("MISSING  engine           no connection to http://127.0.0.1:1/metrics ")
    assert "\n                    runtimeClassName: nvidia\n" in words.stdout
    leak_states = states(answer)
    hidden = {"processes"}  # where this test runs alone, no process but its own is in the tests' namespace
    assert {name for name in leak_states if leak_states[name] == "missing"} - hidden == {"engine", "nvml"}
    assert leak_states["process_memory"] == "unknown"


def test_a_driver_and_an_engine_that_hang_do_not_hold_it(nvml: FakeNvml) -> None:
    nvml.hangs["nvmlInitWithFlags"] = 3600
    nvml.write()
    began = time.monotonic()
    with EngineServer(hang) as engine:
        answer = doctor("--json", ENGINE_URL=engine.url, **nvml.environment())

    assert answer.returncode == 1
    assert (states(answer)["engine"], states(answer)["nvml"]) == ("missing", "missing")
    assert time.monotonic() - began < 3 * 10, "nothing waits for what hangs"


def test_an_interrupt_is_not_taken_for_success() -> None:
    with EngineServer(hang) as engine:
        environment = OWN | settings({"ENGINE_URL": engine.url})
        command = [sys.executable, "-m", "vllm_headroom", "doctor"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
            while not engine.requests:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)

            assert process.wait(DEADLINE_SECONDS) == -signal.SIGINT


def test_a_reader_that_stops_reading_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as stdout:
        process = subprocess.run(
            [sys.executable, "-m", "vllm_headroom", "doctor"],
            env=OWN | settings({"ENGINE_URL": "http://127.0.0.1:1"}),
            stdout=stdout,
            stderr=subprocess.PIPE,
            check=False,
            timeout=DEADLINE_SECONDS,
        )

    assert (process.returncode, process.stderr) == (1, b"")
