"""Write the flight record, and save an incident when the engine exits or stalls."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, to_builtins
from msgspec.structs import asdict, replace

from vllm_headroom import catalog
from vllm_headroom.daemon.mappings import Mappings
from vllm_headroom.daemon.state.lock import FolderLock
from vllm_headroom.expose.view import LastIncident
from vllm_headroom.log import Log
from vllm_headroom.model import (
    AllocatorSnapshot,
    Ending,
    EnginePod,
    EngineStatus,
    Failure,
    Gpu,
    LogEnding,
    LogReading,
    ProbedProcess,
    ProbeReadings,
    Snapshot,
    Values,
    Verdict,
    find_log_ending,
)
from vllm_headroom.trace.entries import build_record, encode_line
from vllm_headroom.trace.flight import (
    FLIGHT,
    append_to_record,
    find_newest,
    locate_incident,
    write_incident,
)
from vllm_headroom.trace.incident import (
    EngineEvent,
    HeldLine,
    MemoryHolder,
    Oom,
    SnapshotFile,
    Xid,
    build_header,
    drop_unknown,
    find_decisive,
    read_incident,
)
from vllm_headroom.trace.recorder import FileWriter
from vllm_headroom.vocabulary import EngineState, IncidentKind, Sureness

log = Log(__name__)

RECORD_STEP_SECONDS: Final = 0.9
"""The minimum time between two lines of the record. The value is a tenth less than one second, to
record an early tick too. With a line every 0.1 s (the shortest interval), the record would cover
only minutes.
"""

INCIDENT_SECONDS: Final = 300.0
"""How long an incident accepts further events. Examples are failing starts, or a restart by the
kubelet that ends a hang. The incident closes earlier if another event occurs after the engine has
served again.
"""

RETRY_SECONDS: Final = 60.0
"""The pause before a failed write of an incident is retried."""

MOST_INCIDENT_EVENTS: Final = 32
"""The number of newest events kept per incident (our choice)."""

ERROR_SECONDS: Final = 900.0
"""Only XIDs and OutOfMemoryErrors from this period before an incident may be its cause."""

MOST_RECORDED_HOLDERS: Final = 64
"""The maximum number of GPU processes in an incident's header. The number of probed processes has
the same limit (our choice).
"""

LEAK_FIGURES: Final = (
    catalog.LEAK_RATE,
    catalog.LEAK_PER_REQUEST,
    catalog.LEAKED,
    catalog.TIME_TO_OOM,
)
"""The leak detector's results for a GPU, other than its state."""

MOST_USE_SAMPLES: Final = 600
"""How many memory samples between ticks are kept: enough for ten minutes. With eight GPUs, they
take 0.5 MB.
"""

USE_STEP_SECONDS: Final = 0.9
"""The minimum time between two of these samples. The value is a second, minus a tolerance for early
samples.
"""

MOST_XIDS: Final = 32
"""The number of the driver's newest errors that are kept (our choice)."""

MOST_INCIDENT_GPUS: Final = 16
"""An incident contains samples of at most this many GPUs. An engine does not use more GPUs on one
machine. The samples take 260 kB in the header.
"""


class RecentReadings:
    """Keeps recent samples of used memory between ticks, and the newest errors of the driver."""

    def __init__(self) -> None:
        self.xids: deque[Xid] = deque(maxlen=MOST_XIDS)
        """The errors, oldest first."""
        self._samples: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=MOST_USE_SAMPLES)
        self._xid_counts: dict[tuple[str, int], int] | None = None
        """The driver's counts, keyed by UUID and XID. None before the first reading of GPUs."""

    def add(self, seconds: float, used_bytes: Mapping[str, int]) -> None:
        """Add each GPU's used memory, keyed by UUID; `seconds` is the time since the epoch.

        An empty reading, or one that comes too soon after the last, is ignored.
        """
        if not used_bytes:
            return
        # The absolute difference is used, so that samples continue if the clock is set back.
        if not self._samples or abs(seconds - self._samples[-1][0]) >= USE_STEP_SECONDS:
            self._samples.append((round(seconds, 1), used_bytes))

    def add_xids(self, snapshot: Snapshot) -> None:
        """Add the XID errors whose count has risen since the last snapshot."""
        if not snapshot.devices:
            return
        counts = {
            (gpu.reading.uuid, xid): count
            for gpu in snapshot.devices
            for xid, count in gpu.reading.xid_errors
        }
        previous_counts = self._xid_counts
        # The counts of a GPU that is missing for one tick are kept. Without the counts, the GPU's
        # errors would be reported again when it reappears.
        self._xid_counts = {**(previous_counts or {}), **counts}
        if previous_counts is None:  # It is unknown when the errors counted so far occurred.
            return
        for (uuid, xid), count in counts.items():
            if count > previous_counts.get((uuid, xid), 0):
                self.xids.append(Xid(t=round(snapshot.time_seconds, 3), uuid=uuid, xid=xid))

    def list_used(self, uuids: Iterable[str]) -> dict[str, list[tuple[float, int]]]:
        """Return the samples of these GPUs, keyed by UUID.

        Each sample consists of seconds since the epoch and used bytes.
        """
        return {uuid: self._list_samples(uuid) for uuid in sorted(uuids)[:MOST_INCIDENT_GPUS]}

    def _list_samples(self, uuid: str) -> list[tuple[float, int]]:
        return [(seconds, used[uuid]) for seconds, used in self._samples if uuid in used]


class OpenIncident(Struct, frozen=True, kw_only=True):
    """An incident that may still receive further events."""

    seconds: float
    """When the incident began, in seconds since the epoch. This time is part of the file's name."""
    write_at_seconds: float
    """When the incident is to be written next, on the monotonic clock."""
    closes_at_seconds: float
    """When the incident is complete, on the monotonic clock."""
    events: tuple[EngineEvent, ...]
    ending: Ending
    """The decisive event and what preceded it. The cause of the incident is derived from this
    event.
    """
    before: Mapping[str, Any]
    """What `build_context` returned for the last sample in which the engine was in service."""


class Flight:
    """Owns the flight record in `folder` once this daemon holds `lock`.

    `lines` returns the daemon's last log lines. Errors on the volume affect only the record. Errors
    on the volume are logged when they begin and when they end.
    """

    def __init__(
        self,
        *,
        folder: Path,
        lines: Callable[[], Sequence[str]],
        version: str,
        lock: FolderLock,
        mappings: Mappings,
        pod: EnginePod | None = None,
    ) -> None:
        self.last: LastIncident | None = None
        """The newest incident on disk, or None if there is none."""
        self.recent = RecentReadings()
        """The readings between ticks. The caller adds them."""
        self._folder = folder
        self._lines = lines
        self._version = version
        self._lock = lock
        self._mappings = mappings
        self._pod = pod
        self._writer = FileWriter("flight record", folder / FLIGHT)
        self._recorded_seconds: float | None = None
        """When the newest line was written, on the monotonic clock. None if there is no line."""
        self._last_known_state = EngineState.UNKNOWN
        """The newest state of the engine other than UNKNOWN."""
        self._has_served = False
        """Whether the engine has been in service since the last event."""
        self._last_context: Mapping[str, Any] = {}
        """The context of the last sample in service. If there was none, the context of the last
        sample.
        """
        self._ooms: tuple[Oom, ...] = ()
        """The newest OutOfMemoryErrors."""
        self._snapshots: tuple[SnapshotFile, ...] = ()
        """The snapshots that torch took at these errors."""
        self._engine_log: LogReading | None = None
        """What the engine's log shows so far, or None if it was never read."""
        self._now_seconds = 0.0
        """The time of the latest tick, in seconds since the epoch."""
        self._incident: OpenIncident | None = None

    async def step(self, snapshot: Snapshot, verdicts: Sequence[Verdict], values: Values) -> None:
        """Record one tick, and open, extend or write an incident when needed.

        Nothing is written while another daemon has the folder's lock.
        """
        now = snapshot.monotonic_seconds
        self.recent.add_xids(snapshot)
        self._mappings.step(snapshot, values)
        # If this snapshot has no errors, the last known errors are kept. The probe's files may be
        # missing.
        self._ooms = list_ooms(snapshot) or self._ooms
        self._snapshots = list_snapshots(snapshot) or self._snapshots
        self._now_seconds = snapshot.time_seconds
        if isinstance(snapshot.log, LogReading):
            self._engine_log = snapshot.log
        event = self._take_event(snapshot.engine_status)
        if not self._lock.is_ours:
            return  # Another daemon holds the lock and records the tick.
        # The last incident is read only once, after the lock has been taken.
        if self._recorded_seconds is None:
            await self._writer.do(self._find_last_incident)
        if event is None:
            self._update_context(snapshot, verdicts, values)
        else:
            self._add_event(event, snapshot)
        # A tick with an event is always recorded, because it shows what changed.
        if event is not None or self._is_record_due(now):
            self._recorded_seconds = now
            await self._writer.do(partial(self._append, snapshot))
        if self._incident is not None and now >= self._incident.write_at_seconds:
            self._incident = await self._write(self._incident, now)

    def _update_context(
        self, snapshot: Snapshot, verdicts: Sequence[Verdict], values: Values
    ) -> None:
        """Store this tick's context.

        Once an engine that has served is out of service, the context stays unchanged. The unchanged
        context describes the last tick in service, so it explains how the service ended.
        """
        is_known = snapshot.engine_status is not None
        if is_known and self._has_served and not snapshot.is_in_service:
            return
        self._has_served = self._has_served or snapshot.is_in_service
        context = build_context(snapshot, verdicts, values)
        self._last_context = {**context, "mappings": self._mappings.describe()}

    def _append(self, snapshot: Snapshot) -> None:
        append_to_record(self._folder, encode_line(build_record(snapshot)))

    def _is_record_due(self, now: float) -> bool:
        if self._recorded_seconds is None:
            return True
        return now - self._recorded_seconds >= RECORD_STEP_SECONDS

    def _take_event(self, status: EngineStatus | None) -> Ending | None:
        """Return the tick's event, or None if there is none.

        If the engine has served since the open incident, the event closes that incident. The same
        event begins another incident.
        """
        if status is None:
            return None
        if status.event is not None and self._last_known_state is EngineState.SERVING:
            self._incident = None
        # A stall interrupted by an unknown state still counts as one stall.
        if status.state is not EngineState.UNKNOWN:
            self._last_known_state = status.state
        return status.event

    def _add_event(self, ending: Ending, snapshot: Snapshot) -> None:
        """Add an event to the open incident, or open one."""
        now = snapshot.monotonic_seconds
        status = snapshot.engine_status
        age_seconds = None
        if ending.kind is IncidentKind.STALLED and status is not None:
            age_seconds = status.progress_age_seconds
        event = EngineEvent(
            t=round(ending.seconds, 3),
            what=ending.kind,
            reason=ending.reason,
            progress_age_seconds=age_seconds,
        )
        self._has_served = False
        incident = self._incident
        if incident is None:
            # Memory may fill up between two lines of the record. The header therefore contains the
            # samples between the lines.
            leaks = self._last_context.get("leaks", ())
            used = self.recent.list_used(leak["uuid"] for leak in leaks)
            self._incident = OpenIncident(
                seconds=snapshot.time_seconds,
                write_at_seconds=now,
                closes_at_seconds=now + INCIDENT_SECONDS,
                events=(event,),
                ending=ending,
                before={**self._last_context, "used": used},
            )
            return
        events = (*incident.events, event)[-MOST_INCIDENT_EVENTS:]
        # The first event stays decisive, unless an exit for lack of memory follows immediately.
        is_decisive = find_decisive(events) is event
        self._incident = replace(
            incident,
            write_at_seconds=now,
            events=events,
            ending=ending if is_decisive else incident.ending,
        )

    async def _write(self, incident: OpenIncident, now: float) -> OpenIncident | None:
        """Write the incident so far, and return it with the time of the next write.

        An incident is written immediately. Once the incident is complete, it is written again with
        all later events. Returns None once the complete incident is written. Also returns None if
        writing still fails INCIDENT_SECONDS after the end of the incident.
        """
        # XIDs and failed allocations in the minutes before the incident may be its cause.
        oldest_seconds = incident.seconds - ERROR_SECONDS
        header = build_header(
            incident.ending,
            incident.events,
            version=self._version,
            pod=self._pod,
            before=incident.before,
            xids=[error for error in self.recent.xids if error.t >= oldest_seconds],
            ooms=[oom for oom in self._ooms if oom.t is None or oom.t >= oldest_seconds],
            snapshots=[file for file in self._snapshots if file.t >= oldest_seconds],
            engine_log=self._find_engine_log(incident),
            log_lines=self._lines(),
        )
        is_written = await self._writer.do(
            partial(write_incident, self._folder, incident.seconds, header)
        )
        # Writing is retried until long after the incident's end. Someone may free space on a full
        # volume.
        closes_at_seconds = incident.closes_at_seconds
        if not is_written:
            is_abandoned = now >= closes_at_seconds + INCIDENT_SECONDS
            return None if is_abandoned else replace(incident, write_at_seconds=now + RETRY_SECONDS)
        file = locate_incident(self._folder, incident.seconds)
        self.last = _summarise_incident(file, header)
        # The incident is reported only once, when it is first written.
        if incident.write_at_seconds < closes_at_seconds:
            look_at = f"vllm-headroom postmortem {file}"
            if self._pod is None:
                log.warning("an incident was set aside", look_at=look_at)
            else:
                log.warning(
                    "an incident was set aside", look_at=look_at, engine_log=self._pod.log_command
                )
        # Until the incident closes, each later event is added at the next write.
        if now >= closes_at_seconds:
            return None
        return replace(incident, write_at_seconds=max(now + RETRY_SECONDS, closes_at_seconds))

    def _find_engine_log(self, incident: OpenIncident) -> LogEnding | None:
        """Return what the engine's log reports about an incident, or None if it reports nothing.

        If an exit followed a stall, the log's report concerns the exit.
        """
        if self._engine_log is None:
            return None
        return find_log_ending(self._engine_log, incident.ending.seconds, self._now_seconds)

    def _find_last_incident(self) -> None:
        """Set `last` to the newest incident from an earlier process, or to None.

        If the folder is a link, its current target is used from now on.
        """
        self._folder = Path(os.path.realpath(self._folder))
        newest = find_newest(self._folder)
        self.last = None if newest is None else _summarise_incident(*newest)


def build_context(
    snapshot: Snapshot, verdicts: Sequence[Verdict], values: Values
) -> dict[str, Any]:
    """Return a tick's facts that cannot be derived from the samples, for JSON.

    The facts are:

    - the verdicts
    - the leak detector's results
    - the processes on the GPUs
    - the probe's files
    - the messages of the sources that failed
    """
    sources = (snapshot.engines, snapshot.gpus, snapshot.processes)
    probed_processes = _list_probed(snapshot)[:MOST_RECORDED_HOLDERS]
    return {
        "t": round(snapshot.time_seconds, 3),
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "leaks": [_describe_leak(gpu, values) for gpu in snapshot.owned_gpus],
        "holders": to_builtins(_list_holders(snapshot)[:MOST_RECORDED_HOLDERS]),
        "probe": [drop_unknown(_drop_sizes(process)) for process in probed_processes],
        "problems": [source.message for source in sources if isinstance(source, Failure)],
    }


def _describe_leak(gpu: Gpu, values: Values) -> dict[str, Any]:
    """Return the leak detector's results for a GPU, omitting unknown values."""
    index = gpu.reading.index
    uuid = gpu.reading.uuid
    labels = (str(index), uuid)
    leak: dict[str, Any] = {
        "gpu": index,
        "uuid": uuid,
        "state": values.state(catalog.LEAK_STATE, *labels),
    }
    for metric in LEAK_FIGURES:
        value = values.value(metric, *labels)
        # JSON has no infinity.
        if value is not None and isfinite(value):
            leak[metric.name.removeprefix("headroom_")] = value
    return leak


def _list_holders(snapshot: Snapshot) -> list[MemoryHolder]:
    """Return the processes on the engine's GPUs; `used` is None if unknown."""
    return [
        MemoryHolder(uuid=gpu.reading.uuid, pid=process.pid, used=process.used_bytes)
        for gpu in snapshot.owned_gpus
        for process in gpu.reading.processes or ()
    ]


def list_ooms(snapshot: Snapshot) -> tuple[Oom, ...]:
    """Return the newest OutOfMemoryError of each probed process, including exited processes."""
    return tuple(
        Oom(
            t=round(process.oom.at_seconds, 3),
            uuid=process.oom.uuid,
            asked=process.oom.asked_bytes,
            free=process.oom.free_bytes,
            allocated=process.oom.allocated_bytes,
            reserved=process.oom.reserved_bytes,
            step=process.oom.step,
        )
        for process in _list_probed(snapshot)
        if process.oom is not None
    )


def list_snapshots(snapshot: Snapshot) -> tuple[SnapshotFile, ...]:
    """Return the torch snapshot of each process's first OOM error.

    Exited processes are included. The newest snapshot comes last. If there are many ranks, only the
    newest snapshots are listed.
    """
    files = [
        _describe_snapshot(process.pid, process.history.oom)
        for process in _list_probed(snapshot)
        if process.history is not None and process.history.oom is not None
    ]
    files.sort(key=lambda file: file.t)
    return tuple(files[-MOST_INCIDENT_GPUS:])


def _describe_snapshot(pid: int, snapshot: AllocatorSnapshot) -> SnapshotFile:
    """Return what an incident's header contains about a snapshot of torch's allocator."""
    largest = tuple(
        HeldLine(
            file=holding.file,
            line=holding.line,
            bytes=holding.size_bytes,
            count=holding.n_blocks,
            since=holding.since_seconds,
        )
        for holding in snapshot.largest
    )
    return SnapshotFile(
        t=round(snapshot.at_seconds, 3),
        file=snapshot.file,
        pid=pid,
        size=snapshot.size_bytes,
        problem=snapshot.problem,
        largest=largest,
    )


def _drop_sizes(process: ProbedProcess) -> ProbedProcess:
    """Return a process without its peaks by size; an incident needs only the highest peak."""
    if process.peaks is None:
        return process
    works = tuple([replace(work, sizes=()) for work in process.peaks.works])
    return replace(process, peaks=replace(process.peaks, works=works))


def _list_probed(snapshot: Snapshot) -> tuple[ProbedProcess, ...]:
    """Return all processes that have a probe file.

    The result is empty if the files could not be read.
    """
    probe = snapshot.probe
    return probe.processes if isinstance(probe, ProbeReadings) else ()


def _summarise_incident(file: Path, header: Mapping[str, Any]) -> LastIncident | None:
    """Return what the page shows about an incident.

    Returns None if the header contains no event.
    """
    incident = read_incident(header)
    if incident is None:
        return None
    sentence = None
    if incident.sentence is not None:
        sentence = f"{incident.sentence} ({incident.sure or Sureness.POSSIBLE})"
    return LastIncident(
        seconds=incident.t,
        kind=incident.what,
        reason=incident.reason,
        sentence=sentence,
        file=str(file),
    )
