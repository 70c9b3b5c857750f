"""The gate over what the daemon recorded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.command import read_data
from tests.process import daemon, eventually

SAMPLES = 150
"""More than ten minutes at five seconds, the least that is judged; some seconds at a hundred times the speed."""


def test_what_the_daemon_recorded_is_judged_and_a_leak_that_it_could_not_show_is_not_ruled_out(tmp_path: Path) -> None:
    file, report = tmp_path / "trace.jsonl", tmp_path / "report.xml"

    with daemon("demo", "--scenario", "healthy", "--speed", "200", TRACE_FILE=str(file)) as running:
        eventually(lambda: file.exists() and file.read_bytes().count(b"\n") > SAMPLES, "enough samples are recorded")
        running.stop()
    checked = check("--trace", str(file), "--max-discrepancy", "10%", "--gpu-memory-utilization", "0.9", "--json")
    unclear = check("--trace", str(file), "--max-leak-per-thousand-requests", "1MB", "--junit", str(report))

    assert (checked.returncode, checked.stderr) == (0, "")
    data = read_data(checked.stdout)
    assert data["outcome"] == "passed"
    assert [limit["limit"] for limit in data["limits"]] == ["engine restarts", "discrepancy"]
    assert (unclear.returncode, unclear.stderr) == (2, "")
    assert b'errors="1"' in report.read_bytes()


def test_a_daemon_that_saw_no_engine_records_nothing_that_passes(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"

    with daemon(TRACE_FILE=str(file), ENGINE_URL="http://127.0.0.1:9", SAMPLE_INTERVAL_SECONDS="0.1") as running:
        eventually(lambda: file.exists() and file.read_bytes().count(b"\n") > 5, "some samples are recorded")
        running.stop()
    done = check("--trace", str(file), "--max-bytes-per-request", "1TB", "--max-discrepancy", "99%")

    assert (done.returncode, done.stderr) == (2, "")
    assert "passed" not in done.stdout.lower()


def check(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_headroom", "check", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
