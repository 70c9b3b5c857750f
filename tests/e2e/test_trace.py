"""The daemon records what it samples, and replay understands it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.process import daemon, eventually


def test_what_the_daemon_recorded_can_be_replayed(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"

    with daemon("demo", "--speed", "100", TRACE_FILE=str(file)) as running:
        eventually(lambda: file.exists() and file.read_bytes().count(b"\n") > 10, "some samples are recorded")
        status, _ = running.stop()
    process = subprocess.run(
        [sys.executable, "-m", "vllm_headroom", "replay", str(file), "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert status == 0
    assert (process.returncode, process.stderr) == (0, "")
    found = json.loads(process.stdout)
    assert found["samples"] >= 10
    assert [gpu["uuid"] for gpu in found["gpus"]] == ["GPU-00000000-0000-4000-8000-000000000000"]
    assert [role["process"] for role in found["host"]] == ["api_server", "engine_core", "worker"]


def test_a_daemon_that_cannot_record_says_so_once_and_runs_on(tmp_path: Path) -> None:
    with daemon("demo", "--speed", "100", TRACE_FILE=str(tmp_path / "missing" / "trace")) as running:
        first = running.sees(lambda page: page.value("engine_requests_finished_total"), "the first sample")
        before = first.value("engine_requests_finished_total")
        running.sees(lambda page: page.value("engine_requests_finished_total") > before + 1000, "it samples on")

        assert running.log().count("trace not written") == 1
        assert running.get("/healthz").status_code == 200
