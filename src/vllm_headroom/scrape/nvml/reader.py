"""Read GPUs from NVML, including when the driver hangs or fails."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final, TypeVar

import pynvml

from vllm_headroom.model import Failure, GpuReading, GpuReadings
from vllm_headroom.scrape.gpu_state import GpuTransitions
from vllm_headroom.scrape.nvml.calls import (
    DRIVER_WIDE,
    explain_device,
    explain_source,
    explain_unexpected,
)
from vllm_headroom.scrape.nvml.device import GpuFaults, NvmlDevice, Part, Session
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
        self._worker = Worker[Any]("nvml")
        self._stuck: dict[str, Worker[Any]] = {}

    @property
    def stuck(self) -> frozenset[str]:
        """The subjects of the abandoned calls that have not returned."""
        self._stuck = {
            subject: worker for subject, worker in self._stuck.items() if worker.is_alive
        }
        return frozenset(self._stuck)

    @property
    def is_blocked(self) -> bool:
        """Whether too many calls are stuck to make another."""
        return len(self.stuck) >= MOST_STUCK

    async def calls(
        self, calls: Mapping[str, Callable[[], T]], limit_seconds: float, deadline: float
    ) -> dict[str, T | Exception]:
        """Return by subject what each call returned or raised, without calls that were not made or did not return.

        The thread is woken once for all: waking it costs more than a call. A call may take `limit_seconds` but, except
        the last, only half of the time until `deadline`. Then, or when cancelled, its subject is stuck.
        """
        made: dict[str, T | Exception] = {}
        waiting = {subject: call for subject, call in calls.items() if subject not in self.stuck}
        while waiting and deadline - read_loop_seconds() >= LEAST_SECONDS and not self.is_blocked:
            outcomes = await self._take(waiting, limit_seconds, deadline)
            made.update(zip(waiting, outcomes, strict=False))
            waiting = dict(tuple(waiting.items())[len(outcomes) + 1 :])
        return made

    async def _take(
        self, calls: Mapping[str, Callable[[], T]], limit_seconds: float, deadline: float
    ) -> tuple[T | Exception, ...]:
        """Make calls until one takes too long; its result is dropped, and its thread makes no further one."""
        outcomes: list[T | Exception] = []
        over = threading.Event()

        def run() -> None:
            for call in calls.values():
                if over.is_set():
                    return
                outcomes.append(capture_outcome(call))

        done, before = self._worker.begin(run), -1
        try:
            while before < len(outcomes) and not done.done():
                before, left_seconds = len(outcomes), deadline - read_loop_seconds()
                share_seconds = left_seconds / 2 if before < len(calls) - 1 else left_seconds
                await asyncio.wait((done,), timeout=min(limit_seconds, share_seconds))
        finally:
            over.set()
            returned = tuple(
                outcomes
            )  # after `over`: the first call that is not among them is the last that is made
            if len(returned) < len(calls):
                done.cancel()
                self._stuck[tuple(calls)[len(returned)]] = self._worker
                self.stop()
        return returned

    def stop(self) -> None:
        """End the thread when it has nothing more to do."""
        self._worker.stop()
        self._worker = Worker("nvml")


def read_loop_seconds() -> float:
    """Return the time by which deadlines are set."""
    return asyncio.get_running_loop().time()


FIRST_BACKOFF_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 60.0
"""The longest pause between two inits of a failed driver, or to find a lost GPU again."""

SHUTDOWN_SECONDS: Final = 0.2

_XIDS: Final = "XID events"
_SILENT: Final = explain_source(Reason.TIMEOUT)

MOST_GPUS: Final = 64
"""More than a machine has; beyond it the GPUs that are gone the longest are forgotten."""


class Nvml:
    """Reads all GPUs; a lost or hung one affects only itself, a failed driver is tried again with growing pauses.

    `call_timeout_seconds` is how long one GPU may take before its thread is abandoned. While a call is stuck, NVML is
    not shut down: that could crash. `proc` has the memory of a GPU that uses the machine's. A GPU that is gone stays
    listed with the MIG instances that it had; an instance gone from a present GPU was removed on purpose.
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
        self._session = Session(
            monotonic=monotonic, process_interval_seconds=process_interval_seconds, proc=proc
        )
        self._lane = Lane()
        self._turn = asyncio.Lock()
        self._known: dict[str, tuple[Part, ...]] = {}
        self._transitions = GpuTransitions()
        self._failure = _SILENT
        self._backoff_seconds = FIRST_BACKOFF_SECONDS
        self._open_at = -inf
        self._look_again_at = inf

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
        if self._turn.locked():
            return {}
        seen = await self._ask_quietly(NvmlDevice.sample_used, timeout_seconds)
        return {uuid: used_bytes for of_gpu in seen for uuid, used_bytes in of_gpu.items()}

    async def faults(self, timeout_seconds: float) -> tuple[GpuFaults, ...]:
        """Return the memory faults of each GPU of the last reading; one that fails is left out."""
        return await self._ask_quietly(NvmlDevice.faults, timeout_seconds)

    async def _ask_quietly(
        self, question: Callable[[NvmlDevice], T], timeout_seconds: float
    ) -> tuple[T, ...]:
        async with self._turn:
            with contextlib.suppress(Exception):  # the next reading finds and reports it
                answers = await self._ask(question, read_loop_seconds() + timeout_seconds)
                return tuple(answer for _, answer in answers if not isinstance(answer, Failure))
        return ()

    async def close(self) -> None:
        """Shut NVML down if it answers quickly."""
        if not self._lane.stuck:
            deadline = read_loop_seconds() + SHUTDOWN_SECONDS
            with contextlib.suppress(OSError):
                await self._lane.calls(
                    {"shutdown": self._session.close}, SHUTDOWN_SECONDS, deadline
                )
        self._lane.stop()

    async def _open(self, deadline: float) -> Failure | None:
        now, stuck = self._monotonic(), self._lane.stuck
        if self._lane.is_blocked:
            return _SILENT
        if self._session.devices and (stuck or now < self._look_again_at):
            return None
        if stuck or now < self._open_at:
            return self._failure
        self._look_again_at = inf
        made = await self._lane.calls({"init": self._session.open}, inf, deadline)
        failure = made.get("init", _SILENT)
        if isinstance(failure, Exception):
            raise failure
        if failure is _SILENT:
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
            outcomes = await self._ask(NvmlDevice.read, deadline, {_XIDS: self._session.xids.poll})
        except pynvml.NVMLError as error:
            return self._down(explain_source(error.value))
        if self._lane.is_blocked:
            return _SILENT
        if all(
            isinstance(outcome, Failure) and outcome.reason is Reason.UNKNOWN
            for _, outcome in outcomes
        ):
            return self._down(explain_source(Reason.UNKNOWN))
        self._backoff_seconds = FIRST_BACKOFF_SECONDS
        readings = self._complete(outcomes)
        self._transitions.report(readings)
        if any(
            reading.failure and reading.failure.reason is Reason.DEVICE_LOST for reading in readings
        ):
            self._look_again_at = min(self._look_again_at, self._monotonic() + RETRY_SECONDS)
        return GpuReadings(driver_version=self._session.driver_version, devices=readings)

    def _complete(
        self, outcomes: list[tuple[NvmlDevice, tuple[GpuReading, ...] | Failure]]
    ) -> tuple[GpuReading, ...]:
        """Return the readings, with a failed one for each part that was not read and each part of a missing GPU.

        The UUID of a GPU that does not open is unknown: it counts as the missing one that had its index.
        """
        for device, _ in outcomes:
            if device.gpu is not None:
                known = self._known.pop(device.gpu.uuid, (device.gpu,))
                self._known[device.gpu.uuid] = device.parts or known
        self._known = dict(tuple(self._known.items())[-MOST_GPUS:])
        missing = sorted(
            self._known.keys()
            - {device.gpu.uuid for device, _ in outcomes if device.gpu is not None}
        )
        readings: list[GpuReading] = []
        for device, outcome in outcomes:
            had_index = (uuid for uuid in missing if self._known[uuid][0].index == device.index)
            if not isinstance(outcome, Failure):
                readings += outcome
            elif device.gpu is not None:
                readings += self._fail(device.gpu.uuid, outcome)
            elif uuid := next(had_index, ""):
                missing.remove(uuid)
                readings += self._fail(uuid, outcome)
            else:
                readings.append(GpuReading(index=device.index, uuid="", name="", failure=outcome))
        for uuid in missing:
            readings += self._fail(uuid, explain_device(Reason.DEVICE_LOST))
        return tuple(readings)

    def _fail(self, uuid: str, failure: Failure) -> list[GpuReading]:
        """Return a failed reading of each part of a GPU; XID errors are counted here and stay known."""
        return [
            GpuReading(
                index=part.index,
                uuid=part.uuid,
                name=part.name,
                xid_errors=self._session.xids.counts(part.gpu_uuid, part.gpu_instance),
                failure=failure,
            )
            for part in self._known[uuid]
        ]

    async def _ask(
        self,
        question: Callable[[NvmlDevice], T],
        deadline: float,
        before: Mapping[str, Callable[[], None]] = {},
    ) -> list[tuple[NvmlDevice, T | Failure]]:
        """Return each GPU's answer or failure, after the calls `before`, of no GPU; raise NVMLError of the driver."""
        devices = {f"GPU {device.index}": device for device in self._session.devices}
        calls: dict[str, Callable[[], Any]] = {**before}
        calls |= {
            name: partial(gpu.answer, question)
            for name, gpu in devices.items()
            if gpu.lost_code is None
        }
        outcomes = await self._lane.calls(calls, self._call_timeout_seconds, deadline)
        answers: list[tuple[NvmlDevice, T | Failure]] = []
        for answer in outcomes.values():
            if isinstance(answer, pynvml.NVMLError) and answer.value in DRIVER_WIDE:
                raise answer
        for name, device in devices.items():
            match outcomes.get(name, TimeoutError()):
                case _ if device.lost_code is not None:
                    answers.append((device, explain_device(device.lost_code)))
                case pynvml.NVMLError(value=code):
                    answers.append((device, explain_device(code)))
                case TimeoutError():
                    answers.append((device, explain_device(Reason.TIMEOUT)))
                case Exception() as error:
                    answers.append((device, explain_unexpected(error)))
                case answer:
                    answers.append((device, answer))
        return answers
