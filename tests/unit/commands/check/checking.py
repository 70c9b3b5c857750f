"""The command, and what it wrote."""

from __future__ import annotations

from subprocess import CompletedProcess
from typing import Any

from tests.command import read_data, run_command


def check(*words: str, trace: str = "") -> CompletedProcess[str]:
    return run_command("check", *words, stdin=trace)


def document(*words: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status and what --json printed."""
    process = check(*words, "--json")
    assert process.stderr == ""
    data = read_data(process.stdout)
    assert isinstance(data, dict)
    return process.returncode, data


def run_check(*words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit status and each judgement by its limit, of which each is on one thing."""
    status, report = document(*words)
    return status, {limit["limit"]: limit for limit in report["limits"]}
