"""The demo's composition root: the daemon over a simulated world whose clock runs faster."""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm_headroom.clock import Clock, sleep_until
from vllm_headroom.config import Settings
from vllm_headroom.daemon import app
from vllm_headroom.daemon.parts import Parts
from vllm_headroom.log import Log
from vllm_headroom_tools.demo.readers import SimulatedEngine, SimulatedGpus, SimulatedProcesses
from vllm_headroom_tools.demo.scenario import Scenario
from vllm_headroom_tools.demo.world import World


class ScaledClock:
    """Runs `speed` (above 0) times as fast as the machine's clock, from the machine's time at which it is made."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._began_epoch_seconds = time.time()
        self._began_monotonic_seconds = time.monotonic()

    def time(self) -> float:
        """Return simulated seconds since the epoch."""
        return self._began_epoch_seconds + self._measure_elapsed()

    def monotonic(self) -> float:
        """Return simulated seconds that never go back."""
        return self._began_monotonic_seconds + self._measure_elapsed()

    async def sleep_until(self, monotonic_seconds: float) -> None:
        """Wait until that time has come, never less; when it has passed, only let others run."""
        await sleep_until(self, monotonic_seconds, speed=self._speed)

    def _measure_elapsed(self) -> float:
        return (time.monotonic() - self._began_monotonic_seconds) * self._speed


log = Log(__name__)


def bind_world(world: World, clock: Clock) -> Callable[[], World]:
    """Return a function that brings `world` to the present and returns it; the world's time begins now."""
    began = clock.monotonic()

    def now() -> World:
        world.advance(clock.monotonic() - began)
        return world

    return now


async def run(settings: Settings, *, scenario: Scenario, speed: float) -> int:
    """Run the daemon over the simulated `scenario`; return the exit status."""
    log.warning("everything here is simulated, no GPU and no vLLM is read", scenario=scenario.name, speed=speed)
    clock = ScaledClock(speed)
    epoch_seconds = clock.time()
    now = bind_world(World(scenario), clock)
    parts = Parts(
        engine=SimulatedEngine(now, epoch_seconds),
        gpus=SimulatedGpus(now),
        processes=SimulatedProcesses(now, epoch_seconds),
        clock=clock,
        notice=f"simulated: scenario {scenario.name} at {speed:g}\N{MULTIPLICATION SIGN}",
    )
    return await app.run(parts, settings)
