"""What draws in the terminal is imported where something is drawn, and nowhere else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Final

import pytest

from tests.assets.terminal import FREE_PORT, OWN
from tests.unit.commands.screen import on_a_terminal

MAIN: Final = """
import os, sys
sys.modules["click"] = None  # only the tests' tools bring it; httpx, which finds it, takes rich along by itself
end = os._exit
os._exit = lambda status: (sys.stdout.write(" ".join(sys.modules)), sys.stdout.flush(), end(status))
sys.argv = ["vllm-headroom", *sys.argv[1:]]
from vllm_headroom.__main__ import main
main()
"""


def imported(written: str) -> set[str]:
    return {name for name in written.split() if name.partition(".")[0] == "rich"}


def test_the_daemon_imports_none_of_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MAIN], env=OWN | FREE_PORT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as daemon:
        assert daemon.stderr is not None
        assert any("listening" in line for line in daemon.stderr)
        daemon.send_signal(signal.SIGTERM)
        modules, _ = daemon.communicate(timeout=60)

    assert {"logging", "httpx", "vllm_headroom.daemon.app"} <= set(modules.split())
    assert not imported(modules)


@pytest.mark.parametrize("words", [["--help"], ["replay", "--help"], ["watch", "--help"]])
def test_help_on_a_terminal_needs_none_of_it(words: list[str]) -> None:
    written, status = on_a_terminal([sys.executable, "-c", MAIN, *words])

    assert status == 0
    assert "argparse" in written
    assert not imported(written)


def test_what_is_drawn_is_drawn_by_it() -> None:
    written, status = on_a_terminal([sys.executable, "-c", MAIN, "replay"])

    assert status == 2
    assert "rich.console" in imported(written)


def test_a_mistake_in_the_daemons_options_is_drawn_too() -> None:
    written, status = on_a_terminal([sys.executable, "-m", "vllm_headroom", "run", "--gpus", "x" * 20], columns=40)

    assert status == 2
    assert max(map(len, written.splitlines())) <= 40
    assert os.linesep in written
