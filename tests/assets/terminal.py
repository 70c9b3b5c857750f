"""A terminal in a separate folder, in which a page's commands are typed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.process import eventually

SIDECAR: Final = "localhost:9839"
HIDDEN: Final = ("HEADROOM_", "CUDA_", "LD_LIBRARY_PATH")
OWN: Final = {name: value for name, value in os.environ.items() if not name.startswith(HIDDEN)}
COMMANDS: Final = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
FREE_PORT: Final = {"HEADROOM_LISTEN_HOST": "127.0.0.1", "HEADROOM_LISTEN_PORT": "0"}
"""Tests run side by side, so that no daemon may have the port that a page names."""

_LISTENS: Final = re.compile(r"\blistening\b.*\bport=(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is there when a block's commands are typed.

    `real` maps what a page writes to what it is here, such as an address; `then` is done when a command has said
    its first words, and so while it waits.
    """

    environment: dict[str, str] = field(default_factory=dict)
    real: dict[str, str] = field(default_factory=dict)
    then: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a command said; `status` is None while it serves."""

    status: int | None
    text: str


class Terminal:
    """Runs commands until they end, or until they serve; those that serve end when `opened` is closed."""

    def __init__(self, folder: Path, scene: Scene, opened: ExitStack) -> None:
        self._folder, self._scene, self._connect = folder, scene, opened
        self._real = dict(scene.real)
        self._logs = Path(opened.enter_context(tempfile.TemporaryDirectory()))

    @property
    def serves(self) -> bool:
        """Whether a daemon runs in it: what is expected of one is true sooner or later."""
        return SIDECAR in self._real

    def real(self, name: str) -> str:
        """Return what is here what a page writes."""
        return self._real[name]

    def says(self, command: str) -> Said:
        """Return what the command says until it ends or serves, with the page's words for what is real here."""
        handle, name = tempfile.mkstemp(dir=self._logs)
        log = Path(name)
        process = self._started(command, handle)
        eventually(lambda: _text(log) or process.poll() is not None, f"a word of {command}")
        self._scene.then()
        eventually(lambda: process.poll() is not None or _LISTENS.search(_text(log)), f"the end of {command}")
        if match := _LISTENS.search(_text(log)):
            self._real[SIDECAR] = f"127.0.0.1:{match[1]}"
        return Said(status=process.poll(), text=_renamed(_text(log), {real: name for name, real in self._real.items()}))

    def _started(self, command: str, handle: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            ["bash", "-c", _renamed(command.removesuffix("&"), self._real)],
            cwd=self._folder,
            env=OWN | {"PATH": COMMANDS, "COLUMNS": "100"} | FREE_PORT | self._scene.environment,
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(handle)
        self._connect.callback(_end, process)
        return process


@contextmanager
def opened(folder: Path, scene: Scene) -> Iterator[Terminal]:
    """Open a terminal in this folder."""
    with ExitStack() as stack:
        yield Terminal(folder, scene, stack)


def _renamed(text: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        text = text.replace(old, new)
    return text


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
