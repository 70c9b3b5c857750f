"""GPU readings from NVML, whatever the driver does meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import pynvml

from vllm_headroom.model import Failure, GpuReadings
from vllm_headroom.scrape.nvml.calls import (
    DRIVER_WIDE,
    device_failure,
    device_failure_of,
    source_failure,
    source_failure_of,
    unexpected,
)
from vllm_headroom.scrape.nvml.device import Device, GpuFaults
from vllm_headroom.scrape.nvml.session import Outcome, Roster, Session
from vllm_headroom.scrape.transitions import GpuTransitions
from vllm_headroom.vocabulary import Reason
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


FIRST_BACKOFF_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 60.0
"""The longest pause between two attempts at a failed driver, and the pause between two looks for a lost GPU: only a
shutdown and new init of NVML can bring one back."""

SHUTDOWN_SECONDS: Final = 0.2

_XIDS: Final = "XID events"
_SILENT: Final = source_failure(Reason.TIMEOUT)
_NO_ANSWER: Final = device_failure(Reason.TIMEOUT)


class Nvml:
    """Reads all GPUs; one that is lost or hangs costs only itself, a failed driver is tried again with growing pauses.

    `call_timeout_seconds` is how long one GPU may take before its thread is given up. While a call is stuck there is no
    shutdown, for a shutdown under it could crash. `proc` tells the memory of a GPU that has none of its own.
    """

    def __init__(
        self,
        *,
        monotonic: Callable[[], float],
        call_timeout_seconds: float = 2.0,
        process_interval_seconds: float = 15.0,
        proc: Path = Path("/proc"),
    ) -> None:
        self._monotonic = monotonic
        self._call_timeout_seconds = call_timeout_seconds
        self._session = Session(monotonic=monotonic, process_interval_seconds=process_interval_seconds, proc=proc)
        self._lane = Lane()
        self._turn = asyncio.Lock()
        self._roster = Roster(self._session.xids)
        self._transitions = GpuTransitions()
        self._failure = _SILENT
        self._backoff_seconds = FIRST_BACKOFF_SECONDS
        self._open_at = float("-inf")
        self._look_again_at = float("inf")

    async def read(self, timeout_seconds: float) -> GpuReadings | Failure:
        """Return one reading of every GPU; takes no longer than `timeout_seconds` and does not raise.

        When cancelled, a call in progress runs on, and its GPU is not asked before it returns.
        """
        deadline = loop_seconds() + timeout_seconds
        try:
            async with asyncio.timeout_at(deadline):
                await self._turn.acquire()
        except TimeoutError:
            return _SILENT
        try:
            return await self._open(deadline) or await self._read(deadline)
        except Exception as error:  # noqa: BLE001 - whatever else comes out of foreign code must not end the daemon
            return unexpected(error)
        finally:
            self._turn.release()

    async def sample_used(self, timeout_seconds: float) -> Mapping[str, int]:
        """Return the memory in use by UUID; do nothing while a reading is under way."""
        used: dict[str, int] = {}
        if self._turn.locked():
            return used
        async with self._turn:
            with contextlib.suppress(Exception):  # the next reading finds it too, and tells it
                for _, seen in await self._ask(Device.sample_used, loop_seconds() + timeout_seconds):
                    used.update({} if isinstance(seen, Failure) else seen)
        return used

    async def faults(self, timeout_seconds: float) -> tuple[GpuFaults, ...]:
        """Return what each GPU of the last reading says of its memory's faults; one that fails is left out."""
        async with self._turn:
            answers: list[tuple[Device, GpuFaults | Failure]] = []
            with contextlib.suppress(Exception):  # the next reading finds it too, and tells it
                answers = await self._ask(Device.faults, loop_seconds() + timeout_seconds)
            return tuple(answer for _, answer in answers if isinstance(answer, GpuFaults))

    async def close(self) -> None:
        """Shut NVML down if it answers quickly; leave it as it is otherwise."""
        if not self._lane.stuck:
            with contextlib.suppress(OSError):  # TimeoutError is one
                await self._lane.call("shutdown", self._session.close, SHUTDOWN_SECONDS)
        self._lane.stop()

    async def _open(self, deadline: float) -> Failure | None:
        now, stuck = self._monotonic(), self._lane.stuck
        if self._lane.is_blocked:
            return _SILENT
        if self._session.devices and (stuck or now < self._look_again_at):
            return None
        if stuck or now < self._open_at:
            return self._failure
        self._look_again_at = float("inf")
        try:
            failure = await self._lane.call("init", self._session.open, deadline - loop_seconds())
        except TimeoutError:
            self._failure = _SILENT
            return _SILENT
        return failure and self._down(failure)

    def _down(self, failure: Failure) -> Failure:
        self._session.devices = ()
        self._failure = failure
        self._open_at = self._monotonic() + self._backoff_seconds
        self._backoff_seconds = min(2 * self._backoff_seconds, RETRY_SECONDS)
        return failure

    async def _read(self, deadline: float) -> GpuReadings | Failure:
        try:
            outcomes: list[tuple[Device, Outcome]] = await self._ask(
                Device.read, deadline, {_XIDS: self._session.xids.poll}
            )
        except pynvml.NVMLError as error:
            return self._down(source_failure_of(error.value))
        if self._lane.is_blocked:
            return _SILENT
        if all(isinstance(outcome, Failure) and outcome.reason is Reason.UNKNOWN for _, outcome in outcomes):
            return self._down(source_failure(Reason.UNKNOWN))
        self._backoff_seconds = FIRST_BACKOFF_SECONDS
        readings = self._roster.readings(outcomes)
        self._transitions.report(readings)
        if any(reading.failure and reading.failure.reason is Reason.DEVICE_LOST for reading in readings):
            self._look_again_at = min(self._look_again_at, self._monotonic() + RETRY_SECONDS)
        return GpuReadings(driver_version=self._session.driver_version, devices=readings)

    async def _ask(
        self, question: Callable[[Device], T], deadline: float, before: Mapping[str, Callable[[], None]] = {}
    ) -> list[tuple[Device, T | Failure]]:
        """Return what each GPU answers, or why it failed; raise NVMLError where the driver as a whole fails.

        What comes `before` is of no GPU: where it hangs, it costs itself only.
        """
        devices = self._session.devices
        calls: dict[str, Callable[[], Any]] = {**before}
        calls |= {_name(device): partial(question, device) for device in devices if device.lost_code is None}
        outcomes = await self._lane.calls(calls, self._call_timeout_seconds, deadline)
        for answer in outcomes.values():
            if isinstance(answer, pynvml.NVMLError) and answer.value in DRIVER_WIDE:
                raise answer
        return [(device, _answer(device, outcomes.get(_name(device), TimeoutError()))) for device in devices]


def _name(device: Device) -> str:
    return f"GPU {device.index}"


def _answer(device: Device, outcome: T | Exception) -> T | Failure:
    if device.lost_code is not None:
        return device_failure_of(device.lost_code)
    if isinstance(outcome, pynvml.NVMLError):
        return device_failure_of(outcome.value)
    if isinstance(outcome, TimeoutError):
        return _NO_ANSWER
    return unexpected(outcome) if isinstance(outcome, Exception) else outcome
