"""Hours of the daemon over a demo scenario without waiting: its sampler, on a clock that is moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from tests.dashboards.recorded import RecordedEngine
from vllm_headroom.daemon.engine_watch import Sampler
from vllm_headroom.daemon.sources import Sources
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.derive.tick import TickRules, build_derivations
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom_tools.demo.run import SimulatedEngine, SimulatedGpus, SimulatedProcesses, bind_world
from vllm_headroom_tools.demo.world import Scenario, World

SAMPLE_SECONDS: Final = 30
"""Between two samples: with the daemon's own 5 s it would take four times as long, for the same states."""


class SteppedClock:
    """Shows the time it was set to."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def time(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds

    async def sleep_until(self, monotonic_seconds: float) -> None:
        self.seconds = monotonic_seconds


def play(
    scenario: Scenario,
    hours: float,
    *,
    began: float,
    seed: int = 0,
    gpus: type[SimulatedGpus] = SimulatedGpus,
    page: str | None = None,
) -> Iterator[Sampler]:
    """Yield the sampler after each of its samples of a scenario from its start on; with `page` the engine shows it."""
    clock = SteppedClock(began)
    now = bind_world(World(scenario, seed), clock)
    engine = SimulatedEngine(now, began) if page is None else RecordedEngine(page)
    sampler = Sampler(
        sources=Sources(engine=engine, gpus=gpus(now), processes=SimulatedProcesses(now, began).read),
        parse=parse_engines,
        rules=TickRules(selection=Selection(), derivations=build_derivations(kv_bytes_per_token=131_072.0)),
        clock=clock,
        gpu_timeout_seconds=2,
    )

    async def tick() -> None:
        await (
            sampler.tick()
        )  # without its result, which the runner would spell out at every signal handler that it sets

    with asyncio.Runner() as runner:
        for step in range(int(hours * 3600 / SAMPLE_SECONDS)):
            clock.seconds = began + step * SAMPLE_SECONDS
            runner.run(tick())
            yield sampler
