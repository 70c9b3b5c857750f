"""The command `postmortem`."""

import os
from argparse import Namespace
from pathlib import Path
from typing import Final

from msgspec.structs import asdict, replace

from vllm_headroom.daemon.pod import read_engine_pod
from vllm_headroom.daemon.state.folders import PREFIX, name_folder
from vllm_headroom.derive.life.causes import UNKNOWN_CAUSE, judge_ending
from vllm_headroom.derive.life.engine import EngineMemory, build_ending, describe_gpus
from vllm_headroom.model import Diagnosis, Ending, EnginePod, GpuAtEnd, Snapshot
from vllm_headroom.model.start import EngineLog
from vllm_headroom.trace.flight import FLIGHT, INCIDENTS, list_incidents, parse_incident_facts
from vllm_headroom.trace.incident import Incident, add_evidence, find_decisive, read_incident
from vllm_headroom.vocabulary import EndCause, IncidentKind, LeakState, Sureness
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.cli import Command, save
from vllm_headroom_tools.conclusion import Report
from vllm_headroom_tools.engine_choice import ENGINE_HELP, ENGINE_METAVAR, choose_engine
from vllm_headroom_tools.engine_log import read_engine_log
from vllm_headroom_tools.history import Curves, LeakReplay, Moment
from vllm_headroom_tools.options import (
    FILE,
    LOG,
    BadOptions,
    Parser,
    Value,
    add_reported_bytes,
    read_reported_bytes,
)
from vllm_headroom_tools.postmortem.engine_log import build_log_ending, find_start
from vllm_headroom_tools.postmortem.page import build_page
from vllm_headroom_tools.postmortem.report import NO_INCIDENT, Postmortem, build_report
from vllm_headroom_tools.postmortem.timeline import Timeline
from vllm_headroom_tools.trace import read_lines, read_trace

SAME_EVENT_SECONDS: Final = 0.5
"""A sample this close to an incident's time is the sample of its event: an incident has its time to
the millisecond."""


class EndFollower:
    """Finds the end of a run, sample by sample.

    `incident` has the time of the event to look for. Without an incident, the last exit counts, or
    a stall that goes on to the end. `reported_bytes` is the operator's figure of the memory that
    the engine uses on each GPU.
    """

    def __init__(
        self, incident: Incident | None = None, *, reported_bytes: int | None = None
    ) -> None:
        self.ending: Ending | None = None
        """The end with its evidence; None as long as no sample shows one."""
        self.replay = LeakReplay(reported_bytes=reported_bytes)
        """The leak detector and the engine's runs."""
        self.is_page_lost = False
        """Whether a page that once answered does not answer in the newest sample."""
        self._incident = incident
        self._has_answered = False
        self._leaks: dict[str, tuple[LeakState, Moment | None]] = {}

    def step(self, snapshot: Snapshot) -> Snapshot:
        """Add a sample; return the sample with the engine's state."""
        previous = self.replay.engine
        snapshot = self.replay.step(snapshot)
        status = snapshot.engine_status
        event = None if status is None else status.event
        if self._incident is not None:
            event = self._build_due(self._incident, snapshot, previous)
        if event is not None:
            event = replace(event, gpus=tuple(self._add_leak(gpu) for gpu in event.gpus))
            if self._incident is not None:
                event = add_evidence(event, self._incident)
            self.ending = event
        self._note_leaks(snapshot)
        self._has_answered = self._has_answered or snapshot.page is not None
        # An answer that stops is an end also where no sample shows it.
        self.is_page_lost = self._has_answered and snapshot.page is None
        return snapshot

    def _build_due(
        self, incident: Incident, snapshot: Snapshot, previous: EngineMemory
    ) -> Ending | None:
        """Return the incident's event, if this sample is the one at its time; else None.

        If no sample is at that time, the first one after it counts.
        """
        late_seconds = snapshot.time_seconds - incident.t
        is_due = abs(late_seconds) <= SAME_EVENT_SECONDS
        # The record may lack the sample of the event itself.
        is_overdue = self.ending is None and late_seconds > 0
        if not is_due and not is_overdue:
            return None
        status = snapshot.engine_status
        # The run that exited is the one before this sample, which may already show the next run.
        run = previous.runs.newest or previous.runs.present
        reason = incident.reason
        age_seconds = None
        if incident.what is IncidentKind.STALLED:
            run = self.replay.engine.runs.present
            reason = None
            age_seconds = None if status is None else status.progress_age_seconds
        elif reason is None and status is not None:
            reason = status.exit_reason
        return build_ending(
            previous.record,
            run,
            snapshot,
            incident.what,
            reason=reason,
            gpus=describe_gpus(previous.record, run, snapshot),
            progress_age_seconds=age_seconds,
        )

    def _note_leaks(self, snapshot: Snapshot) -> None:
        """Store the detector's newest verdict on each GPU of the run, for the event at its end."""
        status = snapshot.engine_status
        # Verdicts of an earlier run say nothing about the next.
        if status is not None and (status.exit_reason or not self.replay.engine.record.gpus):
            self._leaks = {}
        if not snapshot.is_in_service:
            return
        for _, uuid, course in self.replay.gpus:
            if course.state is not LeakState.UNKNOWN:
                self._leaks[uuid] = (course.state, course.newest)

    def _add_leak(self, gpu: GpuAtEnd) -> GpuAtEnd:
        """Return the GPU with the detector's verdict on it during the run; unknown without any."""
        state, moment = self._leaks.get(gpu.uuid, (LeakState.UNKNOWN, None))
        bytes_per_request = None if moment is None else moment.bytes_per_request
        return replace(gpu, leak=state, leak_bytes_per_request=bytes_per_request)


NO_END: Final = Diagnosis(
    cause=EndCause.NOTHING,
    sureness=Sureness.LIKELY,
    sentence="There is no exit of an engine here, and no stall.",
)


def judge(end: Ending | None, *, has_ended: bool = False) -> tuple[Diagnosis, ...]:
    """Return the causes that fit an end, the surest first; always at least one.

    Without an end, the cause is "unknown" where the engine is known to have exited (`has_ended`),
    else "nothing".
    """
    if end is not None:
        return judge_ending(end)
    return (UNKNOWN_CAUSE,) if has_ended else (NO_END,)


STATE_DIR: Final = "HEADROOM_STATE_DIR"

POD_NAMES: Final = 3
"""The names in an engine's state folder before the port: namespace, pod and UID."""


def _add_options(parser: Parser) -> None:
    """Declare the options of `postmortem`."""
    parser.add_argument(
        "place",
        metavar="FILE",
        nargs="?",
        type=Value(read=FILE.read, accepts="the path of a file or a folder"),
        help="an incident, a trace, or a folder",
    )
    parser.add_argument("--engine", metavar=ENGINE_METAVAR, help=ENGINE_HELP)
    parser.add_argument(
        "--log",
        metavar="FILE",
        type=LOG,
        help="the engine's own log of that time, - for standard input",
    )
    add_reported_bytes(parser)
    parser.add_argument(
        "--html", metavar="FILE", type=FILE, help="write the page, with its curves, into one file"
    )


def find_engine_folder(place: Path, wanted: str | None) -> Path:
    """Return the state folder of one engine, where `place` has those of several; else `place`.

    Of several pods with the wanted name, it is the newest one's. Raises BadInput where there is not
    exactly one engine with that name, or `place` cannot be read.
    """
    newest_folders: dict[str, Path] = {}
    try:
        folders = [path for path in place.glob(f"{PREFIX}*") if path.is_dir()]
        for folder in sorted(folders, key=lambda path: path.stat().st_mtime):
            # The folder's last part is the pod's UID, which no operator types.
            *names, _ = folder.name.removeprefix(PREFIX).split("_")
            # With a pod's names these are its namespace, its name and its UID.
            is_pods = len(names) == POD_NAMES
            newest_folders["/".join(names[:2]) if is_pods else "_".join(names)] = folder
    except OSError as error:
        raise BadInput(f"{place}: cannot be read: {error.strerror}") from error
    # Sorted by date: the newest pod of a name replaces the earlier ones.
    if not newest_folders:
        if wanted is not None:
            raise BadInput(f"{place}: has no folders of several engines: leave --engine out")
        return place
    if wanted is not None and "://" in wanted:
        wanted = name_folder(wanted.partition("://")[2]).removeprefix(PREFIX)
    elif wanted is not None:
        wanted = "/".join(wanted.split("/")[:2])
    return newest_folders[choose_engine(newest_folders, wanted)]


def find_trace(place: Path) -> Path:
    """Return the trace to read: the file itself, or the newest incident in a folder.

    Raises BadInput where the folder cannot be read or has no incident.
    """
    if not place.is_dir():
        return place
    try:
        # Either the state folder or the folder of its incidents may be named.
        incidents = list_incidents(place / INCIDENTS) or list_incidents(place)
    except OSError as error:
        raise BadInput(f"{place}: cannot be read: {error.strerror}") from error
    if incidents:
        return incidents[-1]
    record = place / FLIGHT
    hint = f"; {record} is the newest record" if record.exists() else ""
    raise BadInput(
        f"{place}: has no incident, which the daemon saves when the engine exits or stalls{hint}"
    )


def read_facts(file: Path) -> Incident | None:
    """Return the facts of an incident; None for a trace that is no incident.

    Where the file has several events, the facts are those of the decisive event. Raises BadInput
    where the file cannot be read, or its header lacks the time or the kind of event.
    """
    try:
        with file.open("rb") as stream:
            header = parse_incident_facts(next(read_lines(stream), b""))
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from error
    if header is None:
        return None
    incident = read_incident(header)
    if incident is None:
        needed = f"a time `t`, and `what`: {' or '.join(IncidentKind)}"
        raise BadInput(f"{file}: line 1: the header of an incident has {needed}")
    # The first line has the facts of one event; a later one may be decisive.
    decisive = find_decisive((incident, *incident.events))
    return incident if decisive is incident else replace(incident, **asdict(decisive))


def read_postmortem(
    file: Path,
    pod: EnginePod | None = None,
    log: EngineLog | None = None,
    *,
    reported_bytes: int | None = None,
) -> Postmortem:
    """Return the post-mortem of a trace, with the engine's log beside it where that is given.

    `pod` counts where the file does not name the engine's. Raises BadInput where the trace cannot
    be read, or has no samples and is no incident: an incident may have none.
    """
    incident = read_facts(file)
    follower = EndFollower(incident, reported_bytes=reported_bytes)
    timeline = Timeline()
    curves = Curves()
    for snapshot in read_trace(str(file)):
        timeline.step(follower.step(snapshot), follower.replay)
        curves.step(snapshot)
    if incident is None and not follower.replay.samples:
        raise BadInput(f"{file}: has no samples")
    # The samples decide the cause; a log makes it sure or contradicts it.
    ending = follower.ending
    start = None
    if log is not None:
        start = find_start(log, None if ending is None else ending.seconds)
        if ending is not None and start is not None:
            # The log that is given replaces what the incident has of it.
            ending = replace(ending, log=build_log_ending(start, ending.seconds))
    # The daemon saves an incident only for an end or a stall.
    has_ended = incident is not None or follower.is_page_lost
    # A plain trace has samples and no facts: its sections stay empty.
    facts = incident or NO_INCIDENT
    return Postmortem(
        file=str(file),
        findings=judge(ending, has_ended=has_ended),
        ending=ending,
        incident=facts,
        pod=facts.engine_pod or pod,
        timeline=timeline.list_entries(facts),
        curves=curves,
        log=log,
        log_start=start,
    )


def _run(options: Namespace) -> Report:
    """Return the report; raise BadOptions where neither an argument nor a variable names a file."""
    place = options.place or os.environ.get(STATE_DIR)
    if not place:
        hint = "" if options.log is None else "; vllm-headroom advise reads a log without a record"
        raise BadOptions(f"needs a FILE or a FOLDER, or {STATE_DIR} in the environment{hint}")
    # A file that is named may be of another pod.
    pod = read_engine_pod() if options.place is None else None
    log = None if options.log is None else read_engine_log(options.log)
    # The variable is of this pod's engine, so it does not count for a named file.
    reported_bytes = options.reported_bytes
    if reported_bytes is None and options.place is None:
        reported_bytes = read_reported_bytes(os.environ)
    folder = find_engine_folder(Path(place), options.engine)
    postmortem = read_postmortem(find_trace(folder), pod, log, reported_bytes=reported_bytes)
    if options.html is not None:
        save(options.html, build_page(postmortem), "--html ", (place,))
    return build_report(postmortem)


COMMAND: Final[Command] = Command(
    usage="%(prog)s [OPTION]... [FILE or FOLDER]",
    description="""\
Shows on one page what happened before the engine exited, why, and how sure that
is: out of GPU memory by a leak, by a burst, by a neighbour, or over its budget
from the start; killed by the kernel; a crash with GPU memory left; a start that
never fitted; a hang; an exit while idle.

FILE is an incident that the daemon saved, or any trace, whose last exit counts;
FOLDER means its newest incident. Without either, it uses HEADROOM_STATE_DIR.
With the engine's own log, what was only likely becomes sure or is contradicted.
""",
    epilog="""\
The exit status is 0, or 2 if it cannot use its input.

Example:
  vllm-headroom postmortem
  vllm-headroom postmortem incidents/2026-01-31T08-00-00Z.jsonl --html why.html
  kubectl logs --previous vllm-0 | vllm-headroom postmortem --log -
""",
    options=_add_options,
    run=_run,
)
