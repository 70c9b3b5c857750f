"""Looks again until vLLM could start, or the time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from vllm_headroom.commands.preflight.report import Report

POLL_SECONDS: Final = 1.0
SAY_SECONDS: Final = 10.0


async def settled(
    look: Callable[[], Awaitable[Report]], wait_seconds: float, say: Callable[[str], None]
) -> tuple[Report, float]:
    """Return the first report that waiting cannot better, or the last one, and the seconds that were waited.

    Meanwhile says every ten seconds what it waits for.
    """
    now = asyncio.get_running_loop().time
    ends = now() + wait_seconds
    report = await look()
    began = say_at = now()
    while report.may_pass and now() < ends:
        if now() >= say_at:
            say(_waits_for(report, ends - now()))
            say_at = now() + SAY_SECONDS
        await asyncio.sleep(min(POLL_SECONDS, ends - now()))
        report = await look()
    return report, now() - began


def _waits_for(report: Report, left_seconds: float) -> str:
    told = "; ".join(f"GPU {each.gpu}: {each.text}" for each in report.hindrances)
    return f"waiting, {left_seconds:.0f} s left: {told}"
