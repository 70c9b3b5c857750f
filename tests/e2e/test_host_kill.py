"""A leak of host memory in a real cgroup, up to the moment in which the kernel really kills for it."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.fakes.cgroups import limited
from tests.fakes.taker import Taker, taking
from tests.samples import engine, failure, page, values
from vllm_headroom import catalog
from vllm_headroom.daemon.engine_watch import Sampler
from vllm_headroom.daemon.sources import Sources
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.derive.tick import TickRules, build_derivations
from vllm_headroom.model import EnginePage, Failure, GpuReadings
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.vocabulary import Source

MIB: Final = 2**20
LIMIT: Final = 1536 * MIB
PORT: Final = 10_000 + os.getpid() % 50_000
STEP_SECONDS: Final = 5.0
NEAR_SECONDS: Final = 3600.0
"""What HeadroomHostOutOfMemorySoon asks for, with the state leaking, for two minutes."""


@dataclass
class World:
    """A clock that advances on request, and an engine that serves while its process runs."""

    seconds: float = 0.0
    serves: bool = True

    def time(self) -> float:
        return 1_760_000_000.0 + self.seconds

    def monotonic(self) -> float:
        return self.seconds

    async def sleep_until(self, seconds: float) -> None:
        raise AssertionError(seconds)

    async def fetch(self) -> str | Failure:
        return "served" if self.serves else failure(Source.ENGINE)

    async def read(self, timeout_seconds: float) -> GpuReadings | Failure:  # noqa: ARG002 - as a reader of GPUs
        return failure(Source.NVML)

    async def sample_used(self, timeout_seconds: float) -> dict[str, int]:
        raise AssertionError(timeout_seconds)

    async def close(self) -> None:
        raise AssertionError

    def page(self, _: str) -> EnginePage | Failure:
        """Return the page of an engine that is always busy and finishes a request a second."""
        return page(engine(running=4.0, waiting=0.0, finished_total=self.seconds + 1.0, started_at_seconds=1.0))


def sampler(world: World) -> Sampler:
    return Sampler(
        sources=Sources(
            engine=world,
            gpus=world,
            processes=Processes(engine_port=PORT, monotonic=world.monotonic, rescan_seconds=0.0).read,
        ),
        parse=world.page,
        rules=TickRules(selection=Selection(), derivations=build_derivations()),
        clock=world,
        gpu_timeout_seconds=30.0,
    )


def until_killed(taker: Taker, world: World, daemon: Sampler, mib: int) -> list[tuple[float, float]]:
    """Let it leak so much between two looks until it is killed; return when it was foretold to be, and at what time."""
    foretold: list[tuple[float, float]] = []
    while taker.asked("hold", mib):
        world.seconds += STEP_SECONDS
        samples = tick(daemon)
        left_seconds = values(samples, catalog.HOST_TIME_TO_OOM).get(())
        if left_seconds is not None and values(samples, catalog.HOST_LEAK_STATE)["api_server", "leaking"]:
            foretold.append((world.seconds, left_seconds))
    taker.process.wait(30)
    world.seconds += STEP_SECONDS
    world.serves = False
    return foretold


def tick(daemon: Sampler) -> tuple[Any, ...]:
    asyncio.run(daemon.tick())
    assert daemon.published is not None
    return daemon.published.samples


@pytest.mark.parametrize("mib", [8, 3], ids=["within the quarter of an hour", "within the hour"])
def test_a_leak_is_forecast_before_the_kernel_kills_for_it(tmp_path: Path, mib: int) -> None:
    world = World()
    with limited(LIMIT) as folder, taking(folder, tmp_path / "vllm", port=PORT) as taker:
        daemon = sampler(world)
        assert values(tick(daemon), catalog.HOST_MEMORY_LIMIT) == {(): LIMIT}

        foretold = until_killed(taker, world, daemon, mib)
        later_samples = tick(daemon)

    killed = world.seconds
    assert taker.process.returncode == -9
    near = [seconds for seconds, oom_seconds in foretold if oom_seconds < NEAR_SECONDS]
    assert killed - near[0] > 3 * 60, "the page of two minutes comes before the kill"
    first_seconds, left_seconds = foretold[0]
    assert left_seconds == pytest.approx(killed - first_seconds, rel=0.15)
    middle, left_seconds = foretold[len(foretold) // 2]
    assert left_seconds == pytest.approx(killed - middle, abs=0.15 * (killed - first_seconds))
    assert values(later_samples, catalog.HOST_OOM_KILLS) == {(): 1.0}
    assert values(later_samples, catalog.ENGINE_EXITS)["oom_killed",] == 1.0
