"""The post-mortem of a trace: the run's end, the matching causes, and the report."""

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, to_builtins
from msgspec.structs import asdict, replace

from vllm_headroom.derive.life.causes import UNKNOWN_CAUSE, judge_ending
from vllm_headroom.derive.life.engine import EngineMemory, build_ending, describe_gpus
from vllm_headroom.model import (
    Diagnosis,
    Ending,
    EnginePod,
    EngineReading,
    GpuAtEnd,
    Snapshot,
)
from vllm_headroom.model.start import EngineLog, EngineStart
from vllm_headroom.trace.flight import parse_incident_facts
from vllm_headroom.trace.incident import (
    MOST_SHOWN_ENTRIES,
    Incident,
    MappingGrowth,
    TorchMemory,
    add_evidence,
    find_decisive,
    format_amount,
    read_incident,
)
from vllm_headroom.units import format_duration, format_instant, format_size
from vllm_headroom.vocabulary import EndCause, IncidentKind, LeakState, Situation, Sureness
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report
from vllm_headroom_tools.history import Curves, LeakReplay, Moment
from vllm_headroom_tools.postmortem.advice import SITUATIONS, list_steps
from vllm_headroom_tools.postmortem.engine_log import (
    build_log_ending,
    find_start,
    list_log_lines,
)
from vllm_headroom_tools.postmortem.timeline import Timeline
from vllm_headroom_tools.terminal import join_paragraphs, wrap_headed, wrap_text
from vllm_headroom_tools.trace import read_lines, read_trace

NO_INCIDENT: Final = Incident(t=0.0, what=IncidentKind.ENDED)
"""The facts for a trace that is not an incident."""

NO_END: Final = Diagnosis(
    cause=EndCause.NOTHING,
    sureness=Sureness.LIKELY,
    sentence="There is no exit of an engine here, and no stall.",
)

SAME_EVENT_SECONDS: Final = 0.5
"""A sample this close to an incident's time is the sample of the incident's event. The time of an
incident has millisecond precision.
"""

MOST_LISTED_HOLDERS: Final = 16
"""Our choice: the largest number of entries in each list of processes or snapshots."""

MOST_SNAPSHOT_LINES: Final = 10
"""Our choice: the number of lines of code that are listed for a snapshot."""

TEXT_LOG_LINES: Final = 10
"""Our choice: the number of recent sidecar log lines in the text report. The page shows more."""

Line = tuple[str, str]
"""A name and its text."""


class Postmortem(Struct, frozen=True, kw_only=True):
    """What a trace shows about the end of a run."""

    file: str
    findings: tuple[Diagnosis, ...]
    """The matching causes, most certain first."""
    ending: Ending | None
    """The evidence for the findings, or None if no end was found."""
    incident: Incident
    """The facts of the incident; `NO_INCIDENT` for a trace that is not an incident."""
    pod: EnginePod | None
    """The engine's pod. It is None outside Kubernetes, or if the file names no pod."""
    timeline: tuple[tuple[float, str], ...]
    """The changes before the end, each as seconds since the epoch and a sentence."""
    curves: Curves
    log: EngineLog | None = None
    """The engine's log, or None if it was not given."""
    log_start: EngineStart | None = None
    """The start in the log that ended with the run, or None."""

    @property
    def answer(self) -> Diagnosis:
        """The most certain finding."""
        return self.findings[0]

    @property
    def situation(self) -> Situation | None:
        """Return the situation of the most certain finding, or None if no run ended."""
        return SITUATIONS.get(self.answer.cause, Situation.DOWN)


def read_postmortem(
    file: Path,
    pod: EnginePod | None = None,
    log: EngineLog | None = None,
    *,
    reported_bytes: int | None = None,
) -> Postmortem:
    """Return the post-mortem of a trace and, if it is given, of the engine's log.

    `pod` is used if the file does not name the engine's pod. Raises BadInput if the trace cannot be
    read. Also raises BadInput for a trace without samples that is not an incident.
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
    # The samples determine the cause; a log can confirm or contradict it.
    ending = follower.ending
    start = None
    if log is not None:
        start = find_start(log, None if ending is None else ending.seconds)
        if ending is not None and start is not None:
            # A log that the operator provides replaces the log excerpt in the incident.
            ending = replace(ending, log=build_log_ending(start, ending.seconds))
    # The daemon saves an incident only when an engine ends or stalls.
    has_ended = incident is not None or follower.is_page_lost
    # A plain trace has no incident facts, so their sections stay empty.
    facts = incident or NO_INCIDENT
    return Postmortem(
        file=str(file),
        findings=judge_end(ending, has_ended=has_ended),
        ending=ending,
        incident=facts,
        pod=facts.engine_pod or pod,
        timeline=timeline.list_entries(facts),
        curves=curves,
        log=log,
        log_start=start,
    )


def read_facts(file: Path) -> Incident | None:
    """Return the facts of an incident.

    Returns None for a trace that is not an incident. If the file contains several events, the facts
    are those of the decisive event. Raises BadInput if the file cannot be read. Also raises
    BadInput if its header lacks the event's time or kind.
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
    # The first line has the facts of one event. A later event may be the decisive one.
    decisive = find_decisive((incident, *incident.events))
    return incident if decisive is incident else replace(incident, **asdict(decisive))


class EndFollower:
    """Finds the end of a run by processing one sample after another.

    `incident` gives the time of the event to look for. Without an incident, the event is the last
    exit, or a stall at the end. `reported_bytes` is the operator's figure for the engine's memory
    on each GPU.
    """

    def __init__(
        self, incident: Incident | None = None, *, reported_bytes: int | None = None
    ) -> None:
        self.ending: Ending | None = None
        """The end and its evidence, or None until a sample shows an end."""
        self.replay = LeakReplay(reported_bytes=reported_bytes)
        """The leak detector, and the engine's runs."""
        self.is_page_lost = False
        """Whether the page responded earlier but not in the newest sample."""
        self._incident = incident
        self._has_answered = False
        self._leaks: dict[str, tuple[LeakState, Moment | None]] = {}

    def step(self, snapshot: Snapshot) -> Snapshot:
        """Add a sample; return the sample with the engine's state."""
        previous = self.replay.engine
        # As in the daemon, update the engine's run before the leak detector judges the sample.
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
        # A page that stops responding is also an end. No sample has to show an exit.
        self.is_page_lost = self._has_answered and snapshot.page is None
        return snapshot

    def _build_due(
        self, incident: Incident, snapshot: Snapshot, previous: EngineMemory
    ) -> Ending | None:
        """Return the incident's event.

        Returns None if this sample was not taken at the event's time. If there is no sample at that
        time, the first later sample is used.
        """
        late_seconds = snapshot.time_seconds - incident.t
        is_due = abs(late_seconds) <= SAME_EVENT_SECONDS
        # The record may not contain the sample of the event itself.
        is_overdue = self.ending is None and late_seconds > 0
        if not is_due and not is_overdue:
            return None
        status = snapshot.engine_status
        # The run that exited is in the previous sample. The current sample may already show the
        # next run.
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
        """Store the leak detector's newest verdict on each GPU, for use when the run ends."""
        status = snapshot.engine_status
        # Verdicts on an earlier run do not apply to the next run.
        if status is not None and (status.exit_reason or not self.replay.engine.record.gpus):
            self._leaks = {}
        if not snapshot.is_in_service:
            return
        for _, uuid, course in self.replay.gpus:
            if course.state is not LeakState.UNKNOWN:
                self._leaks[uuid] = (course.state, course.newest)

    def _add_leak(self, gpu: GpuAtEnd) -> GpuAtEnd:
        """Return the GPU with the leak detector's verdict from this run.

        Without a verdict, the leak state is unknown.
        """
        state, moment = self._leaks.get(gpu.uuid, (LeakState.UNKNOWN, None))
        bytes_per_request = None if moment is None else moment.bytes_per_request
        return replace(gpu, leak=state, leak_bytes_per_request=bytes_per_request)


def judge_end(end: Ending | None, *, has_ended: bool = False) -> tuple[Diagnosis, ...]:
    """Return one or more causes that match an end, most certain first.

    Without an end, the cause is "unknown" if `has_ended` is set, or "nothing" if not.
    """
    if end is not None:
        return judge_ending(end)
    return (UNKNOWN_CAUSE,) if has_ended else (NO_END,)


def build_report(postmortem: Postmortem) -> Report:
    """Return the report on a post-mortem.

    The report's exit status is always 0, because a post-mortem neither passes nor fails.
    """
    headline = _describe(postmortem.answer)
    if postmortem.ending is not None:
        headline = f"{format_instant(postmortem.ending.seconds)}: {headline}"
    return Report(
        verdict=_conclude(postmortem.answer),
        headline=headline,
        findings=[
            Finding(
                diagnosis.cause,
                _conclude(diagnosis),
                _describe(diagnosis),
                tuple(step for step, _ in _find_steps(postmortem, diagnosis.cause)),
            )
            for diagnosis in postmortem.findings
        ],
        data=_build_data(postmortem),
        lines=_render_text(postmortem, headline),
        exit_status=0,
    )


def _describe(diagnosis: Diagnosis) -> str:
    return f"{diagnosis.sentence} ({diagnosis.sureness})"


def _conclude(diagnosis: Diagnosis) -> Conclusion:
    """Return "good" if nothing ended, "cannot tell" for an unknown cause, otherwise "not good"."""
    if diagnosis.cause is EndCause.NOTHING:
        return Conclusion.GOOD
    if diagnosis.cause is EndCause.UNKNOWN:
        return Conclusion.CANNOT_TELL
    return Conclusion.NOT_GOOD


def _render_text(postmortem: Postmortem, headline: str) -> Iterator[str]:
    """Yield the lines: the most certain finding, its evidence, other findings, the sections."""
    evidence = chain(*(wrap_headed("seen", sentence) for sentence in postmortem.answer.evidence))
    other_findings = chain(
        *(wrap_headed("or", _describe(diagnosis)) for diagnosis in postmortem.findings[1:])
    )
    sections = [
        _render_section(title, lines) for title, lines in list_sections(postmortem, TEXT_LOG_LINES)
    ]
    answer = (*wrap_text("", headline, indent=2), *evidence)
    yield from join_paragraphs((answer, other_findings, *sections))


def _render_section(title: str, lines: list[Line]) -> list[str]:
    """Return a section as text, with its title.

    Returns an empty list if there are no lines.
    """
    if not lines:
        return []
    # The texts of a section are aligned in one column.
    columns = max(len(name) for name, _ in lines)
    section = [title]
    for name, text in lines:
        section += wrap_text(f"  {name:<{columns}}  ", text) if name else [f"  {text}"]
    return section


def list_sections(postmortem: Postmortem, most_log_lines: int) -> Iterator[tuple[str, list[Line]]]:
    """Yield each section's title and lines; a section may have no lines.

    The sections contain at most `most_log_lines` lines of the log.
    """
    incident = postmortem.incident
    ending = postmortem.ending
    verdicts = incident.before.verdicts[-MOST_SHOWN_ENTRIES:]
    yield "The sidecar's verdicts then", [("", verdict.sentence) for verdict in verdicts]
    yield (
        "Timeline",
        [(format_instant(seconds), change) for seconds, change in postmortem.timeline],
    )
    yield "The engine's log, its last minute", list(_list_log(postmortem))
    yield "torch's allocator at the OutOfMemoryError", list(_list_snapshots(incident))
    yield "Numbers for a bug report", list(list_numbers(ending, incident))
    yield "What to do", _list_steps(postmortem)
    yield "The sidecar's log then", [("", line) for line in incident.log[-most_log_lines:]]
    situation = postmortem.situation
    yield "Situation", [] if situation is None else [("", situation.replace("_", " "))]


def _list_log(postmortem: Postmortem) -> Iterator[Line]:
    """Yield the last minute of the engine's log, or the reason why it is empty.

    Yields nothing if there is no log.
    """
    if postmortem.log is None:
        return
    if postmortem.log_start is None:
        reason = "it may be of another time or engine"
        yield "", f"it has no line within two minutes of the exit: {reason}"
        return
    yield from list_log_lines(postmortem.log_start)
    ending = postmortem.ending
    if ending is not None and ending.log is None:
        yield "", "its last line is too old to be the last before the exit: it proves nothing"


def _list_snapshots(incident: Incident) -> Iterator[Line]:
    """Yield each snapshot's file, and the code lines with the most memory."""
    for snapshot in incident.snapshots[-MOST_LISTED_HOLDERS:]:
        file = f"{snapshot.file} of pid {snapshot.pid}, for memory_viz"
        if snapshot.size is not None:
            file += f", {format_size(snapshot.size)}"
        if snapshot.problem is not None:
            file = f"{snapshot.file} was not written: {snapshot.problem}"
        yield "snapshot", file
        for held in snapshot.largest[:MOST_SNAPSHOT_LINES]:
            yield "held", held.describe()


def _find_steps(postmortem: Postmortem, cause: EndCause) -> tuple[tuple[str, str | None], ...]:
    return list_steps(cause, postmortem.ending, postmortem.pod)


def _list_steps(postmortem: Postmortem) -> list[Line]:
    """Return the steps for the most certain cause in order, with their links."""
    steps = []
    name = "first"
    for step, link in _find_steps(postmortem, postmortem.answer.cause):
        steps.append((name, step if link is None else f"{step}: {link}"))
        name = "then"
    return steps


def list_numbers(end: Ending | None, incident: Incident) -> Iterator[Line]:
    """Yield the name and text of each known figure of an end.

    Yields nothing if there is no end.
    """
    if end is None:
        return
    yield end.kind.value, format_instant(end.seconds)
    if end.reason is not None:
        yield "counted as", end.reason.value
    if end.observed_seconds:
        observed = f"seen for {format_duration(end.observed_seconds)}"
        if end.began_seconds is not None:
            observed = f"began {format_instant(end.began_seconds)}, {observed}"
        yield "this run", observed
    for engine in end.engines:
        figures = ", ".join(_list_engine_figures(engine))
        yield f"{engine.model_name} / {engine.engine}", figures or "no figures"
    for gpu in end.gpus:
        yield gpu.display_name, ", ".join(_list_gpu_figures(gpu))
    for holder in incident.before.holders[-MOST_LISTED_HOLDERS:]:
        yield "held by", f"{holder.uuid} pid {holder.pid} {format_amount(holder.used)}"
    # Limit the number of lines: an engine with many ranks would fill the page.
    yield from islice(_list_torch_memory(incident), MOST_LISTED_HOLDERS)
    for growth in incident.before.mappings[-MOST_LISTED_HOLDERS:]:
        yield "host growth", _describe_growth(growth)
    if incident.engine_pod is not None:
        pod = incident.engine_pod
        yield "pod", f"{pod.namespace}/{pod.pod}, container {pod.container}"
    if incident.version is not None:
        yield "vllm-headroom", incident.version


def _list_engine_figures(engine: EngineReading) -> Iterator[str]:
    """Describe each known figure on an engine's last metrics page."""
    kv_used_percent = None
    if engine.kv_used_ratio is not None:
        kv_used_percent = 100 * engine.kv_used_ratio
    figures = (
        ("{:,.0f} running", engine.running),
        ("{:,.0f} waiting", engine.waiting),
        ("{:,.0f} finished", engine.finished_total),
        ("{:,.0f} preemptions", engine.preemptions_total),
        ("KV cache {:.0f} % used", kv_used_percent),
        ("of {:,.0f} tokens", engine.kv_capacity_tokens),
        ("gpu_memory_utilization {:.3g}", engine.gpu_memory_utilization_ratio),
    )
    for text, value in figures:
        if value is not None:
            yield text.format(value)


def _list_gpu_figures(gpu: GpuAtEnd) -> Iterator[str]:
    """Describe each known figure of a GPU, and the leak detector's state."""
    figures = (
        (gpu.total_bytes, "in all"),
        (gpu.last_room_bytes, "left at worst"),
        (gpu.first_room_bytes, "left at first"),
        (gpu.last_engine_bytes, "held by the engine"),
        (gpu.growth_bytes, "more than at first"),
        (gpu.last_other_bytes, "held by others"),
    )
    for n_bytes, text in figures:
        if n_bytes is not None:
            yield f"{format_size(max(0, n_bytes))} {text}"
    yield f"leak detector: {gpu.leak}"


def _list_torch_memory(incident: Incident) -> Iterator[Line]:
    """Yield torch's memory on each GPU, for each process with the probe."""
    for process in incident.before.probe:
        for device in process.devices:
            sizes = ", ".join(_list_torch_sizes(device))
            yield "held by torch", f"{device.uuid} pid {process.pid} {process.role}: {sizes}"


def _list_torch_sizes(device: TorchMemory) -> Iterator[str]:
    if device.allocated_bytes is not None:
        yield f"allocated {format_size(device.allocated_bytes)}"
    if device.reserved_bytes is not None:
        yield f"reserved {format_size(device.reserved_bytes)}"


def _describe_growth(growth: MappingGrowth) -> str:
    """Describe which kinds of mappings grew in a process and, if known, for how long."""
    kinds = ", ".join(f"{format_size(n_bytes)} in {kind}" for kind, n_bytes in growth.kinds.items())
    duration = ""
    if growth.since is not None and growth.t is not None:
        duration = f" in {format_duration(max(0, growth.t - growth.since))}"
    return f"{growth.role or 'process'} pid {growth.pid}{duration}: {kinds or 'no kind of mapping'}"


def _build_data(postmortem: Postmortem) -> dict[str, Any]:
    """Return the document that `--json` prints."""
    end = postmortem.ending
    incident = postmortem.incident
    event: dict[str, Any] = {"t": None, "what": None, "reason": None}
    if end is not None:
        event = {"t": end.seconds, "what": end.kind, "reason": end.reason}
    answer, *other_findings = [_build_finding(diagnosis) for diagnosis in postmortem.findings]
    return {
        "file": postmortem.file,
        **event,
        **answer,
        "situation": postmortem.situation,
        "also": other_findings,
        "timeline": [{"t": seconds, "text": change} for seconds, change in postmortem.timeline],
        # If several figures have the same name, `numbers` contains only the last; `known` contains
        # all.
        "numbers": dict(list_numbers(end, incident)),
        "todo": [
            {"text": step, "link": link}
            for step, link in _find_steps(postmortem, postmortem.answer.cause)
        ],
        "log": [{"time": time, "text": text} for time, text in _list_log(postmortem)],
        "known": None if incident is NO_INCIDENT else to_builtins(incident),
    }


def _build_finding(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return one finding for the JSON document."""
    return {
        "cause": diagnosis.cause,
        "sure": diagnosis.sureness,
        "sentence": diagnosis.sentence,
        "evidence": list(diagnosis.evidence),
    }
