"""The demo's composition root: the daemon over a simulated world."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from vllm_headroom.clock import Clock
from vllm_headroom.commands.demo.clock import ScaledClock
from vllm_headroom.commands.demo.page import SimulatedEngine
from vllm_headroom.commands.demo.readers import SimulatedGpus, SimulatedProcesses
from vllm_headroom.commands.demo.scenario import Scenario
from vllm_headroom.commands.demo.world import World
from vllm_headroom.config.values import Values
from vllm_headroom.daemon import app
from vllm_headroom.daemon.parts import Parts

log = structlog.get_logger()


def present(world: World, clock: Clock) -> Callable[[], World]:
    """Return a function that brings `world` to the present and returns it; the world's time begins now."""
    began = clock.monotonic()

    def now() -> World:
        world.advance(clock.monotonic() - began)
        return world

    return now


async def run(settings: Values, *, scenario: Scenario, speed: float) -> int:
    """Run the daemon over the simulated `scenario`; return the exit status."""
    log.warning("everything here is simulated, no GPU and no vLLM is read", scenario=scenario.name, speed=speed)
    clock = ScaledClock(speed)
    epoch_seconds = clock.time()
    now = present(World(scenario), clock)
    parts = Parts(
        engine=SimulatedEngine(now, epoch_seconds),
        gpus=SimulatedGpus(now),
        processes=SimulatedProcesses(now, epoch_seconds),
        clock=clock,
        notice=f"simulated: scenario {scenario.name} at {speed:g}\N{MULTIPLICATION SIGN}",
    )
    return await app.run(parts, settings)
