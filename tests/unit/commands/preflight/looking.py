"""Runs preflight in this process, over a C library, a /proc and a /dev/shm of one's own making."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from tests.fakes.nvml.library import FakeNvml
from tests.fakes.proc_tree import ProcTree
from vllm_headroom.scrape.gpus import Gpus
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.preflight.checks import GpuChoice, Kind, MemoryRequest, Obstacle
from vllm_headroom_tools.preflight.command import wait_until_settled
from vllm_headroom_tools.preflight.look import Conditions, read_conditions
from vllm_headroom_tools.preflight.report import Clearance, judge_conditions

CONTAINER: Final = "pid:[4026532555]"
DEFAULT: Final = MemoryRequest(utilization_ratio=0.92)


class Preflight:
    """Looks at what the fakes say; `said` are the lines that were reported while it waited."""

    def __init__(self, nvml: FakeNvml, folder: Path) -> None:
        self.nvml = nvml
        self.folder = folder
        self.namespace = ""
        self.said: list[str] = []
        self.shm = Path("/dev/shm")  # noqa: S108 - it is only looked at
        self.sys = folder / "sys"
        folder.joinpath("proc").mkdir()
        self.tree = ProcTree(folder / "proc")

    def in_a_container(self) -> None:
        link = self.tree.path / "self" / "ns" / "pid"
        link.unlink()
        link.symlink_to(CONTAINER)

    def report(
        self,
        ask: MemoryRequest = DEFAULT,
        wanted: GpuChoice | None = None,
        ignored: Collection[Kind] = (),
        *,
        patience_seconds: float = 20,
    ) -> Clearance:
        return self.wait(0, ask, wanted, ignored, patience_seconds=patience_seconds)

    def conditions(self, *, port: int = 0, patience_seconds: float = 20) -> Conditions:
        """Look once; with a port, for the engine that serves it."""

        async def main() -> Conditions:
            gpus = Gpus(monotonic=time.monotonic, process_interval_seconds=0, proc=self.tree.path, sys=self.sys)
            processes = Processes(engine_port=port, proc=self.tree.path, monotonic=time.monotonic)
            try:
                return await read_conditions(
                    gpus, processes, proc=self.tree.path, shm=self.shm, timeout_seconds=patience_seconds
                )
            finally:
                await gpus.close()

        return asyncio.run(main())

    def wait(
        self,
        seconds: float,
        ask: MemoryRequest = DEFAULT,
        wanted: GpuChoice | None = None,
        ignored: Collection[Kind] = (),
        *,
        patience_seconds: float = 20,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Clearance:
        """Return the report after waiting so long at most; `meanwhile` is done whenever it says that it waits."""

        def say(line: str) -> None:
            self.said.append(line)
            meanwhile()

        async def main() -> Clearance:
            gpus = Gpus(monotonic=time.monotonic, process_interval_seconds=0, proc=self.tree.path, sys=self.sys)
            processes = Processes(engine_port=0, proc=self.tree.path, monotonic=time.monotonic)

            async def once() -> Clearance:
                conditions = await read_conditions(
                    gpus, processes, proc=self.tree.path, shm=self.shm, timeout_seconds=patience_seconds
                )
                return judge_conditions(conditions, ask, wanted or GpuChoice(), ignored)

            try:
                return await wait_until_settled(once, seconds, say)
            finally:
                await gpus.close()

        return asyncio.run(main())


def only(report: Clearance) -> Obstacle:
    """Return the one finding, which is why it is no go."""
    (finding,) = report.findings
    assert report.verdict is finding.verdict is Conclusion.NOT_GOOD
    return finding
