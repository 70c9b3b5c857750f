"""A post-mortem as text, JSON and HTML."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from msgspec import Struct

from vllm_headroom.expose import drawing
from vllm_headroom.expose.drawing import Frame, Point, escape_text
from vllm_headroom.expose.page import PAGE_STYLE
from vllm_headroom.model import EngineReading, GpuReading, Snapshot, name_device
from vllm_headroom.trace.parse import YEAR_10000
from vllm_headroom.units import GIB, format_duration, format_instant, format_size
from vllm_headroom.vocabulary import EngineState, LeakState, Level
from vllm_headroom_tools.history import Curves, LeakReplay
from vllm_headroom_tools.postmortem.facts import (
    MOST_SHOWN,
    Circumstances,
    GpuAtEnd,
    Header,
    list_holders,
    list_torch_memory,
    read_log_lines,
    read_records,
    read_sentences,
    read_used,
)
from vllm_headroom_tools.postmortem.rules import TODO, Diagnosis, Sureness
from vllm_headroom_tools.terminal import join_paragraphs, wrap_headed, wrap_text

MOST: Final = 40
"""Enough for a person; the newest stay."""

TimelineEntry = tuple[float, str]

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
        self._moments: deque[TimelineEntry] = deque(maxlen=MOST)
        self._state: EngineState | None = None
        self._leaks: dict[str, LeakState] = {}
        self._others: dict[str, int] = {}

    def step(self, snapshot: Snapshot, watch: LeakReplay) -> None:
        """Add the changes of a sample."""
        now, life = snapshot.time_seconds, snapshot.life
        if life is not None:
            if life.ended is not None:
                self._moments.append((now, "the engine exited"))
            if life.state is not self._state:
                first = "the record begins: " if self._state is None else ""
                self._moments.append((now, f"{first}{STATES[life.state]}"))
            self._state = life.state
        for index, uuid, course in watch.gpus:
            if course.state in (LeakState.GROWING, LeakState.LEAKING) and self._leaks.get(uuid) is not course.state:
                verb = "leaks" if course.state is LeakState.LEAKING else "may leak"
                self._moments.append((now, f"by this record {name_device(index, uuid)} {verb}"))
            self._leaks[uuid] = course.state
        for gpu in snapshot.owned:
            if gpu.other_bytes is not None:
                self._add_neighbour(now, gpu.reading, gpu.other_bytes)

    def list_entries(self, header: Header) -> tuple[TimelineEntry, ...]:
        """Return the entries, with the XIDs of the header."""
        xids = [
            (float(each["t"]), f"the driver reported XID {each.get('xid')} on {each.get('uuid')}")
            for each in read_records(header, "xids")
            if isinstance(each.get("t"), int | float) and 0 <= each["t"] < YEAR_10000
        ]
        return tuple(sorted((*self._moments, *xids)))

    def _add_neighbour(self, now: float, gpu: GpuReading, other_bytes: int) -> None:
        before = self._others.setdefault(gpu.uuid, other_bytes)
        if abs(other_bytes - before) >= GIB:
            self._moments.append(
                (now, f"others hold {format_size(other_bytes)} of {gpu.called}, {format_size(before)} before")
            )
            self._others[gpu.uuid] = other_bytes


MOST_HOLDERS: Final = 16
LAST_LINES: Final = 10
Line = tuple[str, str]
"""A name and its text."""


def list_numbers(facts: Circumstances, header: Header) -> Iterator[Line]:
    """Yield the names and values that are known."""
    yield facts.what.value, format_instant(facts.seconds)
    if facts.reason is not None:
        yield "counted as", facts.reason.value
    if facts.seen_seconds:
        began = "" if facts.began_seconds is None else f"began {format_instant(facts.began_seconds)}, "
        yield "this run", f"{began}seen for {format_duration(facts.seen_seconds)}"
    for engine in facts.engines:
        yield f"{engine.model_name} / {engine.engine}", ", ".join(_describe_engine(engine)) or "no figures"
    for gpu in facts.gpus:
        yield gpu.called, ", ".join(_describe_gpu(gpu))
    yield from (("held by", each) for each in islice(list_holders(header), MOST_HOLDERS))
    yield from (("held by torch", each) for each in islice(list_torch_memory(header), MOST_HOLDERS))
    if isinstance(header.get("version"), str):
        yield "vllm-headroom", header["version"]


def _describe_engine(engine: EngineReading) -> Iterator[str]:
    counted = (
        ("running", engine.running),
        ("waiting", engine.waiting),
        ("finished", engine.finished_total),
        ("preemptions", engine.preemptions_total),
    )
    yield from (f"{value:,.0f} {word}" for word, value in counted if value is not None)
    if engine.kv_used_ratio is not None:
        yield f"KV cache {100 * engine.kv_used_ratio:.0f} % used"
    if engine.kv_capacity_tokens is not None:
        yield f"of {engine.kv_capacity_tokens:,.0f} tokens"
    if engine.gpu_memory_utilization_ratio is not None:
        yield f"gpu_memory_utilization {engine.gpu_memory_utilization_ratio:.3g}"


def _describe_gpu(gpu: GpuAtEnd) -> Iterator[str]:
    known = (
        ("in all", gpu.total_bytes),
        ("left at worst", gpu.last_room_bytes),
        ("left at first", gpu.first_room_bytes),
        ("held by the engine", gpu.last_engine_bytes),
        ("more than at first", gpu.grown_bytes),
        ("held by others", gpu.last_other_bytes),
    )
    yield from (f"{format_size(max(0, n_bytes))} {word}" for word, n_bytes in known if n_bytes is not None)
    yield f"leak detector: {gpu.leak}"


class Postmortem(Struct, frozen=True, kw_only=True):
    """The findings in a file, the surest first, and their evidence."""

    file: str
    findings: tuple[Diagnosis, ...]
    facts: Circumstances | None
    header: Header
    timeline: tuple[TimelineEntry, ...]
    curves: Curves

    @property
    def answer(self) -> Diagnosis:
        """The surest finding."""
        return self.findings[0]


def render_text(report: Postmortem) -> Iterator[str]:
    """Yield the lines of one page."""
    also = (line for each in report.findings[1:] for line in wrap_headed("or", f"{each.sentence} ({each.sureness})"))
    yield from join_paragraphs(
        (_format_answer(report), also, *(_format_section(*each) for each in list_sections(report, LAST_LINES)))
    )


def list_sections(report: Postmortem, most_log_lines: int) -> Iterator[tuple[str, list[Line]]]:
    """Yield headings and their lines, possibly none."""
    yield "The sidecar's verdicts then", [("", each) for each in read_sentences(report.header)]
    yield "Timeline", [(format_instant(seconds), what) for seconds, what in report.timeline]
    yield "Numbers for a bug report", [] if report.facts is None else [*list_numbers(report.facts, report.header)]
    steps = enumerate(TODO[report.answer.cause])
    yield "What to do", [("then" if place else "first", ": ".join(filter(None, step))) for place, step in steps]
    yield "The sidecar's log then", [("", each) for each in read_log_lines(report.header)[-most_log_lines:]]


def _format_section(title: str, lines: list[Line]) -> Iterator[str]:
    if lines:
        yield title
    columns = max((len(head) for head, _ in lines), default=0)
    for head, body in lines:
        yield from wrap_text(f"  {head:<{columns}}  ", body) if head else (f"  {body}",)


def _format_answer(report: Postmortem) -> Iterator[str]:
    when = "" if report.facts is None else f"{format_instant(report.facts.seconds)}: "
    yield from wrap_text(when, f"{report.answer.sentence} ({report.answer.sureness})", indent=2)
    for evidence in report.answer.evidence:
        yield from wrap_headed("seen", evidence)


def build_document(report: Postmortem) -> dict[str, Any]:
    """Build the object of --json."""
    facts = report.facts
    return {
        "file": report.file,
        "t": None if facts is None else facts.seconds,
        "what": None if facts is None else facts.what,
        "reason": None if facts is None else facts.reason,
        **_build_finding(report.answer),
        "also": [_build_finding(each) for each in report.findings[1:]],
        "timeline": [{"t": seconds, "text": what} for seconds, what in report.timeline],
        "numbers": {} if facts is None else dict(list_numbers(facts, report.header)),
        "todo": [{"text": what, "link": link} for what, link in TODO[report.answer.cause]],
        "known": report.header or None,
    }


def _build_finding(finding: Diagnosis) -> dict[str, Any]:
    return {
        "cause": finding.cause,
        "sure": finding.sureness,
        "sentence": finding.sentence,
        "evidence": list(finding.evidence),
    }


COLUMNS: Final = 480
_LINK: Final = re.compile("|".join({re.escape(link) for steps in TODO.values() for _, link in steps if link}))
"""Only our links work: text from a file never becomes a link."""

LEVELS: Final = {Sureness.SURE: Level.ALARM, Sureness.LIKELY: Level.WARNING, Sureness.POSSIBLE: Level.UNKNOWN}


def build_page(report: Postmortem) -> str:
    """Build the HTML page."""
    title = f"Post-mortem: {report.answer.sentence}"
    when = "" if report.facts is None else format_instant(report.facts.seconds)
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
        items = "".join(f"<li><b>{escape_text(head)}</b> {escape_text(body)}</li>" for head, body in lines)
        links = _LINK.sub(r'<a href="\g<0>">\g<0></a>', items)
        yield f"<h2>{escape_text(title)}</h2><ul>{links}</ul>" if items else ""


def _draw_figures(report: Postmortem) -> Iterator[str]:
    at = None if report.facts is None else report.facts.seconds
    gpus = {} if report.facts is None else {gpu.uuid: gpu for gpu in report.facts.gpus}
    used = read_used(report.header)
    for uuid in report.curves.uuids:
        gpu = gpus.get(uuid)
        what = f"Free memory of {uuid if gpu is None else gpu.called}"
        yield _draw_figure(f"{what}, down to zero", report.curves.free(uuid), at, sized=True)
        if gpu is not None and gpu.usable_bytes is not None:
            free: list[Point] = [(seconds, gpu.usable_bytes - n_bytes) for seconds, n_bytes in used.get(uuid, ())]
            yield _draw_figure(f"{what} in the last minutes, second by second", free, at, sized=True)
    yield _draw_figure("Running requests", report.curves.running, at, sized=False)


def _draw_figure(title: str, points: list[Point], at: float | None, *, sized: bool) -> str:
    known = [value for seconds, value in points if value is not None and (at is None or not sized or seconds <= at)]
    if not known:
        return ""
    times = [seconds for seconds, _ in points]
    frame = Frame(begin=min(times), end=max(times), top=drawing.find_top(known) if sized else max(known))
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
