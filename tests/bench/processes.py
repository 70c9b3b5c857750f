"""Other processes: what they use, and what a measuring one says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def start(module: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start a module of this folder, which prints its findings as JSON."""
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.bench.{module}", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def findings(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for the process and return what it printed."""
    output, _ = process.communicate()
    assert process.returncode == 0
    printed: dict[str, Any] = json.loads(output)
    return printed


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, to the nanosecond (clock_getcpuclockid(3)), and of its children.

    Children count once they ended, to a hundredth of a second: ours reads its settings in one.
    """
    stat_fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = sum(map(int, stat_fields[13:15])) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(~pid << 3 | 2) + children


def resident_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
