"""The command as a process, and what it said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Final

OWN: Final = {name: value for name, value in os.environ.items() if not name.startswith("HEADROOM_")}


def check(*words: str, trace: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_headroom", "check", *words],
        input=trace,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=OWN,
    )


def document(*words: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status and what --json printed."""
    process = check(*words, "--json")
    assert process.stderr == ""
    found = json.loads(process.stdout)
    assert isinstance(found, dict)
    return process.returncode, found


def judged(*words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit status and each judgement by its limit, of which each is on one thing."""
    status, found = document(*words)
    return status, {each["limit"]: each for each in found["limits"]}
