"""A limit on threads costs what they are for, and ends nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from tests.fakes.ports import free_port
from tests.process import Page, eventually

WITHOUT_THREADS = """
import os, resource, sys
# A thread's stack of the whole address space: the kernel refuses each one, whosever the process is.
resource.setrlimit(resource.RLIMIT_STACK, (2**47, resource.getrlimit(resource.RLIMIT_STACK)[1]))
os.execv(sys.executable, [sys.executable, "-m", "vllm_headroom"])
"""


def test_a_daemon_that_can_start_no_thread_says_of_each_source_why_and_ends_when_asked_to(tmp_path: Path) -> None:
    port, no_port = free_port(), free_port()
    settings = {
        "HEADROOM_ENGINE_URL": f"http://localhost:{no_port}",  # a name: whoever resolves it may want a thread as well
        "HEADROOM_LISTEN_HOST": "127.0.0.1",
        "HEADROOM_LISTEN_PORT": str(port),
        "HEADROOM_PROBE_DIR": str(tmp_path),
        "HEADROOM_SAMPLE_INTERVAL_SECONDS": "0.2",
    }
    process = subprocess.Popen([sys.executable, "-c", WITHOUT_THREADS], env={**os.environ, **settings})
    try:

        def failed() -> Page | None:
            assert process.poll() is None
            try:
                page = Page(httpx.get(f"http://127.0.0.1:{port}/metrics").text)
            except httpx.TransportError:
                return None
            return page if page.has("source_failures_total", source="probe", reason="unavailable") else None

        first_page = eventually(failed, "a first sample is published")
        for source in ("engine", "nvml", "process", "probe"):
            assert first_page.value("source_failures_total", source=source, reason="unavailable") >= 1
        assert first_page.value("engine_state", state="unknown") == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait(30)
