"""The same daemon over a simulated engine and GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vllm_headroom.commands.demo.scenario import TABLE

if TYPE_CHECKING:
    from vllm_headroom.config.settings import Settings

SCENARIOS: Final[tuple[str, ...]] = tuple(TABLE)


async def serve(settings: Settings, *, scenario: str, speed: float) -> int:
    """Run the daemon over a simulated `scenario` whose time runs `speed` times as fast; return the exit status."""
    from vllm_headroom.commands.demo.run import run  # noqa: PLC0415 - naming the scenarios should not cost a web server

    return await run(settings, scenario=TABLE[scenario], speed=speed)
