"""In a separate PID namespace: an engine that dies and a stranger that gets all its pids; prints what is seen."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.e2e.life import becomes, settings
from tests.e2e.vllm import Vllm
from tests.fakes.nvml.library import FakeGpu, FakeNvml
from tests.fakes.ports import free_port
from tests.process import daemon, eventually

LAST_PID: Final = Path("/proc/sys/kernel/ns_last_pid")


def has_gone(pid: int) -> bool:
    """Reap it, as init does, which the first process of a namespace is."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return not Path(f"/proc/{pid}").exists()


def end(vllm: Vllm) -> list[int]:
    pids = [vllm.server, vllm.core, vllm.worker]
    for pid in pids:
        vllm.kill(pid)
    eventually(lambda: all(map(has_gone, pids)), "all its processes have gone")
    return pids


def with_pids(pids: list[int], folder: Path, nvml: FakeNvml) -> Vllm:
    """Return another engine with these pids, which a thread of the daemon's may take first."""
    for attempt in range(20):
        LAST_PID.write_text(str(pids[0] - 1))
        stranger = Vllm(folder / f"stranger-{attempt}", nvml, free_port(), held_gib=30)
        if [stranger.server, stranger.core, stranger.worker] == pids:
            return stranger
        end(stranger)
        stranger.hold(0)
    raise AssertionError(pids)


def main() -> None:
    """Print the daemon's page after two more looks."""
    folder = Path(tempfile.mkdtemp())
    nvml, port = FakeNvml(folder, [FakeGpu(uuid="GPU-a")]), free_port()
    ours = Vllm(folder / "ours", nvml, port, held_gib=20)
    with daemon(**settings(port, nvml)) as running:
        becomes(running, "serving")
        pids = end(ours)
        ours.hold(0)
        stranger = with_pids(pids, folder, nvml)
        seen_page = running.sees(lambda page: page.value("gpu_memory_used_bytes") > 20 * 2**30, "the stranger's memory")
        success_seconds = seen_page.value("source_last_success_timestamp_seconds", source="process")
        running.sees(
            lambda page: page.value("source_last_success_timestamp_seconds", source="process") > success_seconds + 10,
            "a look",
        )
        sys.stdout.write(running.get("/metrics").text)
        end(stranger)


if __name__ == "__main__":
    main()
