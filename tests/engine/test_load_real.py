"""The command `load` on a real vLLM: the client's counts are the engine's. Run by `make engine-test`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.command import read_data
from tests.engine.serving import Engine
from tests.process import NO_TLS, eventually

pytestmark = pytest.mark.engine

LENGTHS = ("--prompt-tokens", "16..256", "--output-tokens", "4..64")
MAX_NUM_SEQS = 16
PATIENCE_SECONDS = 300
EVERY_SECONDS = 1.0
"""Between looks at vLLM's page: its answers take what the requests need."""


def counter(engine: Engine, name: str) -> float:
    """Return the sum of a counter's series."""
    page = httpx.get(f"{engine.url}/metrics", timeout=60, verify=NO_TLS).text
    families = text_string_to_metric_families(page)
    return sum(sample.value for family in families for sample in family.samples if sample.name == f"vllm:{name}_total")


def start(engine: Engine, trace: Path, *words: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "vllm_headroom",
        "load",
        "--engine-url",
        engine.url,
        "--trace",
        str(trace),
        "--json",
    ]
    return subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True)


def found(process: subprocess.Popen[str], status: int) -> dict[str, Any]:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == status, output
    printed: dict[str, Any] = read_data(output)
    return printed


def test_the_clients_counts_are_the_engines(engine: Engine, tmp_path: Path) -> None:
    names = ("request_success", "prompt_tokens", "generation_tokens", "num_preemptions")
    counts_before = {name: counter(engine, name) for name in names}
    trace = tmp_path / "trace.jsonl"

    report = found(start(engine, trace, "--concurrency", "20", "--duration", "10s", "--grace", "5m", *LENGTHS), 0)

    counted = {name: counter(engine, name) - counts_before[name] for name in names}
    steps = report["steps"]
    assert report["requests"]["began"] == report["requests"]["succeeded"] == counted["request_success"]
    assert sum(step["prompt_tokens"] for step in steps) == counted["prompt_tokens"]
    assert sum(step["generation_tokens"] for step in steps) == counted["generation_tokens"]
    assert report["preemptions"] == counted["num_preemptions"] == 0
    assert [step["clients"] for step in steps] == [10, 15, 20, 24]
    assert max(step["engine"]["running_most"] for step in steps) == MAX_NUM_SEQS
    assert 0 < steps[-1]["engine"]["kv_used_ratio_most"] < 1
    assert all(step["time_to_first_token_seconds"]["p50"] < step["end_to_end_seconds"]["p50"] for step in steps)
    assert 16 <= counted["prompt_tokens"] / counted["request_success"] <= 256
    assert {memory["process"] for memory in report["host"]} >= {"api_server", "engine_core"}
    replay = [sys.executable, "-m", "vllm_headroom", "replay", str(trace), "--json"]
    assert (
        read_data(subprocess.run(replay, capture_output=True, check=True).stdout.decode())["samples"]
        == report["samples"]
    )


def test_words_stand_in_for_tokens(engine: Engine, tmp_path: Path) -> None:
    words = ("--concurrency", "1", "--max-requests", "3", "--prompt-tokens", "100", "--output-tokens", "7")

    report = found(start(engine, tmp_path / "trace", *words, "--duration", "60s"), 0)

    (step,) = report["steps"]
    assert report["requests"]["succeeded"] == 3
    assert step["prompt_tokens"] == pytest.approx(300, abs=6)
    assert step["generation_tokens"] == 21


def test_what_the_engine_refuses_is_reported_in_its_words(engine: Engine, tmp_path: Path) -> None:
    report = found(start(engine, tmp_path / "trace", "--concurrency", "2", "--max-requests", "2", "--api", "chat"), 1)

    assert report["requests"]["failed"] == report["requests"]["began"] == 2
    assert report["faults"] == ["no request succeeded"]
    assert "chat template" in report["said"][0]["text"]


def test_a_request_that_is_given_up_leaves_the_engine(engine: Engine, tmp_path: Path) -> None:
    words = (
        "--concurrency",
        "8",
        "--duration",
        "1s",
        "--grace",
        "1s",
        "--prompt-tokens",
        "8",
        "--output-tokens",
        "2000",
    )

    report = found(start(engine, tmp_path / "trace", *words), 1)

    assert report["requests"]["unfinished"] == report["requests"]["began"] >= 4
    eventually(lambda: _running(engine) == 0, "the engine has let go of them", PATIENCE_SECONDS, EVERY_SECONDS)


def test_an_engine_that_is_killed_is_not_good(engine: Engine, tmp_path: Path) -> None:
    process = start(engine, tmp_path / "trace", "--concurrency", "8", "--duration", "5s", *LENGTHS)
    eventually(lambda: _running(engine) > 0, "requests run", PATIENCE_SECONDS, EVERY_SECONDS)
    os.killpg(engine.process.pid, signal.SIGKILL)

    report = found(process, 1)

    assert report["faults"][0].startswith("the engine is gone: its page refuses connections")
    assert report["requests"]["refused"] > 0


def _running(engine: Engine) -> float:
    page = httpx.get(f"{engine.url}/metrics", timeout=60, verify=NO_TLS).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "vllm:num_requests_running"
    )
