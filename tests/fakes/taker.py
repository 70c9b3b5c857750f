"""A process in a cgroup that takes memory as instructed, under the name of a vLLM server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

TAKES: Final = """
import os, sys
open(os.environ["CGROUP"] + "/cgroup.procs", "w").write(str(os.getpid()))
held, file = [], open(os.environ["FILE"], "wb", 0)
for line in sys.stdin:
    what, number = line.split()
    if what == "hold":
        held.append(b"x" * (int(number) * 2**20))
    else:
        for _ in range(int(number)):
            file.write(b"w" * 2**20)
            os.fsync(file.fileno())
    print("done", flush=True)
"""
"""Enters a cgroup, then takes memory or fills a file as instructed."""


class Taker:
    """The process, which has answered once."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.pid = process, process.pid

    def asked(self, order: str, mib: int) -> str:
        """Let it take so many MiB; return what it answers, nothing once it was killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{order} {mib}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@contextmanager
def taking(folder: Path, program: Path, *, port: int = 8000, file: Path | None = None) -> Iterator[Taker]:
    """Run `program`, which is written for it, in the cgroup at `folder`, with a port in its command line."""
    pipe = subprocess.PIPE
    program.write_text(TAKES)
    command = [sys.executable, "-S", str(program), "serve", "--port", str(port)]
    environment = {"CGROUP": str(folder), "FILE": str(file or os.devnull)}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        taker = Taker(process)
        assert taker.asked("hold", 1) == "done"
        yield taker
        process.kill()
