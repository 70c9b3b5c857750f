"""Read GPUs from NVML, even if the driver hangs or fails."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final, TypeVar

import pynvml

from vllm_headroom.model import Failure, GpuReading, GpuReadings
from vllm_headroom.scrape.gpu_state import GpuTransitions
from vllm_headroom.scrape.nvml.device import GpuFaults, GpuPart, NvmlDevice, Session
from vllm_headroom.scrape.nvml.errors import (
    DRIVER_WIDE_CODES,
    explain_device,
    explain_source,
    explain_unexpected,
)
from vllm_headroom.vocabulary import Reason
from vllm_headroom.worker import Worker, capture_outcome

T = TypeVar("T")

GpuOutcome = tuple[GpuReading, ...] | Failure
"""The readings of a whole GPU or its MIG instances, or a failure's reason."""

FIRST_BACKOFF_SECONDS: Final = 1.0
"""The pause between the first two inits of a failed driver. The pause doubles each time."""

RETRY_SECONDS: Final = 60.0
"""The longest pause between two attempts to reinitialise NVML after a failed driver or a lost GPU.
"""

SHUTDOWN_SECONDS: Final = 0.2
"""The time limit for shutting NVML down. The limit for the entire exit is one second."""

MAX_GPUS: Final = 64
"""The maximum number of GPUs remembered, which is more than any machine has. If there are more, the
least recently read GPUs are forgotten.
"""

MAX_STUCK_CALLS: Final = 8
"""Once this many calls are stuck, no further call is made. A typical node has this many GPUs."""

MIN_CALL_SECONDS: Final = 0.02
"""If less time than this remains before the deadline, no call is made. A healthy GPU takes a few
milliseconds.
"""

_INIT: Final = "init"
_XIDS: Final = "XID events"
_SHUTDOWN: Final = "shutdown"
_SILENT: Final = explain_source(Reason.TIMEOUT)


class Nvml:
    """Reads all GPUs.

    If a GPU is lost or hangs, the other GPUs are still read. A failed driver is reinitialised after
    increasingly long pauses. While a call is stuck, NVML is not shut down, because the shutdown
    could crash the process. A GPU that disappears stays listed as failed, along with its last known
    MIG instances. A MIG instance that disappears while its GPU is present was removed on purpose
    and is no longer listed.

    If a call to a GPU takes longer than `call_timeout_seconds`, its thread is abandoned. For GPUs
    that use the machine's memory, that memory is read from `proc`.
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
        self._lock = asyncio.Lock()
        self._parts: dict[str, tuple[GpuPart, ...]] = {}
        """The MIG instances at each GPU's last reading, keyed by the GPU's UUID. If there were
        none, the entry is the whole GPU. The most recently read GPU comes last.
        """
        self._transitions = GpuTransitions()
        self._failure = _SILENT
        """Why the driver failed at the last init."""
        self._backoff_seconds = FIRST_BACKOFF_SECONDS
        """The pause before the next init of a failed driver."""
        self._open_at_seconds = -inf
        """When a failed driver is to be reinitialised, on the monotonic clock."""
        self._reopen_at_seconds = inf
        """When to reinitialise a working driver to find a lost GPU (monotonic clock)."""

    async def read(self, timeout_seconds: float) -> GpuReadings | Failure:
        """Return one reading of every GPU within `timeout_seconds`; never raise.

        A GPU that cannot be read gets a failed reading. If the whole driver fails, the result is a
        Failure. If this method is cancelled, a call in progress continues. The GPU of that call is
        not read again until the call returns.
        """
        deadline = read_loop_seconds() + timeout_seconds
        try:
            # The previous reading may still be waiting for a stuck call. Only one may run at a
            # time.
            async with asyncio.timeout_at(deadline):
                await self._lock.acquire()
        except TimeoutError:
            return _SILENT
        try:
            failure = await self._open(deadline)
            return failure or await self._read(deadline)
        except Exception as error:  # noqa: BLE001 - no error of foreign code may end the daemon
            return explain_unexpected(error)
        finally:
            self._lock.release()

    async def sample_used(self, timeout_seconds: float) -> Mapping[str, int]:
        """Return each GPU's memory in use, keyed by UUID, and update the peaks; never raise.

        The result is empty during a reading and while the driver is failing. GPUs that fail are
        omitted.
        """
        # A call made now would have to wait until the reading in progress has finished.
        if self._lock.locked():
            return {}
        used_bytes: dict[str, int] = {}
        for gpu_used_bytes in await self._query_quietly(NvmlDevice.sample_used, timeout_seconds):
            used_bytes |= gpu_used_bytes
        return used_bytes

    async def read_faults(self, timeout_seconds: float) -> tuple[GpuFaults, ...]:
        """Return the memory faults of each GPU in the last reading; never raise.

        GPUs that fail are omitted. The result is empty while the driver is failing.
        """
        return await self._query_quietly(NvmlDevice.read_faults, timeout_seconds)

    async def close(self) -> None:
        """Shut NVML down within SHUTDOWN_SECONDS, unless a call is stuck."""
        # Shutting NVML down during one of its calls may crash the process.
        if not self._lane.stuck_subjects:
            deadline = read_loop_seconds() + SHUTDOWN_SECONDS
            with contextlib.suppress(OSError):
                await self._lane.make_calls(
                    {_SHUTDOWN: self._session.close}, SHUTDOWN_SECONDS, deadline
                )
        self._lane.stop()

    async def _open(self, deadline: float) -> Failure | None:
        """Initialise NVML if necessary; return None if GPUs can be read now.

        While a call is stuck, NVML is not reinitialised. GPUs that are open can still be read.
        `deadline` is a time on the event loop's clock. Raises any unexpected error of the init, and
        OSError if no thread can be started. Returns a Failure in three cases:
        - The last init failed.
        - So many calls are stuck that the driver is regarded as blocked.
        - NVML did not respond before `deadline`.
        """
        now_seconds = self._monotonic()
        is_stuck = bool(self._lane.stuck_subjects)
        if self._lane.is_blocked:
            return _SILENT
        # An init shuts NVML down first, which must not happen while a call is stuck.
        if self._session.devices and (is_stuck or now_seconds < self._reopen_at_seconds):
            return None
        if is_stuck or now_seconds < self._open_at_seconds:
            return self._failure
        self._reopen_at_seconds = inf
        outcomes = await self._lane.make_calls({_INIT: self._session.open}, inf, deadline)
        if _INIT not in outcomes:
            self._failure = _SILENT
            return _SILENT
        failure = outcomes[_INIT]
        if isinstance(failure, Exception):
            raise failure
        return None if failure is None else self._mark_down(failure)

    def _mark_down(self, failure: Failure) -> Failure:
        """Schedule the next init after a failure of the whole driver; return the failure."""
        self._session.devices = ()
        self._failure = failure
        self._open_at_seconds = self._monotonic() + self._backoff_seconds
        self._backoff_seconds = min(2 * self._backoff_seconds, RETRY_SECONDS)
        return failure

    async def _read(self, deadline: float) -> GpuReadings | Failure:
        """Read every GPU of an initialised driver, and schedule a new init if needed.

        Returns a Failure if the driver as a whole fails or hangs.
        """
        try:
            outcomes = await self._query_devices(
                NvmlDevice.read, deadline, {_XIDS: self._session.xids.poll}
            )
        except pynvml.NVMLError as error:
            return self._mark_down(explain_source(error.value))
        # So many calls are stuck that the whole driver must be hanging.
        if self._lane.is_blocked:
            return _SILENT
        # A single GPU that returns this error may be healthy. If all GPUs return it, the driver has
        # failed.
        if all(_is_failed(outcome, Reason.UNKNOWN) for _, outcome in outcomes):
            return self._mark_down(explain_source(Reason.UNKNOWN))
        self._backoff_seconds = FIRST_BACKOFF_SECONDS
        readings = self._complete(outcomes)
        self._transitions.report(readings)
        # A lost GPU gets a new handle only from another init. The init invalidates the handles of
        # all GPUs.
        if any(_is_failed(reading.failure, Reason.DEVICE_LOST) for reading in readings):
            retry_at_seconds = self._monotonic() + RETRY_SECONDS
            self._reopen_at_seconds = min(self._reopen_at_seconds, retry_at_seconds)
        return GpuReadings(driver_version=self._session.driver_version, devices=readings)

    def _complete(
        self, outcomes: Collection[tuple[NvmlDevice, GpuOutcome]]
    ) -> tuple[GpuReading, ...]:
        """Return the readings of the GPUs that were read, and failed readings of all others.

        A GPU gets failed readings if it failed or NVML no longer lists it. Such a GPU gets one
        failed reading for each of its MIG instances. A GPU without instances gets one for the whole
        GPU.
        """
        # A GPU that falls off the bus is not listed after the next init. Without this code, its
        # series would simply end.
        missing_uuids = self._remember_parts(device for device, _ in outcomes)
        readings: list[GpuReading] = []
        for device, outcome in outcomes:
            if not isinstance(outcome, Failure):
                readings += outcome
                continue
            if device.gpu is not None:
                readings += self._build_failed(device.gpu.uuid, outcome)
                continue
            # If a GPU cannot be opened, its UUID is unknown. An unopened GPU is assumed to be the
            # missing GPU that had the same index.
            uuid = self._find_uuid(missing_uuids, device.index)
            if uuid is None:
                readings.append(GpuReading(index=device.index, uuid="", name="", failure=outcome))
            else:
                missing_uuids.remove(uuid)
                readings += self._build_failed(uuid, outcome)
        for uuid in missing_uuids:
            readings += self._build_failed(uuid, explain_device(Reason.DEVICE_LOST))
        return tuple(readings)

    def _remember_parts(self, devices: Iterable[NvmlDevice]) -> list[str]:
        """Remember each GPU's MIG instances, or the whole GPU if it has no instances.

        GPUs whose UUID is still unknown are omitted. Returns the sorted UUIDs of the remembered
        GPUs that are not in `devices`. At most MAX_GPUS GPUs are remembered.
        """
        opened_uuids = set()
        for device in devices:
            if device.gpu is None:
                continue
            uuid = device.gpu.uuid
            opened_uuids.add(uuid)
            # Removing and adding the entry moves it to the end. The most recently read GPU
            # therefore comes last.
            previous_parts = self._parts.pop(uuid, (device.gpu,))
            self._parts[uuid] = device.parts or previous_parts
        oldest_uuids = tuple(self._parts)[:-MAX_GPUS]
        for uuid in oldest_uuids:
            del self._parts[uuid]
        return sorted(self._parts.keys() - opened_uuids)

    def _find_uuid(self, missing_uuids: Iterable[str], index: int) -> str | None:
        """Return the UUID of the first missing GPU with this index, or None."""
        for uuid in missing_uuids:
            if self._parts[uuid][0].index == index:
                return uuid
        return None

    def _build_failed(self, uuid: str, failure: Failure) -> list[GpuReading]:
        """Return a failed reading of each MIG instance of a remembered GPU.

        Without instances, the result is one reading of the whole GPU. The readings contain the XID
        errors counted so far.
        """
        return [
            GpuReading(
                index=part.index,
                uuid=part.uuid,
                name=part.name,
                xid_errors=self._session.xids.list_counts(part.gpu_uuid, part.gpu_instance),
                failure=failure,
            )
            for part in self._parts[uuid]
        ]

    async def _query_quietly(
        self, method: Callable[[NvmlDevice], T], timeout_seconds: float
    ) -> tuple[T, ...]:
        """Return the result of each GPU that does not fail.

        The result is empty if the driver fails.
        """
        async with self._lock:
            with contextlib.suppress(Exception):  # The next reading reports the error.
                deadline = read_loop_seconds() + timeout_seconds
                outcomes = await self._query_devices(method, deadline)
                return tuple(outcome for _, outcome in outcomes if not isinstance(outcome, Failure))
        return ()

    async def _query_devices(
        self,
        method: Callable[[NvmlDevice], T],
        deadline: float,
        driver_calls: Mapping[str, Callable[[], None]] = {},
    ) -> list[tuple[NvmlDevice, T | Failure]]:
        """Return each GPU's result of `method`, or its failure.

        A GPU that does not respond before `deadline` gets a failure. The `driver_calls` concern the
        whole driver. The driver calls are made first, and their results are discarded. Raises
        NVMLError if a call fails with an error that affects the whole driver.
        """
        calls: dict[str, Callable[[], Any]] = dict(driver_calls)
        # A lost GPU is not called again, because the call would return the same error or hang.
        for device in self._session.devices:
            if device.lost_code is None:
                calls[_name_subject(device)] = partial(device.call, method)
        # All calls are made in one job. Waking the thread for each GPU (40 µs) would cost more than
        # the calls.
        outcomes = await self._lane.make_calls(calls, self._call_timeout_seconds, deadline)
        for outcome in outcomes.values():
            if isinstance(outcome, pynvml.NVMLError) and outcome.value in DRIVER_WIDE_CODES:
                raise outcome
        return [
            (device, _explain_outcome(device, outcomes.get(_name_subject(device), TimeoutError())))
            for device in self._session.devices
        ]


def _name_subject(device: NvmlDevice) -> str:
    return f"GPU {device.index}"


def _explain_outcome(device: NvmlDevice, outcome: T | Exception) -> T | Failure:
    """Return a device's result.

    Returns a Failure if the call failed or the GPU is lost.
    """
    if device.lost_code is not None:
        return explain_device(device.lost_code)
    if isinstance(outcome, pynvml.NVMLError):
        return explain_device(outcome.value)
    if isinstance(outcome, TimeoutError):
        return explain_device(Reason.TIMEOUT)
    if isinstance(outcome, Exception):
        return explain_unexpected(outcome)
    return outcome


def _is_failed(outcome: object, reason: Reason) -> bool:
    return isinstance(outcome, Failure) and outcome.reason is reason


def read_loop_seconds() -> float:
    """Return the time on the running event loop's clock, on which deadlines are based."""
    return asyncio.get_running_loop().time()


class Lane:
    """Makes calls one at a time on a thread.

    Each call has a subject, such as a GPU. While a call is stuck, no further call is made for its
    subject. Calls for other subjects are made on a new thread.
    """

    def __init__(self) -> None:
        self._worker = Worker[Any]("nvml")
        self._stuck_workers: dict[str, Worker[Any]] = {}
        """The thread of each subject's last stuck call. The thread ends when the stuck call
        returns.
        """

    @property
    def stuck_subjects(self) -> frozenset[str]:
        """Return the subjects of abandoned calls that have not returned yet."""
        return frozenset(
            subject for subject, worker in self._stuck_workers.items() if worker.is_alive
        )

    @property
    def is_blocked(self) -> bool:
        """Return whether so many calls are stuck that no further call may be made."""
        return len(self.stuck_subjects) >= MAX_STUCK_CALLS

    async def make_calls(
        self, calls: Mapping[str, Callable[[], T]], limit_seconds: float, deadline: float
    ) -> dict[str, T | Exception]:
        """Make the calls in order; return what each returned or raised, by subject.

        Calls that were not made or did not return in time are omitted. `deadline` is a time on the
        event loop's clock. A call may take `limit_seconds`, but at most half of the time that
        remains until the deadline. The last call may use all of the remaining time. A call that
        takes longer is regarded as stuck. A call that is running when this method is cancelled is
        also regarded as stuck. Raises OSError if no thread can be started.
        """
        outcomes: dict[str, T | Exception] = {}
        stuck_subjects = self.stuck_subjects
        pending = {
            subject: call for subject, call in calls.items() if subject not in stuck_subjects
        }
        while pending and not self.is_blocked:
            # With so little time left, the call would only be treated as stuck.
            if deadline - read_loop_seconds() < MIN_CALL_SECONDS:
                break
            returned = await self._call_until_stuck(pending, limit_seconds, deadline)
            outcomes.update(zip(pending, returned, strict=False))
            # The first call that did not return is the one that is stuck.
            for subject in tuple(pending)[: len(returned) + 1]:
                del pending[subject]
        return outcomes

    async def _call_until_stuck(
        self, calls: Mapping[str, Callable[[], T]], limit_seconds: float, deadline: float
    ) -> tuple[T | Exception, ...]:
        """Make calls until one is stuck; return the outcomes before the stuck one.

        The outcome of the stuck call is discarded, and its thread makes no further calls. The
        thread is woken only once for all calls. Waking it costs more than a call.
        """
        outcomes: list[T | Exception] = []
        is_over = threading.Event()

        def run() -> None:
            for call in calls.values():
                if is_over.is_set():
                    return
                outcomes.append(capture_outcome(call))

        finished = self._worker.begin(run)
        previous_count = -1
        try:
            # The loop continues only if another call has returned within its time limit.
            while previous_count < len(outcomes) and not finished.done():
                previous_count = len(outcomes)
                share_seconds = deadline - read_loop_seconds()
                if previous_count < len(calls) - 1:
                    share_seconds /= 2
                await asyncio.wait((finished,), timeout=min(limit_seconds, share_seconds))
        finally:
            is_over.set()
            # The outcomes are copied after `is_over` is set. Once `is_over` is set, the thread
            # starts no further call. Therefore, the first call without an outcome in this copy is
            # the stuck one.
            returned = tuple(outcomes)
            if len(returned) < len(calls):
                finished.cancel()
                stuck_subject = tuple(calls)[len(returned)]
                self._stuck_workers[stuck_subject] = self._worker
                self.stop()
        return returned

    def stop(self) -> None:
        """End the thread once it has finished its work."""
        self._worker.stop()
        self._worker = Worker("nvml")
