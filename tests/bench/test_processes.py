from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.bench.results import Results
from tests.fakes.proc_tree import ProcTree
from vllm_headroom.model import Failure
from vllm_headroom.scrape.proc.reader import Processes

pytestmark = pytest.mark.bench

PROCESSES = 10_000
INTERVAL_SECONDS = 5.0
READINGS = 9
NEW = 20
"""Processes that come and go between two readings: on a busy host there is no reading without."""


def test_a_host_with_many_processes(tmp_path: Path, results: Results) -> None:
    """Read a /proc of files, which cost as much to open as the kernel's own, with some coming and going."""
    tree = ProcTree(tmp_path, own_pid=99_999)
    tree.add(50, 1, "vllm", "serve", "m")
    tree.add(51, 50, "VLLM::EngineCore")
    for pid in range(100, 100 + PROCESSES):
        tree.add(pid, 1, "sleep", "600")
    now = 0.0
    processes = Processes(engine_port=8000, proc=tree.path, monotonic=lambda: now)
    took: list[float] = []
    for reading in range(READINGS):
        for pid in range(20_000, 20_000 + NEW):
            tree.add(pid, 1, "sh", "-c", "true", started_ticks=reading)
        began = time.thread_time()
        readings = processes._read(None)
        assert not isinstance(readings, Failure)
        assert len(readings.engine) == 2
        took.append(time.thread_time() - began)
        now += INTERVAL_SECONDS

    results.note(f"{PROCESSES:,} processes on the host: CPU of the first reading", f"{1e3 * took[0]:.3g} ms")
    results.at_most(50, f"{PROCESSES:,} processes on the host: CPU of a later one, most", 1e3 * max(took[1:]), " ms")
