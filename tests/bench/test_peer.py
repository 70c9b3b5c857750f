from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.bench.busy_engine import ONE_ENGINE, busy
from tests.bench.processes import ROOT, cpu_seconds, resident_bytes
from tests.bench.results import Results
from tests.fakes.engine_server import LOOPBACK, EngineServer
from tests.fakes.nvml.library import MIB, FakeNvml
from tests.process import daemon, eventually

pytestmark = pytest.mark.bench

PEER = "nvitop-exporter==1.7.2"
COLLECTIONS = 30


def test_beside_a_peer(nvml: FakeNvml, results: Results) -> None:
    """Let both collect and be scraped once a second, at the same time, over the same library.

    Ours also reads the engine's page and /proc, and derives. The peer also reads the host's metrics, and asks NVML for
    clocks, PCIe and NVLink, which this library does not have.
    """
    settings = {"GPUS": "all", "SAMPLE_INTERVAL_SECONDS": "1", **nvml.environment()}
    with (
        _peer(_installed(results), nvml) as (peer_url, peer_pid),
        EngineServer(busy(ONE_ENGINE)) as engine,
        daemon("run", ENGINE_URL=engine.url, **settings) as running,
    ):
        running.sees(lambda page: page.has("engine_requests_running"), "the engine answers")
        pids = (running.process.pid, peer_pid)
        before = [cpu_seconds(pid) for pid in pids]
        for _ in range(COLLECTIONS):
            time.sleep(1)
            httpx.get(f"{running.url}/metrics").raise_for_status()
            httpx.get(peer_url).raise_for_status()
        ours, theirs = (1e3 * (cpu_seconds(pid) - was) / COLLECTIONS for pid, was in zip(pids, before, strict=True))
        our_memory, their_memory = (resident_bytes(pid) / MIB for pid in pids)

    results.note(f"CPU per second, a collection and a scrape in each: ours / {PEER}", f"{ours:.2g} / {theirs:.2g} ms")
    results.note(f"resident memory: ours / {PEER}", f"{our_memory:.3g} / {their_memory:.3g} MiB")


def _installed(results: Results) -> Path:
    """Return the peer's command, installed once; skip where the package index does not answer."""
    home = ROOT / ".cache" / "bench" / PEER
    command = home / "bin" / "nvitop-exporter"
    if not command.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        installed = subprocess.run([*pip, PEER], capture_output=True, check=False)
        if installed.returncode:
            results.note(f"beside {PEER}", "left out: the package index does not offer it")
            pytest.skip(installed.stderr.decode(errors="replace"))
    return command


@contextmanager
def _peer(command: Path, nvml: FakeNvml) -> Iterator[tuple[str, int]]:
    """Run the peer; give the address of its page and its pid."""
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [str(command), "--bind-address", LOOPBACK, "--port", str(port), "--interval", "1"],
        env={**os.environ, **nvml.environment()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://{LOOPBACK}:{port}/metrics"
    try:
        eventually(lambda: _shows_gpus(url), "the peer shows the GPUs")
        yield url, process.pid
    finally:
        process.kill()
        process.wait(30)


def _shows_gpus(url: str) -> bool:
    try:
        return 'index="7"' in httpx.get(url).text
    except httpx.TransportError:
        return False
