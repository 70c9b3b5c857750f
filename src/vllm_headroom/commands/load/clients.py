"""So many clients at once for so long, each asking again as soon as it has its answer, if its turn has come."""

from __future__ import annotations

import asyncio
import contextlib
from time import monotonic
from typing import Final

from vllm_headroom.commands.load.ask import Asker
from vllm_headroom.commands.load.stream import Outcome
from vllm_headroom.commands.load.tally import Tally


class Pace:
    """Gives turns to all clients together; None is no cap."""

    def __init__(self, *, most_requests: int | None, requests_per_second: float | None) -> None:
        self._left = most_requests
        self._gap_seconds = 0.0 if requests_per_second is None else 1.0 / requests_per_second
        self._next_seconds = 0.0

    @property
    def used_up(self) -> bool:
        """Whether the cap is reached."""
        return self._left == 0

    async def turn(self, until_seconds: float) -> bool:
        """Wait until the caller may begin a request; return False where that is not before `until_seconds`."""
        now = monotonic()
        due = max(now, self._next_seconds)
        if due >= until_seconds or self.used_up:
            return False
        self._next_seconds = due + self._gap_seconds
        if self._left is not None:
            self._left -= 1
        if due > now:
            await asyncio.sleep(due - now)
        return True


PAUSE_SECONDS: Final = 1.0
"""How long a client waits after a request that did not succeed: a server that refuses is not flooded."""


class Clients:
    """Runs a step's clients; what is open `grace_seconds` after its end is given up, at once when told to stop."""

    def __init__(self, *, asker: Asker, pace: Pace, grace_seconds: float) -> None:
        self.stopped = False
        self._asker = asker
        self._pace = pace
        self._grace_seconds = grace_seconds
        self._deadline: asyncio.Timeout | None = None

    async def run(self, count: int, seconds: float, tally: Tally) -> None:
        """Run one step; returns when all its requests have ended."""
        ends = monotonic() + seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds + self._grace_seconds) as self._deadline, asyncio.TaskGroup() as group:
                for _ in range(count):
                    group.create_task(self._client(ends, tally))
        self._deadline = None

    def stop(self) -> None:
        """Give up what is open, and begin nothing more."""
        self.stopped = True
        if self._deadline is not None:
            with contextlib.suppress(RuntimeError):  # it is over already
                self._deadline.reschedule(0.0)

    async def _client(self, ends: float, tally: Tally) -> None:
        while not self.stopped and await self._pace.turn(ends):
            if await self._asker.ask(tally) is not Outcome.SUCCEEDED:
                if monotonic() + PAUSE_SECONDS >= ends:
                    return
                await asyncio.sleep(PAUSE_SECONDS)
