"""The way to NVML's thread when a call on it may hang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from vllm_headroom.worker import Worker, outcome

T = TypeVar("T")
MOST_STUCK: Final = 8
"""Threads given up at a time, one per GPU of a common node: each hangs on a GPU that is not asked again meanwhile."""

LEAST_SECONDS: Final = 0.02
"""With less time left nobody is asked: a healthy GPU takes a few milliseconds."""


class Lane:
    """Makes calls one at a time, and leaves a thread whose call does not return to its fate.

    Other threads can call NVML while one is stuck in it, so the next call gets a new thread. Every call has a subject,
    and nothing must be called on a subject that is stuck.
    """

    def __init__(self) -> None:
        self._worker: Worker[Any] | None = None
        self._stuck: dict[str, Worker[Any]] = {}

    @property
    def stuck(self) -> frozenset[str]:
        """The subjects of the calls that were given up and have not returned."""
        self._stuck = {subject: worker for subject, worker in self._stuck.items() if worker.is_alive}
        return frozenset(self._stuck)

    @property
    def is_blocked(self) -> bool:
        """Whether so many calls are stuck that none may be made."""
        return len(self.stuck) >= MOST_STUCK

    async def call(self, subject: str, function: Callable[[], T], timeout_seconds: float) -> T:
        """Return what `function` returns on the thread, or raise what it raises, or TimeoutError."""
        made = await self.calls({subject: function}, timeout_seconds, loop_seconds() + timeout_seconds)
        found = made.get(subject, TimeoutError())
        if isinstance(found, Exception):
            raise found
        return found

    async def calls(
        self, calls: Mapping[str, Callable[[], T]], limit_seconds: float, deadline: float
    ) -> dict[str, T | Exception]:
        """Return by subject what each call returned or raised; what was not made or did not return is not there.

        The thread is woken once for all, since each time costs more than a call. One may take `limit_seconds`, but only
        half of what is left until `deadline`, so that one that hangs leaves time for others; the last may take it all.
        Then, and when cancelled, its subject is stuck until it returns.
        """
        made: dict[str, T | Exception] = {}
        waiting = [subject for subject in calls if subject not in self.stuck]
        while waiting and deadline - loop_seconds() >= LEAST_SECONDS and not self.is_blocked:
            turn = _Turn([calls[subject] for subject in waiting])
            await self._take(turn, waiting, limit_seconds, deadline)
            made.update(zip(waiting, turn.outcomes, strict=False))
            waiting = waiting[len(turn.outcomes) + 1 :]
        return made

    async def _take(self, turn: _Turn[Any], subjects: Sequence[str], limit_seconds: float, deadline: float) -> None:
        worker = self._worker = self._worker or Worker("nvml")
        done = worker.begin(turn.run)
        is_moving = True
        try:
            while is_moving and not done.done():
                before, left_seconds = len(turn.outcomes), deadline - loop_seconds()
                share_seconds = left_seconds / 2 if before < len(subjects) - 1 else left_seconds
                await asyncio.wait((done,), timeout=min(limit_seconds, share_seconds))
                is_moving = len(turn.outcomes) > before
        finally:
            if turn.end() < len(subjects):
                done.cancel()
                self._worker, self._stuck[subjects[len(turn.outcomes)]] = None, worker
                worker.stop()

    def stop(self) -> None:
        """End the thread when it has nothing more to do."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


class _Turn(Generic[T]):
    """Calls made one after another on the thread, until they are ended."""

    def __init__(self, calls: Sequence[Callable[[], T]]) -> None:
        self.outcomes: list[T | Exception] = []
        self._calls = calls
        self._is_over = False
        self._lock = threading.Lock()

    def run(self) -> None:
        """Make the calls; what one gives after the end is dropped, and none is made after it."""
        for call in self._calls:
            made = outcome(call)
            with self._lock:
                if self._is_over:
                    return
                self.outcomes.append(made)

    def end(self) -> int:
        """Return how many calls have returned."""
        with self._lock:
            self._is_over = True
            return len(self.outcomes)


def loop_seconds() -> float:
    """Return the time by which deadlines are set."""
    return asyncio.get_running_loop().time()
