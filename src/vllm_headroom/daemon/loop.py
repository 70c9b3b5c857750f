"""Run the daemon's loops, and end them."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from math import floor
from typing import Any, Final

from vllm_headroom.clock import Clock
from vllm_headroom.log import Log
from vllm_headroom.model import Failure, Gpu, GpuReadings
from vllm_headroom.vocabulary import Reason

log = Log(__name__)

STOPPED: Final = 0
"""The exit status after a signal to stop."""

NEEDS_NEW_CONTAINER: Final = 3
"""The exit status if only a new container can help. A process cannot load the driver's library
twice.
"""

FATAL: Final = frozenset({Reason.VERSION_MISMATCH, Reason.UNKNOWN})
"""NVML errors that last until the container is replaced. Error 18 always does. Errors 17 and 999
last that long if every GPU returns the error (nvidia-container-toolkit#48).
"""

LEAST_SILENCE_SECONDS: Final = 3.0
"""A shorter silence never counts as unhealthy. At the shortest interval, a busy machine can delay
the loop by three intervals.
"""


class StepGuard:
    """Runs one step of the daemon repeatedly, and survives any errors that the step raises."""

    def __init__(self) -> None:
        self._fault: type[Exception] | None = None
        """The type of the last run's error, or None if there was none."""

    async def run(self, step: Callable[[], Awaitable[None]]) -> None:
        """Run the step.

        If consecutive runs raise the same error, only the first error is logged. Recovery is logged
        too.
        """
        fault: type[Exception] | None = None
        try:
            await step()
        except Exception as error:  # noqa: BLE001 - any error: the daemon outlives it
            fault = _find_fault(error)
            if fault is not self._fault:
                _log_fault(fault, error)
        if self._fault is not None and fault is None:
            is_memory = self._fault is MemoryError
            log.info("memory is available again" if is_memory else "steps succeed again")
        self._fault = fault


async def run_every(
    interval_seconds: float, step: Callable[[], Awaitable[None]], clock: Clock
) -> None:
    """Run `step` immediately, and then once per interval until cancelled.

    The times form a grid. If a step takes longer than the interval, the missed runs are skipped.
    Errors in a step are logged, and the loop continues. If every step of the sampling loop raises,
    the health check reports it.
    """
    began_seconds = clock.monotonic()
    guard = StepGuard()
    while True:
        await guard.run(step)
        passed_points = floor((clock.monotonic() - began_seconds) / interval_seconds) + 1
        await clock.sleep_until(began_seconds + passed_points * interval_seconds)


def _find_fault(error: Exception) -> type[Exception]:
    """Return the type of an error, or MemoryError for a group that contains one."""
    if isinstance(error, ExceptionGroup) and error.subgroup(MemoryError) is not None:
        return MemoryError
    return type(error)


def _log_fault(fault: type[Exception], error: Exception) -> None:
    if fault is MemoryError:
        log.error("out of memory: a step of the daemon was skipped")
    else:
        log.error("a step of the daemon raised and was skipped", exc_info=error)


class Heartbeat:
    """Remembers when the sampling loop last ran."""

    def __init__(
        self, interval_seconds: float, clock: Clock, read_machine_seconds: Callable[[], float]
    ) -> None:
        """`read_machine_seconds` reads the machine's monotonic clock; `clock` may run faster."""
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._read_machine_seconds = read_machine_seconds
        self.beat()

    def beat(self) -> None:
        """Record that the loop is running now."""
        self._beat_seconds = self._clock.monotonic()
        self._beat_machine_seconds = self._read_machine_seconds()

    def find_stall(self) -> str | None:
        """Return why the loop is unhealthy, or None while it is healthy.

        The loop is unhealthy if both are true:

        - Its last run was more than three intervals ago.
        - On the machine's clock, that was more than LEAST_SILENCE_SECONDS ago.
        """
        silent_seconds = self._clock.monotonic() - self._beat_seconds
        silent_machine_seconds = self._read_machine_seconds() - self._beat_machine_seconds
        if silent_seconds <= 3 * self._interval_seconds:
            return None
        # The time is measured on the machine's clock, because the demo's clock runs faster.
        if silent_machine_seconds <= LEAST_SILENCE_SECONDS:
            return None
        return (
            f"the sampling loop has not run for {silent_seconds:.0f} s"
            f" (interval {self._interval_seconds:g} s)"
        )


class GraceTime:
    """Measures how long the GPUs have had failures that only a new container fixes."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._failing_since_seconds: float | None = None

    def update(self, gpus: tuple[Gpu, ...] | GpuReadings | Failure, now_seconds: float) -> bool:
        """Add a tick's GPUs; return whether they have failed for the whole grace time.

        Only failures that last until the container is replaced are counted. `now_seconds` is a time
        on the monotonic clock.
        """
        if not isinstance(gpus, Failure) or gpus.reason not in FATAL:
            self._failing_since_seconds = None
            return False
        if self._failing_since_seconds is None:
            self._failing_since_seconds = now_seconds
        return now_seconds - self._failing_since_seconds >= self._grace_seconds


class TickMonitor:
    """Checks that the daemon keeps ticking, and that the ticks can read the GPUs.

    A monitor must be created within the event loop.
    """

    def __init__(
        self,
        *,
        interval_seconds: float,
        grace_seconds: float,
        clock: Clock,
        home: str,
        ending: asyncio.Future[int],
    ) -> None:
        """`home` is the URL of the daemon's own page; `ending` receives the exit status."""
        read_machine_seconds = asyncio.get_running_loop().time
        self._heartbeat = Heartbeat(interval_seconds, clock, read_machine_seconds)
        self._grace = GraceTime(grace_seconds)
        self._clock = clock
        self._home = home
        self._ending = ending
        self._has_ticked = False

    def find_stall(self) -> str | None:
        """Return why the sampling loop is unhealthy, or None while it is healthy."""
        return self._heartbeat.find_stall()

    def note_tick(self, gpus: tuple[Gpu, ...] | GpuReadings | Failure) -> None:
        """Record that a tick has read its sources.

        Ends the daemon if the GPUs stay unreadable.
        """
        self._heartbeat.beat()
        if not self._has_ticked:
            self._has_ticked = True
            scrape = f"{self._home}metrics"
            log.info("first sample published", look_at=self._home, scrape=scrape)
        if self._grace.update(gpus, self._clock.monotonic()):
            log.critical(
                "the GPUs stay unreadable until this container is restarted: exiting with status 3"
            )
            request_end(self._ending, NEEDS_NEW_CONTAINER)


def request_end(ending: asyncio.Future[int], status: int) -> None:
    """Request that the daemon exit with this status.

    The status of an earlier request is kept.
    """
    if not ending.done():
        ending.set_result(status)


@contextlib.contextmanager
def handle_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM, SIGINT and SIGHUP while the block runs.

    If SIGHUP is ignored, as with nohup, it stays ignored.
    """
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    former_handlers = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number, handler in former_handlers.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def run_until_end(
    loops: Iterable[Coroutine[Any, Any, None]], ending: asyncio.Future[int]
) -> int:
    """Run the loops until an exit is requested, cancel them, and return the exit status.

    Raises an ExceptionGroup if a loop raises.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop) for loop in loops]
        status = await ending
        for task in tasks:
            task.cancel()
    return status
