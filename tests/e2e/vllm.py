"""Processes that look like vLLM's, to be killed, stopped and kept waiting."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.fakes.nvml.library import GIB, FakeNvml
from tests.process import eventually

ROOT = Path(__file__).parents[2]


class Vllm:
    """A server, a core and workers, of which the first holds `held_gib` of a GPU.

    `launcher` runs the server, `tells_port` is whether its command line does; where its `part` is root, an API server
    below it serves the page.
    """

    def __init__(
        self,
        folder: Path,
        nvml: FakeNvml,
        port: int,
        *,
        ready: bool = True,
        broken: bool = False,
        idle: bool = False,
        held_gib: int = 60,
        workers: int = 1,
        launcher: tuple[str, ...] = (),
        tells_port: bool = True,
        part: str = "",
    ) -> None:
        folder.mkdir()
        self._folder, self._nvml = folder, nvml
        if idle:
            (folder / "idle").touch()
        if broken:
            self.set_fault("broken")
        program = folder / "vllm"
        program.write_text((ROOT / "tests" / "fakes" / "working_vllm.py").read_text())
        if ready:
            self.become_ready()
        arguments = ("m", "--port") if tells_port else ("--config", "c.yaml")
        self.process = subprocess.Popen(
            [*launcher, sys.executable, str(program), "serve", *arguments, str(port)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "FOLDER": str(folder), "WORKERS": str(workers), "PART": part},
            start_new_session=True,
        )
        pid_files = [folder / name for name in (("pids", "server") if part else ("pids",))]
        eventually(lambda: all(pid_file.exists() for pid_file in pid_files), "the processes run")
        self.server, self.core, *self.workers = map(int, pid_files[0].read_text().split())
        self.worker = self.workers[0]
        if part:
            self.page_server = int(pid_files[1].read_text())
        self.hold(held_gib)

    def become_ready(self) -> None:
        (self._folder / "ready").touch()

    def set_fault(self, name: str, *, on: bool = True) -> None:
        """Break the page, or have it stay as it is, until that is turned off."""
        if on:
            (self._folder / name).touch()
        else:
            (self._folder / name).unlink()

    def hold(self, gib: int) -> None:
        """Hold so much of the GPU, whatever else is held there; nothing ends it."""
        self._nvml.gpus[0].processes = {**self._nvml.gpus[0].processes, self.worker: gib * GIB}
        if not gib:
            del self._nvml.gpus[0].processes[self.worker]
        self._nvml.gpus[0].used_bytes = sum(held_bytes or 0 for held_bytes in self._nvml.gpus[0].processes.values())
        self._nvml.write()

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        if pid == self.server:
            self.process.wait(30)

    def end(self) -> None:
        """End whatever is left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
