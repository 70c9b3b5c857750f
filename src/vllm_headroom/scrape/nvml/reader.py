"""GPU readings from NVML, whatever the driver does meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import pynvml

from vllm_headroom.model import Failure, GpuReadings
from vllm_headroom.scrape.nvml.device import Device
from vllm_headroom.scrape.nvml.errors import (
    DRIVER_WIDE,
    device_failure,
    device_failure_of,
    source_failure,
    source_failure_of,
    unexpected,
)
from vllm_headroom.scrape.nvml.lane import Lane, loop_seconds
from vllm_headroom.scrape.nvml.parts import GpuFaults
from vllm_headroom.scrape.nvml.roster import Outcome, Roster
from vllm_headroom.scrape.nvml.session import Session
from vllm_headroom.scrape.transitions import GpuTransitions
from vllm_headroom.vocabulary import Reason

T = TypeVar("T")
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
        for outcome in outcomes.values():
            if isinstance(outcome, pynvml.NVMLError) and outcome.value in DRIVER_WIDE:
                raise outcome
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
