"""Processes that look like those of a vLLM server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(folder: Path, port: int) -> Iterator[int]:
    """Run what looks like vLLM's processes; yield the pid of its engine core."""
    script = folder / "vllm"
    script.write_text("import subprocess, sys; subprocess.run(['bash', '-c', sys.argv[-1]])")
    core = "echo $$; exec -a VLLM::EngineCore sleep 600"
    command = [sys.executable, str(script), "serve", "m", "--port", str(port), core]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            os.killpg(process.pid, signal.SIGKILL)
