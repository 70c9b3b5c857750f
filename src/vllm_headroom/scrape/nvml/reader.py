"""Read GPUs from NVML, including when the driver hangs or fails."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import pynvml

from vllm_headroom.model import Failure, GpuReadings
from vllm_headroom.scrape.gpu_state import GpuTransitions
from vllm_headroom.scrape.nvml.calls import (
    DRIVER_WIDE,
    build_device_failure,
    build_source_failure,
    explain_device_code,
    explain_source_code,
    explain_unexpected,
)
from vllm_headroom.scrape.nvml.device import GpuFaults, NvmlDevice
from vllm_headroom.scrape.nvml.session import Outcome, Roster, Session
from vllm_headroom.vocabulary import Reason
from vllm_headroom.worker import Worker, capture_outcome

T = TypeVar("T")
MOST_STUCK: Final = 8
"""Abandoned threads, one per GPU of a common node: a GPU with a stuck call is not asked again."""

LEAST_SECONDS: Final = 0.02
"""With less time left no call is made: a healthy GPU takes a few milliseconds."""


class Lane:
    """Makes calls one at a time on a thread; while one is stuck, others use a new thread and not its subject."""

    def __init__(self) -> None:
        self._worker: Worker[Any] | None = None
        self._stuck: dict[str, Worker[Any]] = {}

    @property
    def stuck(self) -> frozenset[str]:
        """The subjects of the abandoned calls that have not returned."""
        self._stuck = {subject: worker for subject, worker in self._stuck.items() if worker.is_alive}
        return frozenset(self._stuck)

    @property
    def is_blocked(self) -> bool:
        """Whether too many calls are stuck to make another."""
        return len(self.stuck) >= MOST_STUCK

    async def call(self, subject: str, function: Callable[[], T], timeout_seconds: float) -> T:
        """Return what `function` returns on the thread, or raise what it raises, or TimeoutError."""
        made = await self.calls({subject: function}, timeout_seconds, read_loop_seconds() + timeout_seconds)
        found = made.get(subject, TimeoutError())
        if isinstance(found, Exception):
            raise found
        return found

    async def calls(
        self, calls: Mapping[str, Callable[[], T]], limit_seconds: float, deadline: float
    ) -> dict[str, T | Exception]:
        """Return by subject what each call returned or raised, without calls that were not made or did not return.

        The thread is woken once for all: waking it costs more than a call. A call may take `limit_seconds` but, except
        the last, only half of the time until `deadline`. Then, or when cancelled, its subject is stuck.
        """
        made: dict[str, T | Exception] = {}
        waiting = [subject for subject in calls if subject not in self.stuck]
        while waiting and deadline - read_loop_seconds() >= LEAST_SECONDS and not self.is_blocked:
            turn = _Turn([calls[subject] for subject in waiting])
            await self._take(turn, waiting, limit_seconds, deadline)
            made.update(zip(waiting, turn.outcomes, strict=False))
            waiting = waiting[len(turn.outcomes) + 1 :]
        return made

    async def _take(self, turn: "_Turn[Any]", subjects: Sequence[str], limit_seconds: float, deadline: float) -> None:
        worker = self._worker = self._worker or Worker("nvml")
        done = worker.begin(turn.run)
        is_moving = True
        try:
            while is_moving and not done.done():
                before, left_seconds = len(turn.outcomes), deadline - read_loop_seconds()
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
    """Calls made one after another on the thread, until `end`."""

    def __init__(self, calls: Sequence[Callable[[], T]]) -> None:
        self.outcomes: list[T | Exception] = []
        self._calls = calls
        self._is_over = False
        self._lock = threading.Lock()

    def run(self) -> None:
        """Make the calls; after the end the result of a call is dropped, and no further one is made."""
        for call in self._calls:
            made = capture_outcome(call)
            with self._lock:
                if self._is_over:
                    return
                self.outcomes.append(made)

    def end(self) -> int:
        """Return how many calls have returned."""
        with self._lock:
            self._is_over = True
            return len(self.outcomes)


def read_loop_seconds() -> float:
    """Return the time by which deadlines are set."""
    return asyncio.get_running_loop().time()


FIRST_BACKOFF_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 60.0
"""The longest pause between two inits of a failed driver, or to find a lost GPU again."""

SHUTDOWN_SECONDS: Final = 0.2

_XIDS: Final = "XID events"
_SILENT: Final = build_source_failure(Reason.TIMEOUT)
_NO_ANSWER: Final = build_device_failure(Reason.TIMEOUT)


class Nvml:
    """Reads all GPUs; a lost or hung one affects only itself, a failed driver is tried again with growing pauses.

    `call_timeout_seconds` is how long one GPU may take before its thread is abandoned. While a call is stuck, NVML is
    not shut down: that could crash. `proc` has the memory of a GPU that uses the machine's.
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
        """Return one reading of every GPU within `timeout_seconds`; never raise.

        When cancelled, a call in progress continues, and its GPU is not read before it returns.
        """
        deadline = read_loop_seconds() + timeout_seconds
        try:
            async with asyncio.timeout_at(deadline):
                await self._turn.acquire()
        except TimeoutError:
            return _SILENT
        try:
            return await self._open(deadline) or await self._read(deadline)
        except Exception as error:  # noqa: BLE001 - no error of foreign code may end the daemon
            return explain_unexpected(error)
        finally:
            self._turn.release()

    async def sample_used(self, timeout_seconds: float) -> Mapping[str, int]:
        """Return the memory in use by UUID; nothing during a reading."""
        used: dict[str, int] = {}
        if self._turn.locked():
            return used
        async with self._turn:
            with contextlib.suppress(Exception):  # the next reading finds and reports it
                for _, seen in await self._ask(NvmlDevice.sample_used, read_loop_seconds() + timeout_seconds):
                    used.update({} if isinstance(seen, Failure) else seen)
        return used

    async def faults(self, timeout_seconds: float) -> tuple[GpuFaults, ...]:
        """Return the memory faults of each GPU of the last reading; one that fails is left out."""
        async with self._turn:
            answers: list[tuple[NvmlDevice, GpuFaults | Failure]] = []
            with contextlib.suppress(Exception):  # the next reading finds and reports it
                answers = await self._ask(NvmlDevice.faults, read_loop_seconds() + timeout_seconds)
            return tuple(answer for _, answer in answers if isinstance(answer, GpuFaults))

    async def close(self) -> None:
        """Shut NVML down if it answers quickly."""
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
            failure = await self._lane.call("init", self._session.open, deadline - read_loop_seconds())
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
            outcomes: list[tuple[NvmlDevice, Outcome]] = await self._ask(
                NvmlDevice.read, deadline, {_XIDS: self._session.xids.poll}
            )
        except pynvml.NVMLError as error:
            return self._down(explain_source_code(error.value))
        if self._lane.is_blocked:
            return _SILENT
        if all(isinstance(outcome, Failure) and outcome.reason is Reason.UNKNOWN for _, outcome in outcomes):
            return self._down(build_source_failure(Reason.UNKNOWN))
        self._backoff_seconds = FIRST_BACKOFF_SECONDS
        readings = self._roster.readings(outcomes)
        self._transitions.report(readings)
        if any(reading.failure and reading.failure.reason is Reason.DEVICE_LOST for reading in readings):
            self._look_again_at = min(self._look_again_at, self._monotonic() + RETRY_SECONDS)
        return GpuReadings(driver_version=self._session.driver_version, devices=readings)

    async def _ask(
        self, question: Callable[[NvmlDevice], T], deadline: float, before: Mapping[str, Callable[[], None]] = {}
    ) -> list[tuple[NvmlDevice, T | Failure]]:
        """Return each GPU's answer or failure, after the calls `before`, of no GPU; raise NVMLError of the driver."""
        devices = self._session.devices
        calls: dict[str, Callable[[], Any]] = {**before}
        calls |= {_name_device(device): partial(question, device) for device in devices if device.lost_code is None}
        outcomes = await self._lane.calls(calls, self._call_timeout_seconds, deadline)
        for answer in outcomes.values():
            if isinstance(answer, pynvml.NVMLError) and answer.value in DRIVER_WIDE:
                raise answer
        return [
            (device, _explain_outcome(device, outcomes.get(_name_device(device), TimeoutError()))) for device in devices
        ]


def _name_device(device: NvmlDevice) -> str:
    return f"GPU {device.index}"


def _explain_outcome(device: NvmlDevice, outcome: T | Exception) -> T | Failure:
    if device.lost_code is not None:
        return explain_device_code(device.lost_code)
    if isinstance(outcome, pynvml.NVMLError):
        return explain_device_code(outcome.value)
    if isinstance(outcome, TimeoutError):
        return _NO_ANSWER
    return explain_unexpected(outcome) if isinstance(outcome, Exception) else outcome
