"""The command `postmortem`."""

import os
from argparse import Namespace
from pathlib import Path
from typing import Final

from msgspec.structs import asdict, replace

from vllm_headroom.derive.life.case import build_ending, describe_gpus
from vllm_headroom.derive.life.judge import UNKNOWN, judge_ending
from vllm_headroom.derive.life.runs import RunState
from vllm_headroom.model import Diagnosis, Ending, GpuAtEnd, Snapshot
from vllm_headroom.trace.flight import FLIGHT, INCIDENTS, list_incidents, parse_incident_facts
from vllm_headroom.trace.incident import Incident, add_evidence, find_decisive, read_incident
from vllm_headroom.vocabulary import EndCause, IncidentKind, LeakState, Sureness
from vllm_headroom_tools.cli import Command, save
from vllm_headroom_tools.conclusion import Report
from vllm_headroom_tools.history import Curves, LeakReplay, Moment
from vllm_headroom_tools.options import FILE, BadOptions, Parser, Value
from vllm_headroom_tools.postmortem.report import (
    NO_INCIDENT,
    Postmortem,
    Timeline,
    build_page,
    build_report,
)
from vllm_headroom_tools.trace import BadInput, read_lines, read_trace

SAME_SECONDS: Final = 0.5


class Follower:
    """Finds the end sample by sample; the facts of an incident have the time of the event.

    Without them the last exit in the trace counts, or a stall that goes on. `silent` is whether a page that once
    answered no longer does.
    """

    def __init__(self, incident: Incident | None = None) -> None:
        self.ending: Ending | None = None
        self.watch = LeakReplay()
        self.silent = False
        self._incident = incident
        self._was_read = False
        self._leaks: dict[str, tuple[LeakState, Moment | None]] = {}

    def step(self, snapshot: Snapshot) -> Snapshot:
        """Add a sample; return it with the state of the engine added."""
        before = self.watch.run
        snapshot = self.watch.step(snapshot)
        event = None if snapshot.engine_status is None else snapshot.engine_status.event
        if self._incident is not None:
            event = self._build_due(self._incident, snapshot, event, before)
        if event is not None:
            found = replace(event, gpus=tuple(map(self._add_leak, event.gpus)))
            self.ending = found if self._incident is None else add_evidence(found, self._incident)
        if snapshot.engine_status is not None and (
            snapshot.engine_status.ended or not self.watch.run.case.gpus
        ):
            self._leaks = {}
        for _, uuid, course in self.watch.gpus:
            if snapshot.in_service and course.state is not LeakState.UNKNOWN:
                self._leaks[uuid] = course.state, course.newest
        self._was_read = self._was_read or snapshot.page is not None
        self.silent = self._was_read and snapshot.page is None
        return snapshot

    def _build_due(
        self, known: Incident, snapshot: Snapshot, event: Ending | None, before: RunState
    ) -> Ending | None:
        """Return the incident's event at its time, or at the first sample after it; else None."""
        late = snapshot.time_seconds - known.t
        if not (abs(late) <= SAME_SECONDS or (self.ending is None and late > 0)):
            return None
        run, age = before.runs.newest or before.runs.present, None
        reason = known.reason or (None if event is None else event.reason)
        if known.what is IncidentKind.STALLED:
            run, reason = self.watch.run.runs.present, None
            age = (
                None
                if snapshot.engine_status is None
                else snapshot.engine_status.progress_age_seconds
            )
        gpus = describe_gpus(before.case, run, snapshot)
        return build_ending(
            before.case, run, snapshot, known.what, reason=reason, gpus=gpus, age_seconds=age
        )

    def _add_leak(self, gpu: GpuAtEnd) -> GpuAtEnd:
        state, moment = self._leaks.get(gpu.uuid, (LeakState.UNKNOWN, None))
        return replace(
            gpu,
            leak=state,
            leak_bytes_per_request=None if moment is None else moment.bytes_per_request,
        )


NOTHING: Final = Diagnosis(
    cause=EndCause.NOTHING,
    sureness=Sureness.LIKELY,
    sentence="There is no exit of an engine here, and no stall.",
)


def judge(end: Ending | None, *, has_ended: bool = False) -> tuple[Diagnosis, ...]:
    """Return the causes that fit, the surest first; `has_ended` is whether it exited, and nothing is known of it."""
    return judge_ending(end) if end is not None else (UNKNOWN if has_ended else NOTHING,)


STATE_DIR: Final = "HEADROOM_STATE_DIR"


def _options(parser: Parser) -> None:
    parser.add_argument(
        "place",
        metavar="FILE",
        nargs="?",
        type=Value(read=FILE.read, accepts="the path of a file or a folder"),
        help="an incident, a trace, or a folder",
    )
    parser.add_argument(
        "--html", metavar="FILE", type=FILE, help="write the page, with its curves, into one file"
    )


def find_trace(given: Path) -> Path:
    """Return the trace to read: a file itself, or the newest incident of a folder; raises BadInput."""
    if not given.is_dir():
        return given
    try:
        found = list_incidents(given / INCIDENTS) or list_incidents(given)
    except OSError as error:
        raise BadInput(f"{given}: cannot be read: {error.strerror}") from error
    if found:
        return found[-1]
    record = given / FLIGHT
    hint = f"; {record} is the newest record" if record.exists() else ""
    raise BadInput(
        f"{given}: has no incident, which the daemon saves when the engine exits or stalls{hint}"
    )


def read_facts(file: Path) -> Incident | None:
    """Read the facts of an incident, None for another trace; raises BadInput."""
    try:
        with file.open("rb") as stream:
            known = parse_incident_facts(next(read_lines(stream), b""))
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from error
    if known is None:
        return None
    found = read_incident(known)
    if found is None:
        needed = f"a time `t`, and `what`: {' or '.join(IncidentKind)}"
        raise BadInput(f"{file}: line 1: the header of an incident has {needed}")
    decisive = find_decisive((found, *found.events))
    return replace(found, **asdict(decisive)) if decisive is not found else found


def read_postmortem(file: Path) -> Postmortem:
    """Read the post-mortem of a trace; raises BadInput."""
    incident = read_facts(file)
    follower, timeline, curves = Follower(incident), Timeline(), Curves()
    for snapshot in read_trace(str(file)):
        timeline.step(follower.step(snapshot), follower.watch)
        curves.step(snapshot)
    if incident is None and not follower.watch.samples:
        raise BadInput(f"{file}: has no samples")
    return Postmortem(
        file=str(file),
        findings=judge(follower.ending, has_ended=incident is not None or follower.silent),
        ending=follower.ending,
        known=incident or NO_INCIDENT,
        timeline=timeline.list_entries(incident or NO_INCIDENT),
        curves=curves,
    )


def _run(given: Namespace) -> Report:
    place = given.place or os.environ.get(STATE_DIR)
    if not place:
        raise BadOptions(f"needs a FILE or a FOLDER, or {STATE_DIR} in the environment")
    found = read_postmortem(find_trace(Path(place)))
    if given.html is not None:
        save(given.html, build_page(found), "--html ", (place,))
    return build_report(found)


COMMAND: Final[Command] = Command(
    usage="%(prog)s [OPTION]... [FILE or FOLDER]",
    description="""\
Shows on one page what happened before the engine exited, why, and how sure that
is: out of GPU memory by a leak, by a burst or by a neighbour; killed by the
kernel; a crash with GPU memory left; a start that never fitted; a hang; an exit
while idle.

FILE is an incident that the daemon saved, or any trace, whose last exit counts;
FOLDER means its newest incident. Without either, it uses HEADROOM_STATE_DIR.
""",
    epilog="""\
The exit status is 0, or 2 if it cannot use its input.

Example:
  vllm-headroom postmortem
  vllm-headroom postmortem incidents/2026-01-31T08-00-00Z.jsonl --html why.html
""",
    options=_options,
    run=_run,
)
