"""Concurrent clients.

The clients send each request after the previous answer or at a given rate.
"""

import asyncio
import contextlib
from random import Random
from time import monotonic
from typing import Final

from vllm_headroom_tools.load.sender import RequestSender
from vllm_headroom_tools.load.stream import Outcome
from vllm_headroom_tools.load.tally import Tally

RETRY_PAUSE_SECONDS: Final = 1.0
"""Our choice: a client waits this long after a failed request. Otherwise, it would flood a server
that refuses requests.
"""


class Clients:
    """Runs the clients of each step.

    Requests that are still open `grace_seconds` after the end of a step are cancelled. `stop`
    cancels all requests immediately. `most_requests` is the maximum number of requests in all
    steps. None means no maximum. With `requests_per_second`, requests begin as a Poisson process,
    without waiting for earlier answers (an open loop).
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
        self.rate = requests_per_second  # The rate of the current step, or None in a closed loop.
        self._next_seconds = 0.0  # The start time of the last scheduled request.
        self._random = Random()  # noqa: S311 - not for secrets
        self._deadline: asyncio.Timeout | None = None

    @property
    def is_used_up(self) -> bool:
        """Return whether the maximum number of requests has been reached."""
        return self._remaining_requests == 0

    async def run(self, count: int, seconds: float, tally: Tally, share: float) -> None:
        """Run a step of `seconds` with `count` clients.

        `share` is the share of the full request rate. Returns once all requests of the step have
        ended and are counted in `tally`. Cancelled requests count as ended.
        """
        self._next_seconds = monotonic()
        end_seconds = self._next_seconds + seconds
        self.rate = None if self._full_rate is None else share * self._full_rate
        # the timeout cancels the clients' requests, which are then recorded as unfinished
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(seconds + self._grace_seconds) as self._deadline,
                asyncio.TaskGroup() as group,
            ):
                for _ in range(count):
                    group.create_task(self._run_client(end_seconds, tally))
        self._deadline = None

    async def _run_client(self, end_seconds: float, tally: Tally) -> None:
        """Send one request after another until the step ends."""
        while not self.is_stopped and await self.wait_turn(end_seconds):
            outcome = await self._sender.send(tally)
            # with a rate, the clients' turns already keep them from flooding the server
            has_to_pause = outcome is not Outcome.SUCCEEDED and self.rate is None
            if has_to_pause:
                if monotonic() + RETRY_PAUSE_SECONDS >= end_seconds:
                    return
                await asyncio.sleep(RETRY_PAUSE_SECONDS)

    async def wait_turn(self, end_seconds: float) -> bool:
        """Wait until a client may begin a request, then return True.

        Returns False immediately if the maximum number of requests has been reached, or if the
        client's turn comes after `end_seconds`.
        """
        now_seconds = monotonic()
        turn_seconds = now_seconds
        if self.rate is not None:
            # the gaps in a Poisson process are exponentially distributed
            turn_seconds = self._next_seconds + self._random.expovariate(self.rate)
        if turn_seconds >= end_seconds or self.is_used_up:
            return False
        # Reserve the turn before waiting, so that waiting clients do not exceed the maximum.
        self._next_seconds = turn_seconds
        if self._remaining_requests is not None:
            self._remaining_requests -= 1
        if turn_seconds > now_seconds:
            await asyncio.sleep(turn_seconds - now_seconds)
        return True

    def stop(self) -> None:
        """Cancel all open requests and do not begin any more."""
        self.is_stopped = True
        if self._deadline is not None:
            with contextlib.suppress(RuntimeError):  # the timeout has already expired
                self._deadline.reschedule(0.0)
