"""What a killed engine leaves on a GPU: real processes, and a C library as NVML that goes on listing them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.fakes.nvml.reader import in_process
from tests.process import eventually
from vllm_headroom.derive.attribution import AttributionState, Selection, attribute
from vllm_headroom.model import Fate, Gpu, GpuReadings, ProcessReadings
from vllm_headroom.scrape.nvml.reader import Nvml
from vllm_headroom.scrape.proc.reader import Processes

PORT: Final = 10_000 + os.getpid() % 50_000
SERVER: Final = """
import subprocess, sys
core = subprocess.Popen(["bash", "-c", "echo $$; exec -a VLLM::EngineCore sleep 600"], stdin=subprocess.DEVNULL)
sys.stdin.readline()
core.wait()
sys.stdin.readline()
"""
"""A vLLM that reaps its core when it is instructed to."""


class Engine:
    """A server and its core, which holds 5 GiB of the one GPU, as they are seen tick by tick."""

    def __init__(self, folder: Path, nvml: FakeNvml) -> None:
        program = folder / "vllm"
        program.write_text(SERVER)
        command, pipe = [sys.executable, str(program), "serve", "--port", str(PORT)], subprocess.PIPE
        self.server = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        assert self.server.stdout is not None
        self.core = int(self.server.stdout.readline())
        nvml.gpus[0].used_bytes, nvml.gpus[0].processes = 5 * GIB, {self.core: 5 * GIB}
        nvml.write()
        self._clock = 0.0
        self._processes = Processes(engine_port=PORT, monotonic=self._now, rescan_seconds=0.0)
        self._state = AttributionState()

    def _now(self) -> float:
        return self._clock

    def tick(self) -> Gpu:
        readings, processes = asyncio.run(self._look())
        self._state, (gpu,) = attribute(self._state, readings, processes, Selection())
        return gpu

    async def _look(self) -> tuple[GpuReadings, ProcessReadings]:
        nvml = Nvml(monotonic=self._now, process_interval_seconds=0.0)
        readings, processes = await nvml.read(20), await self._processes.read(20)
        await nvml.close()
        assert isinstance(readings, GpuReadings)
        assert isinstance(processes, ProcessReadings)
        return readings, processes

    def fates(self) -> list[Fate]:
        gpu = self.tick()
        assert gpu.engine_bytes == 5 * GIB, "what ended is the engine's and no neighbour's"
        assert {leftover.pid for leftover in gpu.leftovers} <= {self.core}
        return [leftover.fate for leftover in gpu.leftovers]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with in_process(tmp_path, monkeypatch, [FakeGpu(uuid="GPU-a")]) as nvml:
        engine = Engine(tmp_path, nvml)
        eventually(lambda: engine.tick().engine_bytes == 5 * GIB, "the core is seen on the GPU")
        yield engine
        os.killpg(engine.server.pid, signal.SIGKILL)
        with engine.server:
            pass


def test_the_core_of_a_killed_server_is_reported_until_it_is_killed(engine: Engine) -> None:
    assert engine.fates() == []

    engine.server.kill()
    engine.server.wait(30)

    assert engine.fates() == [Fate.ORPHANED]


def test_a_core_that_nobody_reaps_is_a_zombie_and_then_one_that_no_longer_exists(engine: Engine) -> None:
    os.kill(engine.core, signal.SIGKILL)
    eventually(lambda: engine.fates() == [Fate.ZOMBIE], "the core is a zombie")

    assert engine.server.stdin is not None
    engine.server.stdin.write(b"\n")
    engine.server.stdin.flush()

    eventually(lambda: engine.fates() == [Fate.VANISHED], "its server reaped it, and NVML lists it still")
