"""Native stacks by the real perf, of a real leak in C, and what is said where there are none."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.fakes.leaks import build_leaks
from tests.process import eventually
from vllm_headroom_tools.perf import FAULTS_PER_STACK, Faults, count_faults, record_faults
from vllm_headroom_tools.probe.report import render_recording

NOBODY = 2**22 - 1
"""No process has this pid, unless there are four million."""


def test_the_function_that_leaks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    leaks = build_leaks(tmp_path, "-g")
    with subprocess.Popen([leaks, "mmap", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as leaking:

        def leak() -> None:
            assert leaking.stdin is not None
            assert leaking.stdout is not None
            leaking.stdin.write("\n")
            leaking.stdin.flush()
            assert leaking.stdout.readline() == "done\n"

        async def record() -> tuple[Faults, str | None]:
            recording = asyncio.create_task(record_faults([leaking.pid], 600))
            while not recording.done() and not has_samples(tmp_path):
                leak()
                await asyncio.sleep(0.1)
            assert leaking.stdin is not None
            leaking.stdin.close()  # it exits, and perf with it
            return await recording

        faults, problem = asyncio.run(record())

    if problem is not None:
        pytest.skip(problem)
    assert "leak (libleaks.so)" in faults[leaking.pid][0]["stack"]
    assert list(tmp_path.glob("headroom-perf-*")) == []


def has_samples(folder: Path) -> bool:
    return any(file.stat().st_size > 64 * 1024 for file in folder.glob("headroom-perf-*/data"))


def test_without_perf_or_its_permission_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, problem = asyncio.run(record_faults([NOBODY], 1))
    assert faults == {}
    assert problem is not None
    assert problem.startswith("perf")
    fake = tmp_path / "perf"
    fake.write_text("#!/bin/sh\necho 'Error:\nAccess is limited.\nConsider' >&2\nexit 255\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert asyncio.run(record_faults([1], 1)) == ({}, "perf: Access is limited.")
    assert asyncio.run(record_faults([], 1)) == ({}, "vLLM's processes are not visible here")
    fake.write_text("no program")
    assert asyncio.run(record_faults([1], 1)) == ({}, "perf: Exec format error")
    monkeypatch.setenv("PATH", "")
    assert asyncio.run(record_faults([1], 1)) == ({}, "perf is not installed here")


def test_when_cancelled_perf_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, file = tmp_path / "perf", tmp_path / "pid"
    fake.write_text(f"#!/bin/sh\necho $$ > {file}.new\nmv {file}.new {file}\nexec sleep 600\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def cancel() -> None:
        recording = asyncio.create_task(record_faults([1], 600))
        while not file.exists():  # noqa: ASYNC110 - a file of another process
            await asyncio.sleep(0.05)
        recording.cancel()
        with pytest.raises(asyncio.CancelledError):
            await recording

    asyncio.run(cancel())
    pid = int(file.read_text())
    eventually(lambda: not Path("/proc", str(pid)).exists(), "perf has ended")


def test_its_text_is_read_as_far_as_it_goes() -> None:
    text = (
        "  7  \n\t 16e0ba __memset (/usr/lib/libc.so.6)\n\t 120a leak (/x/libucs.so.0 (deleted))\n\n"
        "  7  \n\t 16e0ba __memset (/usr/lib/libc.so.6)\n\t 120a leak (/x/libucs.so.0 (deleted))\n\n"
        "  8  \n\t 7f0 [unknown] ([unknown])\n\n  9 \n\nno pid\n\t 1 f (g)\n\n\x1b\n"
    )
    assert count_faults(text) == {
        7: [{"faults": 2 * FAULTS_PER_STACK, "stack": ["__memset (libc.so.6)", "leak (libucs.so.0)"]}],
        8: [{"faults": FAULTS_PER_STACK, "stack": ["[unknown] ([unknown])"]}],
    }
    assert count_faults("") == {}
    deep = "1\n" + "\t 1 f (g)\n" * 100
    assert [len(fault["stack"]) for fault in count_faults(deep)[1]] == [16]


def test_they_are_shown_below_the_mappings() -> None:
    cost = {"pause_seconds": None, "cpu_seconds": None, "memory_bytes": None}
    process = {"role": "worker", "pid": 7, "problem": None, "note": None, "cost": cost, "host": [], "gpu": []}
    native = [{"faults": 5120, "stack": ["memset (libc.so.6)", "leak (libucs.so.0)"]}]
    shown = [{**process, "mappings": {}, "native": native}, {**process, "native": None}]
    text = "\n".join(render_recording({"seconds": 60.0, "processes": shown, "no_native": "perf is not installed here"}))

    assert "  5,120 first uses of a page  memset (libc.so.6)\n             called from leak (libucs.so.0)\n" in text
    assert text.endswith("\n\nNo native stacks: perf is not installed here")
