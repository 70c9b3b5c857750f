"""What `load` costs: 10,000 streams from one process, and 1,000 beside a plain httpx loop."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.bench.processes import ROOT, cpu_seconds, findings, resident_bytes, start
from tests.bench.results import Results
from tests.command import read_data
from tests.fakes.nvml.library import MIB
from tests.fakes.streaming_server import LOOPBACK

pytestmark = pytest.mark.bench

STREAMS = 10_000
FEWER = 1000
KIB = 1024


class Server:
    """The local server in a separate process; `counts` are there once it has ended."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.counts: dict[str, int] = {}
        self._process = process
        self.port = int(process.stdout.readline())

    def end(self) -> None:
        output, _ = self._process.communicate("")
        self.counts = json.loads(output)


@contextmanager
def serving() -> Iterator[Server]:
    """Stream a token a second to everyone."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.streaming_server", '{"interval_seconds": 1}'],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    server = Server(process)
    yield server
    if process.poll() is None:
        server.end()


def test_ten_thousand_streams(results: Results, tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 1.3 * STREAMS:
        pytest.skip(f"ulimit -Hn {hard} is too low for {STREAMS} streams")
    with serving() as server:
        words = ["--engine-url", f"http://{LOOPBACK}:{server.port}", "--concurrency", str(STREAMS), "--duration", "5s"]
        tokens = ["--output-tokens", "10", "--prompt-tokens", "256", "--trace", str(tmp_path / "trace"), "--json"]
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_headroom", "load", *words, *tokens], stdout=subprocess.PIPE, text=True
        )
        most_bytes, cpu = 0, 0.0
        while process.poll() is None:
            try:
                most_bytes, cpu = max(most_bytes, resident_bytes(process.pid)), cpu_seconds(process.pid)
            except OSError:
                break
            time.sleep(0.2)
        output, _ = process.communicate()
        data = read_data(output)
        server.end()

    counts, requests = server.counts, data["requests"]
    assert requests["began"] == requests["succeeded"] == counts["requests"] == counts["finished"]
    assert sum(step["generation_tokens"] for step in data["steps"]) == counts["generation_tokens"]
    assert max(step["streams_most"] for step in data["steps"]) == counts["most_open"]
    results.at_least(
        STREAMS / 1000, "`load`: streams open at once, by the server's count", counts["most_open"] / 1000, " thousand"
    )
    results.at_most(300, "`load` with those: resident memory, sampler included", most_bytes / MIB, " MiB")
    results.note("`load`: CPU per event received, all included", f"{1e6 * cpu / counts['generation_tokens']:.3g} us")
    late = max(step["own_delay_seconds"]["p99"] for step in data["steps"])
    results.note("`load`: how late it was to 10,000 events that came at once, p99", f"{late:.2g} s")


def test_beside_a_plain_httpx_loop(results: Results) -> None:
    """Hold as many streams with both, one after the other, over the same server."""
    with serving() as server:
        ours, theirs = (findings(start("streams", kind, str(server.port), str(FEWER))) for kind in ("ours", "httpx"))
        server.end()

    assert ours["events"] == theirs["events"] == server.counts["generation_tokens"] / 2 - FEWER
    cpu = theirs["cpu_seconds"] / ours["cpu_seconds"]
    memory = theirs["bytes"] / ours["bytes"]
    events = ours["events"]
    results.note(
        f"{FEWER} streams: CPU per event, ours / httpx",
        f"{1e6 * ours['cpu_seconds'] / events:.3g} / {1e6 * theirs['cpu_seconds'] / events:.3g} us",
    )
    results.note(
        f"{FEWER} streams: memory per stream, ours / httpx",
        f"{ours['bytes'] / FEWER / KIB:.2g} / {theirs['bytes'] / FEWER / KIB:.2g} KiB",
    )
    results.at_least(5, f"{FEWER} streams: CPU of httpx over ours", cpu, " times")
    results.at_least(2, f"{FEWER} streams: memory of httpx over ours", memory, " times")
