"""The steps of a load one after another, with what runs beside them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from math import ceil
from time import monotonic
from typing import Final

from msgspec import Struct

from vllm_headroom.commands.load.clients import Clients, Pace
from vllm_headroom.commands.load.observed import Observed
from vllm_headroom.commands.load.progress import Screen
from vllm_headroom.commands.load.sampling import Sampling
from vllm_headroom.commands.load.tally import Tally

SHARES: Final = (0.5, 0.75, 1.0, 1.2)
"""Below, near, at and beyond what was asked for: what breaks breaks in the last."""

LOOK_SECONDS: Final = 0.1
"""How often it is measured how late this process comes to what it has to do."""

SHOW_SECONDS: Final = 1.0


class Stage(Struct, frozen=True, kw_only=True):
    """A step that is over, or under way: `seconds` is from its begin to the end of its last request."""

    share: float
    clients: int
    seconds: float
    tally: Tally
    observed: Observed


def streams_at_most(concurrency: int) -> int:
    """Return how many streams the largest step opens."""
    return _clients(concurrency, max(SHARES))


def _clients(concurrency: int, share: float) -> int:
    return ceil(round(concurrency * share, 6))


@dataclass(slots=True, kw_only=True)
class Run:
    """Runs every step for `seconds`, until the clients are stopped or the pace's cap is reached."""

    concurrency: int
    seconds: float
    clients: Clients
    pace: Pace
    sampling: Sampling
    screen: Screen
    _tally: Tally = field(default_factory=lambda: Tally(0.0), init=False)

    async def steps(self) -> tuple[Stage, ...]:
        """Return the steps that began, the last of them cut short where it was stopped."""
        done: list[Stage] = []
        self._tally = Tally(monotonic())
        async with asyncio.TaskGroup() as group:
            aside = [group.create_task(each) for each in (self.sampling.run(), self._delays(), self._shown())]
            for number, share in enumerate(SHARES, start=1):
                if not self.clients.stopped and not self.pace.used_up:
                    done.append(await self._step(number, share))
            for task in aside:
                task.cancel()
        return tuple(done)

    async def _step(self, number: int, share: float) -> Stage:
        count, observed = _clients(self.concurrency, share), Observed()
        await self.sampling.look(observed)
        tally = self._tally = Tally(monotonic())
        self.screen.begin(f"step {number}/{len(SHARES)}: {share:.0%}, {count} clients", self.seconds)
        await self.clients.run(count, self.seconds, tally)
        seconds = monotonic() - tally.began_seconds
        await self.sampling.tick()
        self.screen.end(tally, seconds)
        return Stage(share=share, clients=count, seconds=seconds, tally=tally, observed=observed)

    async def _delays(self) -> None:
        """Measure how late the loop is: what comes late here looks late of the server."""
        while True:
            due = monotonic() + LOOK_SECONDS
            await asyncio.sleep(LOOK_SECONDS)
            self._tally.delays.add(max(0.0, monotonic() - due))

    async def _shown(self) -> None:
        while True:
            await asyncio.sleep(SHOW_SECONDS)
            self.screen.show(self._tally, monotonic() - self._tally.began_seconds)
