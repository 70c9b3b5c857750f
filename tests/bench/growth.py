"""Turns the sampler as fast as it goes, in a separate process; prints how its resident memory grew.

The clock moves by an interval per tick, so that windows fill and empty as in eleven days. The engine is busy, it
fails now and then and restarts now and then; the GPUs' numbers move; every hundredth sample is scraped.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from typing import Final

import uvloop

from tests.bench.busy_engine import ONE_ENGINE, pages
from tests.bench.processes import resident_bytes
from vllm_headroom.daemon import logs
from vllm_headroom.daemon.engine_watch import Sampler
from vllm_headroom.daemon.sources import Sources
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.derive.tick import TickRules, build_derivations
from vllm_headroom.expose.answers import Request
from vllm_headroom.expose.metrics import HeadroomCollector, MetricsPage
from vllm_headroom.model import EngineProcess, Failure, GpuMemory, GpuProcess, GpuReading, GpuReadings, ProcessReadings
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.vocabulary import Reason, Role, Source

SETTLED_TICKS: Final = 10_000
TICKS_PER_LIFE: Final = 30_000
TICKS_PER_FAILURE: Final = 1_000
TICKS_PER_SCRAPE: Final = 100
INTERVAL_SECONDS: Final = 5.0
GIB: Final = 2**30


class World:
    """The clock and all sources, at one step."""

    def __init__(self) -> None:
        self.step = 0
        self._page = pages(ONE_ENGINE)

    def time(self) -> float:
        return 1_760_000_000.0 + self.monotonic()

    def monotonic(self) -> float:
        return self.step * INTERVAL_SECONDS

    async def sleep_until(self, monotonic_seconds: float) -> None:
        raise NotImplementedError

    async def fetch(self) -> str | Failure:
        if self.step % TICKS_PER_FAILURE == 0:
            return Failure(source=Source.ENGINE, reason=Reason.TIMEOUT, message="It did not answer.")
        return self._page(self.step % TICKS_PER_LIFE)

    async def close(self) -> None:
        """Have nothing to let go of."""


class Gpus:
    """Eight GPUs whose numbers move."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def read(self, _timeout_seconds: float) -> GpuReadings:
        return GpuReadings(driver_version="580.95.05", devices=tuple(self._device(index) for index in range(8)))

    def _device(self, index: int) -> GpuReading:
        step = self._world.step
        used = 60 * GIB + step * 4096 % GIB
        return GpuReading(
            index=index,
            uuid=f"GPU-{index}",
            name="NVIDIA H100 80GB HBM3",
            memory=GpuMemory(total_bytes=80 * GIB, used_bytes=used, free_bytes=79 * GIB - used, reserved_bytes=GIB),
            used_peak_bytes=used + step % 7,
            utilization_ratio=step % 100 / 100,
            temperature_celsius=40.0 + step % 40,
            power_watts=300.0 + step % 400,
            processes=(GpuProcess(pid=100 + index, used_bytes=used - step % 1000),),
        )

    async def sample_used(self, _timeout_seconds: float) -> dict[str, int]:
        """Have nothing to look at."""
        return {}

    async def close(self) -> None:
        """Have nothing to let go of."""


class Processes:
    """One worker per GPU; a restart gives all of them new start times."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def read(self, _timeout_seconds: float, _page: object) -> ProcessReadings:
        step = self._world.step
        workers = tuple(
            EngineProcess(
                pid=100 + index,
                role=Role.WORKER,
                rss_bytes=3 * GIB + step % 9999,
                started_at_seconds=float(step // TICKS_PER_LIFE),
            )
            for index in range(8)
        )
        pids = frozenset(worker.pid for worker in workers)
        return ProcessReadings(engine=workers, visible_pids=pids, sees_host_pids=True)


async def main(ticks: int) -> None:
    """Turn `ticks` times."""
    world = World()
    sampler = Sampler(
        sources=Sources(engine=world, gpus=Gpus(world), processes=Processes(world).read),
        parse=parse_engines,
        rules=TickRules(selection=Selection(), derivations=build_derivations(kv_bytes_per_token=131_072)),
        clock=world,
        gpu_timeout_seconds=1,
    )
    page = MetricsPage(HeadroomCollector(lambda: sampler.published, world.monotonic, ("0", "", "3")))
    scrape = Request(method="GET", path="/metrics", headers={"accept-encoding": "gzip"})
    resident: dict[str, int] = {}
    for world.step in range(1, ticks + 1):
        await sampler.tick()
        if world.step % TICKS_PER_SCRAPE == 0:
            page(scrape)
        if world.step in {SETTLED_TICKS, ticks}:
            gc.collect()
            resident["settled" if world.step == SETTLED_TICKS else "end"] = resident_bytes()
    sys.stdout.write(json.dumps(resident))


if __name__ == "__main__":
    logs.configure("logfmt", "critical")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1])))
