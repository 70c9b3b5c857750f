"""A daemon thread for calls that may never return."""

import asyncio
import contextlib
import errno
import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
_Job = tuple[Callable[[], T], "asyncio.Future[T]"]
"""A call, and the future that receives its outcome."""


class _Running(Generic[T]):
    """The current call on a worker's thread.

    This object does not hold a reference to the worker.
    """

    def __init__(self) -> None:
        self.future: asyncio.Future[T] | None = None
        """The future of the call that is running now; None between calls."""


class Worker(Generic[T]):
    """Runs blocking calls, one after another, on its own daemon thread.

    asyncio's executor is not used, because the process cannot exit until the executor's calls have
    returned. A call into a hung driver never returns. In a measurement, a call hung for 6 s: the
    loop exited after 6.1 s with asyncio.to_thread, and after 0.6 s with a daemon thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job[T] | None] = SimpleQueue()
        """The calls that are waiting; None ends the thread."""
        self._running: _Running[T] = _Running()
        self._thread: threading.Thread | None = None
        # When a worker is garbage-collected, its thread ends.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def begin(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Call `function` on the thread and return a future for its result.

        Cancelling the future drops the call if it has not started. A call that has already started
        continues, but its result is dropped. Until that call returns, this method raises
        TimeoutError, so that calls do not pile up. Raises OSError (EAGAIN) if no thread can be
        started; the next call tries again.
        """
        # The value is read only once, because the thread may change it in the meantime. If the
        # future is done although its call is still running, the call was cancelled and is hanging.
        running = self._running.future
        if running is not None and running.done():
            raise TimeoutError
        if self._thread is None:
            self._thread = start_thread(partial(_run_jobs, self._jobs, self._running), self._name)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.put((function, future))
        return future

    async def call(self, function: Callable[[], T], timeout_seconds: float) -> T:
        """Call `function` on the thread and return its result; raise what it or `begin` raises.

        Raises TimeoutError after `timeout_seconds`, which includes the time spent waiting for
        earlier calls. After a timeout or a cancellation, the call is dropped as described in
        `begin`.
        """
        future = self.begin(function)
        async with asyncio.timeout(timeout_seconds):
            return await future

    async def attempt(
        self, function: Callable[[], T], timeout_seconds: float
    ) -> tuple[T | None, str | None]:
        """Run a file operation on the thread; return its result and None, or None and the problem.

        A timeout, an OSError and a ValueError are returned as problems. Any other error is raised.
        """
        try:
            return await self.call(function, timeout_seconds), None
        except TimeoutError:
            return None, f"the file system does not answer within {timeout_seconds:g} s"
        except (OSError, ValueError) as error:
            return None, getattr(error, "strerror", None) or str(error)

    def stop(self) -> None:
        """Let the thread end after the calls made so far; return immediately.

        No more calls may be made.
        """
        self._jobs.put(None)

    @property
    def is_busy(self) -> bool:
        """Return whether a call is running, even if its caller has stopped waiting for it."""
        return self._running.future is not None

    @property
    def is_alive(self) -> bool:
        """Return whether the thread is running; `stop` lets it finish its calls first."""
        return self._thread is not None and self._thread.is_alive()


def _run_jobs(jobs: "SimpleQueue[_Job[T] | None]", running: "_Running[T]") -> None:
    """Make calls one after another until None arrives; this is the thread's main function."""
    while True:
        job = jobs.get()
        if job is None:
            return
        function, future = job
        _run_job(function, future, running)
        # Without this, the last call's result, such as a page of 16 MiB, would stay in memory until
        # the next call.
        del job, function, future


def _run_job(
    function: Callable[[], T], future: "asyncio.Future[T]", running: "_Running[T]"
) -> None:
    """Make one call and pass its outcome to the loop; drop the call if it has been cancelled."""
    if future.cancelled():
        return
    running.future = future
    outcome = capture_outcome(function)
    # This must happen before the loop settles the future. Otherwise, `begin` would consider the
    # call cancelled and still running.
    running.future = None
    with contextlib.suppress(RuntimeError):  # The future's loop has closed.
        future.get_loop().call_soon_threadsafe(_settle, future, outcome)


def _settle(future: "asyncio.Future[T]", outcome: T | Exception) -> None:
    """Set the future's result or error, unless it has been cancelled; runs on the loop."""
    if future.cancelled():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def start_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread; raises OSError if a limit on threads or memory prevents it."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        raise OSError(errno.EAGAIN, "no thread can be started") from None
    return thread


def capture_outcome(call: Callable[[], T]) -> T | Exception:
    """Return what a call returns, or the exception that it raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - it belongs to the caller, who gets it on the loop
        return error
