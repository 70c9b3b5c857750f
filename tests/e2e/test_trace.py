"""The daemon records what it samples, and replay understands it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.command import read_data
from tests.process import daemon, eventually


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_headroom", *words], capture_output=True, text=True, check=False, timeout=60
    )


def wait_for_samples(file: Path, samples: int) -> list[bytes]:
    """Let the daemon record; return the lines, their ends included."""
    with daemon("demo", "--speed", "100", TRACE_FILE=str(file)) as running:
        eventually(lambda: file.exists() and file.read_bytes().count(b"\n") > samples, "some samples are recorded")
        running.stop()
    return file.read_bytes().splitlines(keepends=True)


def test_what_the_daemon_recorded_can_be_replayed(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"

    with daemon("demo", "--speed", "100", TRACE_FILE=str(file)) as running:
        eventually(lambda: file.exists() and file.read_bytes().count(b"\n") > 10, "some samples are recorded")
        status, _ = running.stop()
    process = command("replay", str(file), "--json")

    assert status == 0
    assert (process.returncode, process.stderr) == (0, "")
    data = read_data(process.stdout)
    assert data["samples"] >= 10
    assert [gpu["uuid"] for gpu in data["gpus"]] == ["GPU-00000000-0000-4000-8000-000000000000"]
    assert [role["process"] for role in data["host"]] == ["api_server", "engine_core", "worker"]


def test_a_daemon_that_cannot_record_says_so_once_and_runs_on(tmp_path: Path) -> None:
    with daemon("demo", "--speed", "100", TRACE_FILE=str(tmp_path / "missing" / "trace")) as running:
        first_page = running.sees(lambda page: page.value("engine_requests_finished_total"), "the first sample")
        finished_before = first_page.value("engine_requests_finished_total")
        running.sees(
            lambda page: page.value("engine_requests_finished_total") > finished_before + 1000, "it samples on"
        )

        assert running.log().count("trace not written") == 1
        assert running.get("/healthz").status_code == 200


def test_the_trace_has_what_the_engine_and_the_gpu_said(tmp_path: Path) -> None:
    newest = json.loads(wait_for_samples(tmp_path / "trace", 10)[-1])
    (engine,), (gpu,) = newest["engines"], newest["gpus"]

    assert engine["gpu_memory_utilization"] == 0.92
    assert engine["kv_cache_dtype"] == "auto"
    assert engine["prompt_tokens_total"] > 0
    assert engine["generation_tokens_total"] > 0
    assert gpu["used_peak"] > 0


def test_a_trace_whose_last_line_is_cut_off_is_read_up_to_it_by_each_command(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    *complete_lines, last_line = wait_for_samples(file, 10)
    file.write_bytes(b"".join(complete_lines) + last_line[: len(last_line) // 2])

    limit = ("--max-leak-per-thousand-requests", "1MiB")
    for words in (("replay", str(file)), ("check", "--trace", str(file), *limit), ("advise", str(file))):
        process = command(*words, "--json")

        assert process.stderr == f"{file}: line {len(complete_lines) + 1}, the last, is cut off and left out\n", words
        assert read_data(process.stdout)
