"""Runs the doctor in this process, over real sockets, files and a C library."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import threading
from pathlib import Path
from typing import Final

from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import EngineServer, page
from tests.fakes.proc_tree import ProcTree
from tests.settings import load
from vllm_headroom_tools.doctor.command import examine
from vllm_headroom_tools.doctor.fixes import Check

CONTAINER: Final = "pid:[4026532555]"
CORE: Final = 4426
"""The pid of the engine's core, which holds its GPU memory."""

STRANGER: Final = (2, 1, "/usr/sbin/sshd")
"""A process that is neither the engine's nor the doctor's own: without one, /proc counts as hidden."""

RECORDED: Final = (
    (FOLDER / "vllm-0.32.0" / "load-waiting.prom")
    .read_text()
    .replace('kv_cache_memory_bytes="1073741824"', 'kv_cache_memory_bytes="None"')
)
"""A vLLM with requests and a budget."""


class _Heads(list[str]):
    """Remembers for each thread the head it has taken last: each answers one connection."""

    def __init__(self) -> None:
        super().__init__()
        self.own = threading.local()

    def append(self, head: str) -> None:
        self.own.head = head
        super().append(head)


class Vllm(EngineServer):
    """Serves /metrics and /version."""

    def __init__(self, metrics: str = RECORDED, version: str = "0.32.0", *, port: int = 0) -> None:
        self._heads = _Heads()
        self.metrics, self.version = page(metrics), page(json.dumps({"version": version}))
        super().__init__(self._by_path, port=port)
        self.requests = self._heads

    def _by_path(self, connection: socket.socket, closing: threading.Event) -> None:
        requested_path = self._heads.own.head.split()[1]
        (self.version if requested_path == "/version" else self.metrics)(connection, closing)


def examined(proc: Path | None = None, sys: Path | None = None, /, **settings: str) -> dict[str, Check]:
    """Return the findings by name, with these settings without their prefix; nothing else is set.

    Without `proc` no process of a vLLM is seen and without `sys` no card of AMD's, whatever this machine has.
    """
    environ = {f"HEADROOM_{name}": value for name, value in {"LISTEN_PORT": "0", **settings}.items()}
    with tempfile.TemporaryDirectory() as folder:
        if proc is None:
            ProcTree(Path(folder)).add(*STRANGER)
        return dict(asyncio.run(examine(load([], environ), proc or Path(folder), sys or Path(folder))))


def proc(folder: Path, server: Vllm | None = None, *, namespace: str = CONTAINER, servers: int = 1) -> Path:
    """Return a /proc with the processes of `server`, or of several with its port; without one, they do not show."""
    path = folder / "proc"
    path.mkdir()
    tree = ProcTree(path, namespace=namespace)
    tree.add(*STRANGER)
    if server is not None:
        for pid in range(4380, 4380 + servers):
            tree.add(pid, 1, "python3", "/venv/bin/vllm", "serve", "tiny", "--port", str(server.port))
        tree.add(CORE, 4380, "VLLM::EngineCore")
    return path


def lines(finding: Check) -> list[str]:
    """Return the lines of all fixes."""
    return [line for fix in finding.fixes for line in fix.lines]
