"""The simulated world as it is now."""

from __future__ import annotations

from collections.abc import Callable

from vllm_headroom.clock import Clock
from vllm_headroom.commands.demo.world import World


def present(world: World, clock: Clock) -> Callable[[], World]:
    """Return a function that brings `world` to the present and returns it; the world's time begins now."""
    began = clock.monotonic()

    def now() -> World:
        world.advance(clock.monotonic() - began)
        return world

    return now
