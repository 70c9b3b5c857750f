"""A post-mortem as text, JSON and HTML."""

import re
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, Final

from msgspec import Struct, to_builtins

from vllm_headroom.expose import drawing
from vllm_headroom.expose.assets import PAGE_STYLE
from vllm_headroom.expose.drawing import Frame, Point, escape_text
from vllm_headroom.model import (
    Diagnosis,
    Ending,
    EngineReading,
    GpuAtEnd,
    GpuReading,
    Snapshot,
    name_device,
)
from vllm_headroom.trace.incident import MOST_SHOWN, Incident, format_amount
from vllm_headroom.units import GIB, format_duration, format_instant, format_size
from vllm_headroom.vocabulary import (
    EndCause,
    EngineState,
    IncidentKind,
    LeakState,
    Level,
    Situation,
    Sureness,
)
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report
from vllm_headroom_tools.history import Curves, LeakReplay
from vllm_headroom_tools.terminal import join_paragraphs, wrap_headed, wrap_text

CONSERVE: Final = "https://docs.vllm.ai/en/latest/configuration/conserving_memory.html"
TROUBLE: Final = "https://docs.vllm.ai/en/latest/usage/troubleshooting.html"
REPORT: Final = "https://github.com/vllm-project/vllm/issues/new/choose"
XIDS: Final = "https://docs.nvidia.com/deploy/xid-errors/index.html"
OOM: Final = "https://kubernetes.io/docs/concepts/configuration/manage-resources-containers/"
LOGS: Final = "Read vLLM's log up to the end: kubectl logs --previous"

TODO: Final[dict[EndCause, tuple[tuple[str, str | None], ...]]] = {
    EndCause.LEAK: (
        ("No option fixes a leak: restart before the GPU is full, and upgrade vLLM", None),
        ("Report it to vLLM, with the figures above", REPORT),
        (
            "Have HeadroomOutOfMemorySoon page somebody next time (alerts/runbooks/HeadroomOutOfMemorySoon.md)",
            None,
        ),
    ),
    EndCause.BURST: (
        ("Lower --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs", CONSERVE),
        ("`vllm-headroom advise` on this file computes the values", None),
    ),
    EndCause.NEIGHBOUR: (
        ("Give the engine a dedicated GPU, or move the other process away", None),
        ("Until then leave room for it: a lower --gpu-memory-utilization", CONSERVE),
    ),
    EndCause.KILLED: (
        ("Raise the memory limit of vLLM's container, or lower what it keeps on the host", OOM),
        ("Find out what was killed: dmesg -T | grep -i 'killed process'", None),
    ),
    EndCause.NEVER_FITTED: (
        ("Run `vllm-headroom preflight` and `vllm-headroom plan` before the next start", None),
        (
            "Lower --gpu-memory-utilization where others hold memory, else raise --tensor-parallel-size",
            CONSERVE,
        ),
    ),
    EndCause.HANG: (
        ("Take a stack of every process before the restart: py-spy dump --pid PID", TROUBLE),
        ("Look for an XID and for NCCL in the logs", XIDS),
    ),
    EndCause.CRASH: (
        (LOGS, TROUBLE),
        ("Look for an XID in the kernel's log: dmesg -T | grep -i xid", XIDS),
    ),
    EndCause.STOPPED: (
        (
            "Running requests were cut off: drain the engine first, or give vLLM --shutdown-timeout",
            None,
        ),
    ),
    EndCause.IDLE: (
        ("Nothing, if it was planned: see kubectl get events", None),
        ("Look at its exit code (kubectl describe pod): 0 or 143 is a stop, 137 a kill", None),
    ),
    EndCause.UNKNOWN: ((LOGS, TROUBLE),),
    EndCause.NOTHING: (),
}
"""What to do, each with a link or None."""

SITUATIONS: Final = {
    EndCause.LEAK: Situation.LEAKING,
    EndCause.BURST: Situation.LOW_MEMORY,
    EndCause.NEIGHBOUR: Situation.NEIGHBOUR,
    EndCause.KILLED: Situation.LOW_MEMORY,
    EndCause.HANG: Situation.STALLED,
    EndCause.NOTHING: None,
}
"""The situation that a cause is (docs/situations.md): that the engine is down, where it is no other."""

NO_INCIDENT: Final = Incident(t=0.0, what=IncidentKind.ENDED)
"""The facts beside the samples of a trace that is no incident."""

MOST: Final = 40
"""Enough for a person; the newest stay."""

STATES: Final = {
    EngineState.UNKNOWN: "the state of the engine is not known",
    EngineState.DOWN: "the engine is down",
    EngineState.STARTING: "the engine is starting",
    EngineState.SERVING: "the engine serves",
    EngineState.STALLED: "the engine is stalled: no progress",
    EngineState.ASLEEP: "the engine sleeps",
}


class Timeline:
    """The changes of the engine's state, of its leak states and of the memory of others."""

    def __init__(self) -> None:
        self._moments: deque[tuple[float, str]] = deque(maxlen=MOST)
        self._state: EngineState | None = None
        self._leaks: dict[str, LeakState] = {}
        self._others: dict[str, int] = {}

    def step(self, snapshot: Snapshot, watch: LeakReplay) -> None:
        """Add the changes of a sample."""
        now, engine_status = snapshot.time_seconds, snapshot.engine_status
        if engine_status is not None:
            if engine_status.ended is not None:
                self._moments.append((now, "the engine exited"))
            if engine_status.state is not self._state:
                first = "the record begins: " if self._state is None else ""
                self._moments.append((now, f"{first}{STATES[engine_status.state]}"))
            self._state = engine_status.state
        for index, uuid, course in watch.gpus:
            if (
                course.state in (LeakState.GROWING, LeakState.LEAKING)
                and self._leaks.get(uuid) is not course.state
            ):
                verb = "leaks" if course.state is LeakState.LEAKING else "may leak"
                self._moments.append((now, f"by this record {name_device(index, uuid)} {verb}"))
            self._leaks[uuid] = course.state
        for gpu in snapshot.owned_gpus:
            if gpu.other_bytes is not None:
                self._add_neighbour(now, gpu.reading, gpu.other_bytes)

    def list_entries(self, known: Incident) -> tuple[tuple[float, str], ...]:
        """Return the entries, with the XIDs of the incident."""
        xids = [
            (each.t, f"the driver reported XID {each.xid} on {each.uuid}") for each in known.xids
        ]
        return tuple(sorted((*self._moments, *xids[-MOST_SHOWN:])))

    def _add_neighbour(self, now: float, gpu: GpuReading, other_bytes: int) -> None:
        before = self._others.setdefault(gpu.uuid, other_bytes)
        if abs(other_bytes - before) >= GIB:
            text = f"others hold {format_size(other_bytes)} of {gpu.display_name}, {format_size(before)} before"
            self._moments.append((now, text))
            self._others[gpu.uuid] = other_bytes


MOST_HOLDERS: Final = 16
LAST_LINES: Final = 10
Line = tuple[str, str]
"""A name and its text."""


def list_numbers(end: Ending, known: Incident) -> Iterator[Line]:
    """Yield the names and values that are known."""
    yield end.kind.value, format_instant(end.seconds)
    if end.reason is not None:
        yield "counted as", end.reason.value
    if end.observed_seconds:
        began = "" if end.began_seconds is None else f"began {format_instant(end.began_seconds)}, "
        yield "this run", f"{began}seen for {format_duration(end.observed_seconds)}"
    for engine in end.engines:
        yield (
            f"{engine.model_name} / {engine.engine}",
            ", ".join(_describe_engine(engine)) or "no figures",
        )
    for gpu in end.gpus:
        yield gpu.display_name, ", ".join(_describe_gpu(gpu))
    for holder in known.before.holders[-MOST_HOLDERS:]:
        yield "held by", f"{holder.uuid} pid {holder.pid} {format_amount(holder.used)}"
    devices = ((process, each) for process in known.before.probe for each in process.devices)
    for process, each in islice(devices, MOST_HOLDERS):
        sizes = (("allocated", each.allocated_bytes), ("reserved", each.reserved_bytes))
        held = ", ".join(
            f"{word} {format_size(n_bytes)}" for word, n_bytes in sizes if n_bytes is not None
        )
        yield "held by torch", f"{each.uuid} pid {process.pid} {process.role}: {held}"
    yield from _list_grown(known)
    if known.version is not None:
        yield "vllm-headroom", known.version


def _list_grown(known: Incident) -> Iterator[Line]:
    for each in known.before.mappings[-MOST_HOLDERS:]:
        kinds = ", ".join(
            f"{format_size(n_bytes)} in {kind}" for kind, n_bytes in each.kinds.items()
        )
        taken = (
            ""
            if each.since is None or each.t is None
            else f" in {format_duration(max(0, each.t - each.since))}"
        )
        yield (
            "host growth",
            f"{each.role or 'process'} pid {each.pid}{taken}: {kinds or 'no kind of mapping'}",
        )


def _describe_engine(engine: EngineReading) -> Iterator[str]:
    figures = (
        ("{:,.0f} running", engine.running),
        ("{:,.0f} waiting", engine.waiting),
        ("{:,.0f} finished", engine.finished_total),
        ("{:,.0f} preemptions", engine.preemptions_total),
        ("KV cache {:.0f} % used", engine.kv_used_ratio and 100 * engine.kv_used_ratio),
        ("of {:,.0f} tokens", engine.kv_capacity_tokens),
        ("gpu_memory_utilization {:.3g}", engine.gpu_memory_utilization_ratio),
    )
    yield from (text.format(value) for text, value in figures if value is not None)


def _describe_gpu(gpu: GpuAtEnd) -> Iterator[str]:
    known = (
        ("in all", gpu.total_bytes),
        ("left at worst", gpu.last_room_bytes),
        ("left at first", gpu.first_room_bytes),
        ("held by the engine", gpu.last_engine_bytes),
        ("more than at first", gpu.growth_bytes),
        ("held by others", gpu.last_other_bytes),
    )
    yield from (
        f"{format_size(max(0, n_bytes))} {word}" for word, n_bytes in known if n_bytes is not None
    )
    yield f"leak detector: {gpu.leak}"


class Postmortem(Struct, frozen=True, kw_only=True):
    """The findings in a file, the surest first, and their evidence; `known` are the facts beside the samples."""

    file: str
    findings: tuple[Diagnosis, ...]
    ending: Ending | None
    incident: Incident
    timeline: tuple[tuple[float, str], ...]
    curves: Curves

    @property
    def answer(self) -> Diagnosis:
        """The surest finding."""
        return self.findings[0]


def build_report(found: Postmortem) -> Report:
    """Return the report on one end; it does not judge, so its exit status is 0."""
    when = "" if found.ending is None else f"{format_instant(found.ending.seconds)}: "
    headline = f"{when}{_describe(found.answer)}"
    return Report(
        verdict=_conclude(found.answer),
        headline=headline,
        findings=[
            Finding(
                each.cause,
                _conclude(each),
                _describe(each),
                tuple(what for what, _ in TODO[each.cause]),
            )
            for each in found.findings
        ],
        data=_build_data(found),
        lines=_render_text(found, headline),
        exit_status=0,
    )


def _describe(found: Diagnosis) -> str:
    return f"{found.sentence} ({found.sureness})"


def _conclude(found: Diagnosis) -> Conclusion:
    if found.cause is EndCause.NOTHING:
        return Conclusion.GOOD
    return Conclusion.CANNOT_TELL if found.cause is EndCause.UNKNOWN else Conclusion.NOT_GOOD


def _render_text(report: Postmortem, headline: str) -> Iterator[str]:
    seen = (line for each in report.answer.evidence for line in wrap_headed("seen", each))
    also = (line for each in report.findings[1:] for line in wrap_headed("or", _describe(each)))
    sections = []
    for title, lines in list_sections(report, LAST_LINES):
        columns = max((len(head) for head, _ in lines), default=0)
        shown = [
            wrap_text(f"  {head:<{columns}}  ", body) if head else [f"  {body}"]
            for head, body in lines
        ]
        sections.append([title, *chain(*shown)] if lines else [])
    yield from join_paragraphs(((*wrap_text("", headline, indent=2), *seen), also, *sections))


def list_sections(report: Postmortem, most_log_lines: int) -> Iterator[tuple[str, list[Line]]]:
    """Yield headings and their lines, possibly none."""
    yield (
        "The sidecar's verdicts then",
        [("", each.sentence) for each in report.incident.before.verdicts[-MOST_SHOWN:]],
    )
    yield "Timeline", [(format_instant(seconds), what) for seconds, what in report.timeline]
    yield (
        "Numbers for a bug report",
        [] if report.ending is None else [*list_numbers(report.ending, report.incident)],
    )
    steps = enumerate(TODO[report.answer.cause])
    yield (
        "What to do",
        [("then" if place else "first", ": ".join(filter(None, step))) for place, step in steps],
    )
    yield "The sidecar's log then", [("", each) for each in report.incident.log[-most_log_lines:]]
    situation = SITUATIONS.get(report.answer.cause, Situation.DOWN)
    yield "Situation", [] if situation is None else [("", situation.replace("_", " "))]


def _build_data(report: Postmortem) -> dict[str, Any]:
    end = report.ending
    answer, *also = (
        {
            "cause": each.cause,
            "sure": each.sureness,
            "sentence": each.sentence,
            "evidence": list(each.evidence),
        }
        for each in report.findings
    )
    return {
        "file": report.file,
        "t": None if end is None else end.seconds,
        "what": None if end is None else end.kind,
        "reason": None if end is None else end.reason,
        **answer,
        "situation": SITUATIONS.get(report.answer.cause, Situation.DOWN),
        "also": also,
        "timeline": [{"t": seconds, "text": what} for seconds, what in report.timeline],
        "numbers": {} if end is None else dict(list_numbers(end, report.incident)),
        "todo": [{"text": what, "link": link} for what, link in TODO[report.answer.cause]],
        "known": None if report.incident is NO_INCIDENT else to_builtins(report.incident),
    }


COLUMNS: Final = 480
_LINK: Final = re.compile(
    "|".join({re.escape(link) for steps in TODO.values() for _, link in steps if link})
)
"""Only our links work: text from a file never becomes a link."""

LEVELS: Final = {
    Sureness.SURE: Level.ALARM,
    Sureness.LIKELY: Level.WARNING,
    Sureness.POSSIBLE: Level.UNKNOWN,
}


def build_page(report: Postmortem) -> str:
    """Build the HTML page."""
    title = f"Post-mortem: {report.answer.sentence}"
    when = "" if report.ending is None else format_instant(report.ending.seconds)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape_text(title)}</title><style>{PAGE_STYLE}</style></head><body>"
        f"<header><h1>Post-mortem</h1><p class=dim>{when} {escape_text(report.file)}</p></header><main>"
        f"{''.join(_build_body(report))}</main></body></html>\n"
    )


def _build_body(report: Postmortem) -> Iterator[str]:
    yield "<ul class=verdicts>"
    for finding in report.findings:
        yield (
            f"<li class={LEVELS[finding.sureness]}><b>{finding.sureness.upper()}</b> {escape_text(finding.sentence)}"
            f"<ul>{''.join(f'<li>{escape_text(each)}</li>' for each in finding.evidence)}</ul></li>"
        )
    yield "</ul>"
    yield from _draw_figures(report)
    for title, lines in list_sections(report, MOST_SHOWN):
        items = "".join(
            f"<li><b>{escape_text(head)}</b> {escape_text(body)}</li>" for head, body in lines
        )
        links = _LINK.sub(r'<a href="\g<0>">\g<0></a>', items)
        yield f"<h2>{escape_text(title)}</h2><ul>{links}</ul>" if items else ""


def _draw_figures(report: Postmortem) -> Iterator[str]:
    at = None if report.ending is None else report.ending.seconds
    gpus = {} if report.ending is None else {gpu.uuid: gpu for gpu in report.ending.gpus}
    used = report.incident.before.used
    for uuid in report.curves.uuids:
        gpu = gpus.get(uuid)
        what = f"Free memory of {uuid if gpu is None else gpu.display_name}"
        yield _draw_figure(f"{what}, down to zero", report.curves.of("free", uuid), at, sized=True)
        if gpu is not None and gpu.usable_bytes is not None:
            free: list[Point] = [
                (seconds, gpu.usable_bytes - n_bytes) for seconds, n_bytes in used.get(uuid, ())
            ]
            yield _draw_figure(
                f"{what} in the last minutes, second by second", free, at, sized=True
            )
    yield _draw_figure("Running requests", report.curves.of("running"), at, sized=False)


def _draw_figure(title: str, points: list[Point], at: float | None, *, sized: bool) -> str:
    known = [
        value
        for seconds, value in points
        if value is not None and (at is None or not sized or seconds <= at)
    ]
    if not known:
        return ""
    times = [seconds for seconds, _ in points]
    frame = Frame(
        begin=min(times), end=max(times), top=drawing.find_top(known) if sized else max(known)
    )
    stretches = drawing.thin_curve(drawing.build_curve(points), COLUMNS)
    shapes = (
        drawing.draw_curve(frame, stretches),
        "" if at is None else drawing.draw_mark(frame, at),
        drawing.draw_zero(frame) if sized else "",
    )
    top = format_size(frame.top) if sized else f"{frame.top:.0f}"
    return (
        f"<figure><figcaption>{escape_text(title)}; the upright line is the end</figcaption><i>{top}</i>"
        f"{drawing.draw_picture(frame, shapes, title=title)}"
        f"<div"
        f" class=axis><span>{format_instant(frame.begin)}</span><span>{format_instant(frame.end)}</span></div></figure>"
    )
