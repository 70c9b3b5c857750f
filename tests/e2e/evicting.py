"""The demo's daemon with the guardrail of a real one, the files of whose service account are in $ACCOUNT.

With $BEGAN, a time of the machine's monotonic clock or "now", the simulated engine started then, and a restarted daemon
finds it as it is; $CLOCK_APART is how many seconds this pod's clock is wrong, $LEAK_FACTOR how much faster it leaks.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

from vllm_headroom.__main__ import main
from vllm_headroom.clock import SystemClock
from vllm_headroom.config import Settings
from vllm_headroom.daemon import app, evict
from vllm_headroom.daemon.parts import Parts, build_real_evictor
from vllm_headroom_tools.demo import run
from vllm_headroom_tools.demo.world import Scenario, World

TURN_SECONDS: Final = float(os.environ.get("TURN_SECONDS", "0.5"))
LEASE_SECONDS: Final = int(os.environ.get("LEASE_SECONDS", "2"))
"""Of the guardrail, which takes 10 s and 120 s: here everything is faster."""

LOADING_SECONDS: Final = 500.0
LEAK: Final = Scenario(
    name="leak",
    leak_bytes_per_request=12_800.0 * float(os.environ.get("LEAK_FACTOR", "1")),
    is_cold=True,
    loading_seconds=(LOADING_SECONDS, LOADING_SECONDS),
)
BEGAN: Final = os.environ.get("BEGAN")


class PodClock(run.ScaledClock):
    """Counts from the start of the engine, and is wrong."""

    def __init__(self, speed: float, began: float) -> None:
        super().__init__(speed)
        self._began_seconds = began
        self._ahead_seconds += float(os.environ["CLOCK_APART"])


async def run_with_guardrail(demo: Any, settings: Settings, **run_options: Any) -> int:
    vars(run)["Parts"] = partial(Parts, evictor=build_real_evictor(settings, SystemClock()))
    return int(await demo(settings, **run_options))


async def run_replica(settings: Settings, *, speed: float, **_: Any) -> int:
    began = time.monotonic() if BEGAN == "now" else float(BEGAN or 0)
    clock, world = PodClock(speed, began), World(LEAK)
    started_seconds = clock.time() - (clock.monotonic() - began)

    def now() -> World:
        world.advance(clock.monotonic() - began)
        return world

    parts = Parts(
        engine=run.SimulatedEngine(now, started_seconds),
        gpus=run.SimulatedGpus(now),
        processes=run.SimulatedProcesses(now, started_seconds).read,
        clock=clock,
        evictor=build_real_evictor(settings, PodClock(1.0, began)),
    )
    vars(app)["TURN_SECONDS"] = TURN_SECONDS * speed
    vars(evict)["LEASE_SECONDS"] = LEASE_SECONDS
    return await app.run(parts, settings)


if __name__ == "__main__":
    vars(evict)["ACCOUNT"] = Path(os.environ["ACCOUNT"])
    vars(evict)["TURN_SECONDS"] = TURN_SECONDS  # a refused request is sent again after twice that
    vars(run)["run"] = partial(run_with_guardrail, run.run) if BEGAN is None else run_replica
    main()
