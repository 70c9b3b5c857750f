"""The consecutive steps of a load, and the tasks that run alongside them."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from math import ceil
from time import monotonic
from typing import Any, Final

from msgspec import Struct

from vllm_headroom_tools.load.clients import Clients
from vllm_headroom_tools.load.sampling import LoadObservation, Sampling
from vllm_headroom_tools.load.screen import Screen
from vllm_headroom_tools.load.tally import Tally

SHARES: Final = (0.5, 0.75, 1.0, 1.2)
"""The size of each step as a share of the order's concurrency. The steps are below, near, at and
above it. The last step shows the behaviour under overload.
"""

STOP_SECONDS: Final = 1.0
"""Our choice: how often a wait for a sample checks for a stop."""

DELAY_SECONDS: Final = 0.1
"""Our choice: the interval at which this process's own delay is measured."""

SHOW_SECONDS: Final = 1.0
"""Our choice: the interval at which the screen is redrawn."""

ENGINE_LOST_SECONDS: Final = 15.0
"""Our choice: how long the engine may be missing or replaced. After that, the load ends. A new
engine does not have the old one's state. The remaining load would measure nothing useful.
"""


class Stage(Struct, frozen=True, kw_only=True):
    """A completed step."""

    share: float
    clients: int
    rate: float | None = None  # The offered requests per second, or None in a closed loop.
    seconds: float  # The time from the beginning of the step to its last request's end.
    tally: Tally
    observation: LoadObservation


def count_streams(concurrency: int, share: float = max(SHARES)) -> int:
    """Return how many streams a step with this share opens.

    The default is the largest step.
    """
    # round first, because a product of floats may be slightly above a whole number
    return ceil(round(concurrency * share, 6))


@dataclass(slots=True, kw_only=True)
class LoadRun:
    """Runs the steps in sequence, each for `seconds`.

    The run ends early in three cases:

    - The clients are stopped.
    - The clients have sent the maximum number of requests.
    - The engine ends.
    """

    concurrency: int
    seconds: float
    clients: Clients
    sampling: Sampling
    screen: Screen = field(default_factory=Screen, init=False)
    has_lost_engine: bool = field(default=False, init=False)
    _tally: Tally = field(default_factory=lambda: Tally(0.0), init=False)  # of the current step

    async def run_steps(self) -> tuple[Stage, ...]:
        """Run the steps, and return those that began.

        A stop may have shortened the last one.
        """
        stages: list[Stage] = []
        self._tally = Tally(monotonic())
        async with asyncio.TaskGroup() as group:
            background_tasks = [
                group.create_task(self.sampling.run()),
                group.create_task(self._measure_delays()),
                group.create_task(self._watch_engine()),
            ]
            # After a stop, or after the last allowed request, no further step begins.
            for number, share in enumerate(SHARES, start=1):
                if not self.clients.is_stopped and not self.clients.is_used_up:
                    stages.append(await self._run_step(number, share))
            for task in background_tasks:
                task.cancel()
        return tuple(stages)

    async def _run_step(self, number: int, share: float) -> Stage:
        """Run and return one step.

        A sample is taken at its beginning and at its end.
        """
        client_count = count_streams(self.concurrency, share)
        observation = LoadObservation()
        # The step includes the memory before its first request.
        await self._finish_sample(self.sampling.start_step(observation))
        tally = Tally(monotonic())
        self._tally = tally
        title = f"step {number}/{len(SHARES)}: {share:.0%}, {client_count} clients"
        self.screen.begin(title, self.seconds)
        await self.clients.run(client_count, self.seconds, tally, share)
        seconds = monotonic() - tally.start_seconds
        # take a sample now: the step includes the memory after its last request
        await self._finish_sample(self.sampling.sample())
        self.screen.show(tally, seconds, is_over=True)
        return Stage(
            share=share,
            clients=client_count,
            rate=self.clients.rate,
            seconds=seconds,
            tally=tally,
            observation=observation,
        )

    async def _finish_sample(self, sample: Coroutine[Any, Any, None]) -> None:
        """Wait for a sample; after a stop, cancel it within two seconds.

        A hung server does not return its page. An operator who stops the load should not have to
        wait for the timeout.
        """
        task = asyncio.create_task(sample)
        may_wait = True
        while may_wait and not task.done():
            may_wait = not self.clients.is_stopped
            await asyncio.wait([task], timeout=STOP_SECONDS)
        if task.done():
            task.result()  # raises what the sample raised
        task.cancel()

    async def _measure_delays(self) -> None:
        """Measure how late this process's loop runs.

        Delays of this process could be mistaken for the server's. Runs until cancelled.
        """
        while True:
            due_seconds = monotonic() + DELAY_SECONDS
            await asyncio.sleep(DELAY_SECONDS)
            self._tally.own_delay_seconds.add(max(0.0, monotonic() - due_seconds))

    async def _watch_engine(self) -> None:
        """Redraw the screen until cancelled; stop the clients if the engine is lost."""
        # When the engine was last known to be alive. A single failure to read its page does not
        # prove its end.
        alive_seconds = monotonic()
        while True:
            await asyncio.sleep(SHOW_SECONDS)
            self.screen.show(self._tally, monotonic() - self._tally.start_seconds)
            has_ended = self.sampling.overall.engine_end is not None or self._tally.is_engine_dead
            if not has_ended:
                alive_seconds = monotonic()
                continue
            ended_seconds = monotonic() - alive_seconds
            if ended_seconds >= ENGINE_LOST_SECONDS and not self.clients.is_stopped:
                self.has_lost_engine = True
                self.clients.stop()
