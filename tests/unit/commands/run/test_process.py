"""The process that reads the settings, and the daemon that keeps only what they say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.unit.test_main import OWN

RUN: Final = (sys.executable, "-m", "vllm_headroom", "run")


@pytest.fixture
def reading(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a daemon whose child reads a file of settings that does not end."""
    file = tmp_path / "headroom.yaml"
    os.mkfifo(file)
    with (
        subprocess.Popen(
            [*RUN, "--config", str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=OWN
        ) as process,
        file.open("w"),
    ):  # opened once the child reads it
        os.kill(children(process)[0], signal.SIGSTOP)  # else it gives up at some time
        yield process


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def test_a_child_that_is_killed_ends_the_daemon_with_a_line(reading: subprocess.Popen[str]) -> None:
    (child,) = children(reading)

    os.kill(child, signal.SIGKILL)

    assert reading.communicate(timeout=60) == (
        "",
        "vllm-headroom run: signal 9 ended the process that read the settings\n",
    )
    assert reading.returncode == 1


def test_the_daemon_stops_when_told_while_its_settings_are_read(reading: subprocess.Popen[str]) -> None:
    (child,) = children(reading)

    reading.terminate()

    assert reading.wait(60) == 0
    os.kill(child, signal.SIGKILL)


def test_the_daemon_has_nothing_of_what_reads_settings() -> None:
    code = "import sys; import vllm_headroom.daemon.app; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=OWN)

    assert not {"pydantic", "pydantic_settings", "argparse", "yaml"} & set(imported.stdout.split())
