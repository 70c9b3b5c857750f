"""The loops of the daemon, and how they end."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from math import floor
from typing import Any, Final

from vllm_headroom.clock import Clock
from vllm_headroom.log import Log
from vllm_headroom.model import Failure, Gpu
from vllm_headroom.vocabulary import Reason

log = Log(__name__)

STOPPED: Final = 0
NEEDS_NEW_CONTAINER: Final = 3
"""Exit status when only a new container can help: the driver's library cannot be loaded again in one process."""

FATAL: Final = frozenset({Reason.VERSION_MISMATCH, Reason.UNKNOWN})
"""NVML error 18, and 17 or 999 on every GPU: they last as long as the container (nvidia-container-toolkit#48)."""

LEAST_SILENCE_SECONDS: Final = 3.0
"""A shorter pause is never unhealthy: at the shortest interval, a busy machine alone can take three intervals."""


async def run_every(
    interval_seconds: float, step: Callable[[], Awaitable[None]], clock: Clock
) -> None:
    """Run `step` now and at every later point of the grid that has not passed; skip a step that runs out of memory."""
    began, was_short = clock.monotonic(), False
    while True:
        is_short = False
        try:
            await step()
        except* MemoryError:
            is_short = True
        if is_short is not was_short:
            was_short = is_short
            write = log.error if is_short else log.info
            write(
                "out of memory: a step of the daemon was skipped"
                if is_short
                else "memory is available again"
            )
        turns = floor((clock.monotonic() - began) / interval_seconds) + 1
        await clock.sleep_until(began + turns * interval_seconds)


class Heartbeat:
    """Remembers when the sampling loop last ran."""

    def __init__(
        self, interval_seconds: float, clock: Clock, machine_seconds: Callable[[], float]
    ) -> None:
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._machine_seconds = machine_seconds
        self.beat()

    def beat(self) -> None:
        """Note that the loop has run."""
        self._turned = self._clock.monotonic()
        self._turned_on_machine = self._machine_seconds()

    def find_stall(self) -> str | None:
        """Return why the loop is unhealthy: no run for three intervals; None while it runs."""
        silent = self._clock.monotonic() - self._turned
        machine_silent = self._machine_seconds() - self._turned_on_machine
        if silent <= 3 * self._interval_seconds or machine_silent <= LEAST_SILENCE_SECONDS:
            return None
        return f"the sampling loop has not run for {silent:.0f} s (interval {self._interval_seconds:g} s)"


class GraceTime:
    """Measures how long the GPUs have failed in a way that only a new container repairs."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._since: float | None = None

    def is_over(self, gpus: tuple[Gpu, ...] | Failure, now: float) -> bool:
        """Return whether the grace is over, given what this tick read."""
        if not isinstance(gpus, Failure) or gpus.reason not in FATAL:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return now - self._since >= self._grace_seconds


def request_end(ending: asyncio.Future[int], status: int) -> None:
    """Request the end with this status, unless it was requested before."""
    if not ending.done():
        ending.set_result(status)


@contextlib.contextmanager
def handle_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGTERM, SIGINT and SIGHUP (unless ignored, as with nohup) call `stop` during the block."""
    loop = asyncio.get_running_loop()
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def run_until_end(
    loops: Iterable[Coroutine[Any, Any, None]], ending: asyncio.Future[int]
) -> int:
    """Run the loops until the end is requested; return the exit status, or raise the error of a loop."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop) for loop in loops]
        status = await ending
        for task in tasks:
            task.cancel()
    return status
