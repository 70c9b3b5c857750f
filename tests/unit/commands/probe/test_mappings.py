"""The growth of a process's mappings beside its recording: what no Python line allocated."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tests.samples import probed
from vllm_headroom.scrape.proc.files import read_entry
from vllm_headroom.scrape.proc.host import read_boot_time
from vllm_headroom_tools.probe.record import _read_mappings
from vllm_headroom_tools.probe.report import render_recording

PROC = Path("/proc")
MIB = 2**20


def test_growth_is_named_by_its_kind() -> None:
    process = {"role": "worker", "pid": 7, "problem": None, "note": None, "cost": {}, "host": [], "gpu": []}
    cost = {"pause_seconds": None, "cpu_seconds": None, "memory_bytes": None}
    mappings = {"memfd": 20 * MIB, "libucs.so.0": MIB, "heap": 1000, "shm": -MIB}

    text = "\n".join(
        render_recording({"seconds": 60.0, "processes": [{**process, "cost": cost, "mappings": mappings}]})
    )

    assert "20 MiB more resident in memfd, by the kernel's account of its mappings" in text
    assert "1 MiB more resident in libucs.so.0" in text
    assert "heap" not in text


def test_only_the_same_process_is_read() -> None:
    """A pid of another PID namespace, or one that was reused, is somebody else's."""
    entry = read_entry(PROC, os.getpid())
    assert entry is not None
    began = read_boot_time(PROC) + entry.started_seconds

    assert asyncio.run(_read_mappings(probed(pid=os.getpid(), started_at_seconds=began)))
    assert asyncio.run(_read_mappings(probed(pid=os.getpid(), started_at_seconds=began + 100))) is None
