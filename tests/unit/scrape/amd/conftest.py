"""A machine with AMD cards, read in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.fakes.amd_tree import AmdTree
from tests.fakes.nobody import open_folder
from tests.fakes.nvml.reader import Clock
from tests.fakes.proc_tree import ProcTree
from vllm_headroom.model import GpuReading
from vllm_headroom.scrape.amd.reader import Amd

T = TypeVar("T")
PATIENCE_SECONDS = 20.0


class Machine:
    """Its /sys and /proc, of the machine's first PID namespace unless another /proc is made."""

    def __init__(self, folder: Path) -> None:
        self.sys = AmdTree(folder / "sys")
        (folder / "proc").mkdir()
        self.proc = ProcTree(folder / "proc")
        self.clock = Clock()

    def run(self, steps: Callable[[Amd], Awaitable[T]]) -> T:
        async def main() -> T:
            amd = Amd(monotonic=self.clock, sys=self.sys.path, proc=self.proc.path)
            try:
                return await steps(amd)
            finally:
                amd.close()

        return asyncio.run(main())

    def read(self) -> tuple[GpuReading, ...]:
        return self.run(lambda amd: amd.read(PATIENCE_SECONDS))


@pytest.fixture
def machine() -> Iterator[Machine]:
    with open_folder() as folder:
        yield Machine(folder)
