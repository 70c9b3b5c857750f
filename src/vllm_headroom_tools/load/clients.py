"""Concurrent clients: each sends its next request after its answer, or when its turn comes."""

import asyncio
import contextlib
from random import Random
from time import monotonic
from typing import Final

from vllm_headroom_tools.load.sender import RequestSender
from vllm_headroom_tools.load.stream import Outcome
from vllm_headroom_tools.load.tally import Tally

PAUSE_SECONDS: Final = 1.0
"""How long a client waits after a request that did not succeed: a server that refuses is not
flooded."""


class Clients:
    """Runs a step's clients.

    Requests that are open `grace_seconds` after the step's end are given up, at once on `stop`.
    `most_requests` is of all steps together, None without a cap. With a rate the loop is open:
    requests begin as a Poisson process does, whatever the server has answered.
    """

    def __init__(
        self,
        *,
        sender: RequestSender,
        grace_seconds: float,
        most_requests: int | None,
        requests_per_second: float | None,
    ) -> None:
        self.is_stopped = False
        self._sender = sender
        self._grace_seconds = grace_seconds
        self._remaining_requests = most_requests
        self._full_rate = requests_per_second
        self.rate = requests_per_second  # of the current step, None without one
        self._next_seconds = 0.0  # when the last request that has a turn begins
        self._random = Random()  # noqa: S311 - not for secrets
        self._deadline: asyncio.Timeout | None = None

    @property
    def is_used_up(self) -> bool:
        """Whether the cap is reached."""
        return self._remaining_requests == 0

    async def run(self, count: int, seconds: float, tally: Tally, share: float) -> None:
        """Run one step, with this share of the rate; returns when all its requests have ended."""
        self._next_seconds = monotonic()
        end_seconds = self._next_seconds + seconds
        self.rate = None if self._full_rate is None else share * self._full_rate
        # the timeout cancels the clients' requests, which count as unfinished
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(seconds + self._grace_seconds) as self._deadline,
                asyncio.TaskGroup() as group,
            ):
                for _ in range(count):
                    group.create_task(self._run_client(end_seconds, tally))
        self._deadline = None

    async def _run_client(self, end_seconds: float, tally: Tally) -> None:
        while not self.is_stopped and await self.wait_turn(end_seconds):
            outcome = await self._sender.send(tally)
            # with a rate, the next turn is late enough
            has_to_pause = outcome is not Outcome.SUCCEEDED and self.rate is None
            if has_to_pause:
                if monotonic() + PAUSE_SECONDS >= end_seconds:
                    return
                await asyncio.sleep(PAUSE_SECONDS)

    async def wait_turn(self, end_seconds: float) -> bool:
        """Wait until a client may begin a request.

        Returns False where that is not before `end_seconds`, or the cap is reached.
        """
        now_seconds = monotonic()
        turn_seconds = now_seconds
        if self.rate is not None:
            # the gaps of a Poisson process are exponential
            turn_seconds = self._next_seconds + self._random.expovariate(self.rate)
        if turn_seconds >= end_seconds or self.is_used_up:
            return False
        # taken before the wait, so that clients that wait do not exceed the cap
        self._next_seconds = turn_seconds
        if self._remaining_requests is not None:
            self._remaining_requests -= 1
        if turn_seconds > now_seconds:
            await asyncio.sleep(turn_seconds - now_seconds)
        return True

    def stop(self) -> None:
        """Give up what is open, and begin nothing more."""
        self.is_stopped = True
        if self._deadline is not None:
            with contextlib.suppress(RuntimeError):  # it is over already
                self._deadline.reschedule(0.0)
