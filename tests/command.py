"""A command of the program, and what it wrote: in this process, or as a process, which takes 0.4 s of CPU more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import BufferedReader, BytesIO, TextIOWrapper
from subprocess import CompletedProcess
from typing import Any, Final

import pytest
import uvloop

from vllm_headroom_tools import cli

OWN: Final = {name: value for name, value in os.environ.items() if not name.startswith(("HEADROOM_", "POD_"))}
"""The environment without the settings of whoever runs the tests."""


def run_command(name: str, *words: str, stdin: str = "", **environ: str) -> CompletedProcess[str]:
    """Run a command in this process, with streams and an environment as a process would have them."""
    read = TextIOWrapper(BufferedReader(BytesIO(stdin.encode())), encoding="utf-8")
    out, err = BytesIO(), BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        for variable in os.environ.keys() - OWN.keys():
            patch.delenv(variable)
        for variable, value in environ.items():
            patch.setenv(variable, value)
        patch.setattr(sys, "stdin", read)
        patch.setattr(sys, "stdout", TextIOWrapper(out, encoding="utf-8"))
        patch.setattr(sys, "stderr", TextIOWrapper(err, encoding="utf-8", write_through=True))
        patch.setattr(cli, "_await", uvloop.run)  # closes its loop, which the end of a process makes needless
        status = cli.execute(cli.find_command(name), name, words)
        return CompletedProcess((name, *words), status, out.getvalue().decode(), err.getvalue().decode())


def run_process(*words: str, stdin: str = "", **environ: str) -> CompletedProcess[str]:
    """Run the program with these words, for what only a process has: its imports, its start and its end."""
    return subprocess.run(
        [sys.executable, "-m", "vllm_headroom", *words],
        env=OWN | environ,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def read_data(out: str) -> dict[str, Any]:
    """Return the data of the envelope that a command printed with --json."""
    data: dict[str, Any] = json.loads(out)["data"]
    return data
