"""A daemon thread for calls that may never return."""

import asyncio
import contextlib
import errno
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Generic, Protocol, TypeVar

TURN_SECONDS: Final = 0.25
"""If none of the shared thread's calls returns for so long, the thread is stuck. In that case, the
waiting calls are made on a new thread. Reading the processes of one engine takes a millisecond.
"""

T = TypeVar("T")
_Job = tuple[Callable[[], T], "asyncio.Future[T]"]
"""A call, and the future that receives its outcome."""
_SharedJob = tuple[Callable[[], Any], "asyncio.Future[Any]", "_Running[Any]"]
"""A call, its outcome's future, and the call that its caller has running."""

_Outcome = tuple["asyncio.Future[Any]", Any]
"""A future, and what its call returned or raised."""


class _Running(Generic[T]):
    """The current call on a worker's thread.

    This object does not hold a reference to the worker.
    """

    def __init__(self) -> None:
        self.future: asyncio.Future[T] | None = None
        """The future of the call that is running now; None between calls."""

    def check_abandoned(self) -> None:
        """Raise TimeoutError if the running call was cancelled, so that calls do not pile up."""
        # The value is read only once, because the thread may change it in the meantime.
        future = self.future
        if future is not None and future.done():
            raise TimeoutError

    def make_call(self, function: Callable[[], T], future: "asyncio.Future[T]") -> T | Exception:
        """Return what a call returns, or the exception that it raises; runs on the thread."""
        self.future = future
        outcome = capture_outcome(function)
        # `future` must be cleared before the loop settles the call's future. If not,
        # `check_abandoned` would consider the call cancelled and still running.
        self.future = None
        return outcome


class Caller(Protocol[T]):
    """Makes blocking calls on a thread."""

    async def call(self, function: Callable[[], T], timeout_seconds: float) -> T:
        """Return what `function` returns, or raise what it raises; see `Worker.call`."""


class Worker(Generic[T]):
    """Runs blocking calls, one after another, on its own daemon thread.

    The executor of asyncio is not used. The process cannot exit until the executor's calls have
    returned. A call into a hung driver never returns. In a measurement, a call hung for 6 s. The
    loop exited after 6.1 s with asyncio.to_thread. With a daemon thread, the loop exited after
    0.6 s.
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
        self._running.check_abandoned()
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
        """Run a file operation on the thread.

        Returns the result and None, or None and the problem. A timeout, an OSError and a ValueError
        are returned as problems. Any other error is raised.
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


class SharedThread:
    """Makes the calls of several callers, one after another, on one daemon thread.

    While a call is stuck, other callers' calls are made on another thread. With a thread for each
    caller, all threads would compete for Python's lock. The event loop would compete too. With 16
    callers reading /proc, this took a third of the CPU time (measured).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._worker = Worker[None](name)
        self._jobs: deque[_SharedJob] = deque()
        """The calls that are waiting, the oldest first. The thread removes a call to make it."""
        self._making: asyncio.Task[None] | None = None
        """Makes the calls that are waiting, or None before the first call."""

    def begin(self, job: "_SharedJob") -> None:
        """Make a call after those that are waiting."""
        self._jobs.append(job)
        if self._making is None or self._making.done():
            # Calls begun in this turn of the event loop are made in one go.
            self._making = asyncio.create_task(self._make_calls())

    async def _make_calls(self) -> None:
        """Make the calls until none is waiting.

        If a thread is stuck, continues on a new one.
        """
        while self._jobs:
            outcomes: list[_Outcome] = []
            is_replaced = threading.Event()
            run = partial(_run_shared_jobs, self._jobs, outcomes, is_replaced)
            try:
                finished = self._worker.begin(run)
            except OSError as error:
                self._refuse_calls(error)
                return
            is_stuck = False
            while not finished.done() and not is_stuck:
                waiting_count = len(self._jobs)
                await asyncio.wait((finished,), timeout=TURN_SECONDS)
                is_stuck = len(self._jobs) >= waiting_count and not finished.done()
                _settle_all(outcomes)
            if is_stuck:
                # The stuck thread ends when its call returns. The result is still used.
                finished.add_done_callback(partial(_settle_stuck, outcomes))
                is_replaced.set()
                self._worker.stop()
                self._worker = Worker(self._name)

    def _refuse_calls(self, error: OSError) -> None:
        """Let all calls that are waiting raise `error`."""
        while self._jobs:
            _, future, _ = self._jobs.popleft()
            _settle(future, error)


class SharedCaller(Generic[T]):
    """Makes one caller's calls on a thread that it shares with others."""

    def __init__(self, thread: SharedThread) -> None:
        self._thread = thread
        self._running: _Running[T] = _Running()

    async def call(self, function: Callable[[], T], timeout_seconds: float) -> T:
        """Return what `function` returns, or raise what it raises, like `Worker.call`.

        Raises TimeoutError after `timeout_seconds`, and while this caller's last call is stuck.
        """
        self._running.check_abandoned()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._thread.begin((function, future, self._running))
        async with asyncio.timeout(timeout_seconds):
            return await future


def _run_shared_jobs(
    jobs: "deque[_SharedJob]", outcomes: "list[_Outcome]", is_replaced: threading.Event
) -> None:
    """Make calls until none is waiting, and add their outcomes to `outcomes`.

    Runs as a call on the thread. Makes no further call once the thread has been replaced.
    """
    while not is_replaced.is_set():
        try:
            function, future, running = jobs.popleft()
        except IndexError:
            return
        if future.cancelled():
            continue
        outcome = running.make_call(function, future)
        # The event loop is woken only once for all calls. Waking it costs more than a call.
        outcomes.append((future, outcome))


def _settle_all(outcomes: "list[_Outcome]") -> None:
    """Set the results or errors of these futures; runs on the loop."""
    while outcomes:
        future, outcome = outcomes.pop()
        _settle(future, outcome)


def _settle_stuck(outcomes: "list[_Outcome]", _finished: "asyncio.Future[None]") -> None:
    """Settle the futures of a thread that was stuck, once it has finished."""
    _settle_all(outcomes)


def _run_jobs(jobs: "SimpleQueue[_Job[T] | None]", running: "_Running[T]") -> None:
    """Make calls one after another until None arrives; this is the thread's main function."""
    while True:
        job = jobs.get()
        if job is None:
            return
        function, future = job
        _run_job(function, future, running)
        # Without this, the last call's result would stay in memory until the next call. The result
        # may be a page of 16 MiB.
        del job, function, future


def _run_job(
    function: Callable[[], T], future: "asyncio.Future[T]", running: "_Running[T]"
) -> None:
    """Make one call and pass its outcome to the loop.

    A call that has been cancelled is dropped.
    """
    if future.cancelled():
        return
    outcome = running.make_call(function, future)
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
