"""The way to NVML's thread when a call on it may hang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

from vllm_headroom.scrape.worker import Worker

T = TypeVar("T")
MOST_STUCK: Final = 8
"""Threads given up at a time, one per GPU of a common node: each hangs on a GPU that is not asked again meanwhile."""


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
        """Return what `function` returns on the thread, or raise what it raises.

        Raises TimeoutError after `timeout_seconds`; then, and when cancelled, the subject is stuck until it returns.
        """
        worker = self._worker = self._worker or Worker("nvml")
        try:
            value: T = await worker.call(function, timeout_seconds)
        except (TimeoutError, asyncio.CancelledError):
            self._worker = None
            self._stuck[subject] = worker
            worker.stop()
            raise
        return value

    def stop(self) -> None:
        """End the thread when it has nothing more to do."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None
