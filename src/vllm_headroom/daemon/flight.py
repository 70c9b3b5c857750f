"""Write the flight record, and set a part of it aside as an incident when the engine exits or stalls."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict, replace

from vllm_headroom import catalog
from vllm_headroom.daemon.mappings import Mappings
from vllm_headroom.daemon.state.lock import FolderLock
from vllm_headroom.derive.life.causes import judge_ending
from vllm_headroom.expose.view import LastIncident
from vllm_headroom.log import Log
from vllm_headroom.model import (
    Ending,
    EngineStatus,
    Failure,
    ProbedProcess,
    ProbeReadings,
    Snapshot,
    Values,
    Verdict,
)
from vllm_headroom.trace.entries import build_record, encode_line
from vllm_headroom.trace.flight import (
    FLIGHT,
    append_to_record,
    find_newest,
    locate_incident,
    write_incident,
)
from vllm_headroom.trace.incident import EngineEvent, add_evidence, find_decisive, read_incident
from vllm_headroom.trace.recorder import FileWriter
from vllm_headroom.vocabulary import EngineState, IncidentKind, Sureness

MOST_HOLDERS: Final = 64
FIGURES: Final = (catalog.LEAK_RATE, catalog.LEAK_PER_REQUEST, catalog.LEAKED, catalog.TIME_TO_OOM)
"""The leak detector's results for a GPU besides its state."""


def build_context(
    snapshot: Snapshot, verdicts: Sequence[Verdict], values: Values
) -> dict[str, Any]:
    """Return what a later reader cannot derive from the samples alone."""
    parts = (snapshot.engines, snapshot.gpus, snapshot.processes)
    owned = [gpu.reading for gpu in snapshot.owned_gpus]
    holders = [
        {"uuid": gpu.uuid, "pid": each.pid, "used": each.used_bytes}
        for gpu in owned
        for each in gpu.processes or ()
    ]
    return {
        "t": round(snapshot.time_seconds, 3),
        "verdicts": [asdict(each) for each in verdicts],
        "leaks": [_describe_leak(values, str(gpu.index), gpu.uuid) for gpu in owned],
        "holders": holders[:MOST_HOLDERS],
        "probe": [_drop_unknown(process) for process in _list_probed(snapshot)[:MOST_HOLDERS]],
        "problems": [each.message for each in parts if isinstance(each, Failure)],
    }


def list_ooms(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return the newest OutOfMemoryError of each probed process, including exited ones."""
    known = (each.oom for each in _list_probed(snapshot) if each.oom is not None)
    return [
        {
            "t": round(each.at_seconds, 3),
            "uuid": each.uuid,
            **{
                name: getattr(each, f"{name}_bytes")
                for name in ("asked", "free", "allocated", "reserved")
            },
        }
        for each in known
    ]


def _list_probed(snapshot: Snapshot) -> tuple[ProbedProcess, ...]:
    probe = snapshot.probe
    return probe.processes if isinstance(probe, ProbeReadings) else ()


def _drop_unknown(value: object) -> Any:  # noqa: ANN401 - a value of JSON
    """Return a value for JSON without fields that are None."""
    if isinstance(value, Struct):
        return {
            name: _drop_unknown(each) for name, each in asdict(value).items() if each is not None
        }
    return [_drop_unknown(each) for each in value] if isinstance(value, tuple) else value


def _describe_leak(values: Values, gpu: str, uuid: str) -> dict[str, Any]:
    figures = {
        metric.name.removeprefix("headroom_"): values.value(metric, gpu, uuid) for metric in FIGURES
    }
    finite = {
        name: value for name, value in figures.items() if value is not None and isfinite(value)
    }
    return {
        "gpu": int(gpu),
        "uuid": uuid,
        "state": values.state(catalog.LEAK_STATE, gpu, uuid),
        **finite,
    }


MOST_LOOKS: Final = 600
LEAST_LOOK_SECONDS: Final = 0.9
"""At most one memory sample a second, with tolerance for an early one. With eight GPUs all take 0.5 MB."""

MOST_XIDS: Final = 32
MOST_GPUS: Final = 16
"""The most that one engine has on one machine: 260 kB in the header of an incident."""


class Recent:
    """Keeps the newest memory samples between ticks and, in `xids`, the driver's newest errors."""

    def __init__(self) -> None:
        self.xids: deque[dict[str, Any]] = deque(maxlen=MOST_XIDS)
        self._looks: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=MOST_LOOKS)
        self._counted: dict[tuple[str, int], int] | None = None

    def add(self, seconds: float, used_bytes: Mapping[str, int]) -> None:
        """Add the memory in use by UUID."""
        if used_bytes and (
            not self._looks or abs(seconds - self._looks[-1][0]) >= LEAST_LOOK_SECONDS
        ):
            self._looks.append((round(seconds, 1), used_bytes))

    def note(self, snapshot: Snapshot) -> None:
        """Add the XID errors that are new in a sample."""
        if not snapshot.devices:
            return
        counts = {
            (gpu.reading.uuid, xid): n
            for gpu in snapshot.devices
            for xid, n in gpu.reading.xid_errors
        }
        before, self._counted = self._counted, {**(self._counted or {}), **counts}
        if before is None:  # the time of earlier errors is unknown
            return
        for (uuid, xid), count in counts.items():
            if count > before.get((uuid, xid), 0):
                self.xids.append({"t": round(snapshot.time_seconds, 3), "uuid": uuid, "xid": xid})

    def of(self, uuids: Iterable[str]) -> dict[str, list[tuple[float, int]]]:
        """Return the samples of these GPUs, as time and memory in use."""
        return {
            uuid: [(seconds, seen[uuid]) for seconds, seen in self._looks if uuid in seen]
            for uuid in sorted(uuids)[:MOST_GPUS]
        }


log = Log(__name__)

LEAST_SECONDS: Final = 0.9
"""At most one line a second, with tolerance for an early tick: at 0.1 s the record would hold minutes."""

AFTER_SECONDS: Final = 300.0
"""Later events belong to the same incident until the engine has served again: a hang that a probe ends, the first steps
of the next run, starts that fail."""

AGAIN_SECONDS: Final = 60.0
MOST_EVENTS: Final = 32
XID_SECONDS: Final = 900.0


class OpenIncident(Struct, frozen=True, kw_only=True):
    """The events of an incident; `due` is when it is written next, `closes` when it is complete (monotonic).

    `ending` is what preceded the event that it is judged by.
    """

    seconds: float
    closes: float
    due: float
    events: tuple[EngineEvent, ...]
    ending: Ending
    before: Mapping[str, Any]


class Flight:
    """Owns the record in `folder` once `lock` is this daemon's; `lines` returns the daemon's last log lines.

    `last` is the newest incident on disk, `recent` takes what is read between ticks. Errors of the volume are logged
    when they begin and end, and affect the record only.
    """

    def __init__(
        self,
        *,
        folder: Path,
        lines: Callable[[], Sequence[str]],
        version: str,
        lock: FolderLock,
        mappings: Mappings,
    ) -> None:
        self.last: LastIncident | None = None
        self._folder, self._lines, self._version, self._lock = folder, lines, version, lock
        self._mappings = mappings
        self._writing = FileWriter("flight record", folder / FLIGHT)
        self._state = EngineState.UNKNOWN
        self._written: float | None = None
        self._before: Mapping[str, Any] = {}
        self.recent = Recent()
        self._served = False
        self._incident: OpenIncident | None = None
        self._ooms: list[dict[str, Any]] = []

    async def step(self, snapshot: Snapshot, verdicts: Sequence[Verdict], values: Values) -> None:
        """Record one tick."""
        now = snapshot.monotonic_seconds
        self.recent.note(snapshot)
        self._mappings.step(snapshot, values)
        self._ooms = list_ooms(snapshot) or self._ooms
        event = None if snapshot.engine_status is None else self._take_event(snapshot.engine_status)
        if not self._lock.is_ours:
            return  # the other daemon records it
        if self._written is None:
            await self._writing.do(self._look_back)
        if event is not None:
            self._begin(event, snapshot)
        elif not self._served or snapshot.engine_status is None or snapshot.in_service:
            self._served = self._served or snapshot.in_service
            self._before = {
                **build_context(snapshot, verdicts, values),
                "mappings": self._mappings.describe(),
            }
        if self._written is None or event is not None or now - self._written >= LEAST_SECONDS:
            self._written = now
            await self._writing.do(
                lambda: append_to_record(self._folder, encode_line(build_record(snapshot)))
            )
        if self._incident is not None and now >= self._incident.due:
            self._incident = await self._set_aside(self._incident, now)

    def _take_event(self, engine_status: EngineStatus) -> Ending | None:
        if engine_status.event is not None and self._state is EngineState.SERVING:
            self._incident = None  # it had served again: the one before was over
        if (
            engine_status.state is not EngineState.UNKNOWN
        ):  # a stall that was out of sight for a time is one stall
            self._state = engine_status.state
        return engine_status.event

    def _begin(self, ending: Ending, snapshot: Snapshot) -> None:
        now, going, engine_status = (
            snapshot.monotonic_seconds,
            self._incident,
            snapshot.engine_status,
        )
        age = (
            None
            if engine_status is None or ending.kind is IncidentKind.ENDED
            else engine_status.progress_age_seconds
        )
        event = EngineEvent(
            t=round(ending.seconds, 3),
            what=ending.kind,
            reason=ending.reason,
            progress_age_seconds=age,
        )
        if going is not None:
            events = (*going.events, event)[-MOST_EVENTS:]
            ending = ending if find_decisive(events) is event else going.ending
            self._incident = replace(going, due=now, events=events, ending=ending)
        else:
            used = self.recent.of(each["uuid"] for each in self._before.get("leaks", ()))
            self._incident = OpenIncident(
                seconds=snapshot.time_seconds,
                closes=now + AFTER_SECONDS,
                due=now,
                events=(event,),
                ending=ending,
                before={**self._before, "used": used},
            )
        self._served = False

    async def _set_aside(self, incident: OpenIncident, now: float) -> OpenIncident | None:
        """Write the incident so far; return it while it continues, None when it is complete or abandoned."""
        done = await self._writing.do(
            partial(write_incident, self._folder, incident.seconds, self._build_header(incident))
        )
        if done:
            file = locate_incident(self._folder, incident.seconds)
            self.last = _build_incident(file, self._build_header(incident))
            if incident.due < incident.closes:
                log.warning("an incident was set aside", look_at=f"vllm-headroom postmortem {file}")
        if now >= incident.closes and (done or now >= incident.closes + AFTER_SECONDS):
            return None
        return replace(
            incident, due=max(now + AGAIN_SECONDS, incident.closes) if done else now + AGAIN_SECONDS
        )

    def _build_header(self, incident: OpenIncident) -> dict[str, Any]:
        earliest = incident.seconds - XID_SECONDS
        header = {
            **_drop_unknown(find_decisive(incident.events)),
            "version": self._version,
            "events": [_drop_unknown(each) for each in incident.events],
            "before": dict(incident.before),
            "xids": [each for each in self.recent.xids if each["t"] >= earliest],
            "ooms": [each for each in self._ooms if each["t"] >= earliest],
            "log": list(self._lines()),
        }
        known = read_incident(header)
        cause = judge_ending(
            incident.ending if known is None else add_evidence(incident.ending, known)
        )[0]
        return {**header, "cause": cause.cause, "sure": cause.sureness, "sentence": cause.sentence}

    def _look_back(self) -> None:
        """Find the last incident of an earlier process, in the configured folder or the one it links to."""
        self._folder = Path(os.path.realpath(self._folder))
        found = find_newest(self._folder)
        self.last = None if found is None else _build_incident(*found)


def _build_incident(file: Path, known: Mapping[str, Any]) -> LastIncident | None:
    found = read_incident(known)
    if found is None:
        return None
    said = (
        None if found.sentence is None else f"{found.sentence} ({found.sure or Sureness.POSSIBLE})"
    )
    return LastIncident(
        seconds=found.t, kind=found.what, reason=found.reason, sentence=said, file=str(file)
    )
