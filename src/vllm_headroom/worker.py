"""One daemon thread that makes calls which may never return."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
_Job = tuple[Callable[[], T], "asyncio.AbstractEventLoop", "asyncio.Future[T]"]


class Worker(Generic[T]):
    """Runs blocking calls one after another on a daemon thread of its own.

    An executor would hold the process until its call returns (measured with a call that hangs 6 s: asyncio.to_thread
    held the loop's exit 6.1 s, a daemon thread let it go in 0.6 s), and a hung driver never returns.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job[T] | None] = SimpleQueue()
        self._begun: asyncio.Future[T] | None = None
        self._name = name
        self._thread: threading.Thread | None = None

    def begin(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Have `function` called on the thread, and return what will be what it returns or raises.

        To cancel that is to give the call up: it is never made if its turn has not come. One that has begun runs on
        and what it gives is dropped; until it returns, this raises TimeoutError, so that none pile up behind it.
        Raises OSError, EAGAIN as the kernel says it, where no thread can be started; the next call tries again.
        """
        if (begun := self._begun) is not None and begun.done():
            raise TimeoutError
        self._thread = self._thread or start_thread(self._run, self._name)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((function, loop, future))
        return future

    async def call(self, function: Callable[[], T], timeout_seconds: float) -> T:
        """Return what `function` returns on the thread, or raise what it or `begin` raises.

        Raises TimeoutError after `timeout_seconds`, waiting for earlier calls included; then, and when cancelled, the
        call is given up.
        """
        future = self.begin(function)
        async with asyncio.timeout(timeout_seconds):
            return await future

    def stop(self) -> None:
        """End the thread once the calls made so far have returned, without waiting for that; call nothing after it."""
        self._jobs.put(None)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; after `stop`, whether a call is still out."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, loop, future = job
            if future.cancelled():
                continue
            self._begun = future
            made = capture_outcome(function)
            self._begun = None  # before the loop marks it done: done while begun is given up
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits for the answer
                loop.call_soon_threadsafe(_settle, future, made)


def start_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """Return a daemon thread that runs; raises OSError where a limit on threads or memory forbids it."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        raise OSError(errno.EAGAIN, "no thread can be started") from None
    return thread


def capture_outcome(call: Callable[[], T]) -> T | Exception:
    """Return what a call returns or raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - it belongs to the caller, who gets it on the loop
        return error


def _settle(future: asyncio.Future[T], made: T | Exception) -> None:
    if future.done():
        return
    if isinstance(made, Exception):
        future.set_exception(made)
    else:
        future.set_result(made)
