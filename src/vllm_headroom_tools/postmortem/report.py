"""A post-mortem for people, and for scripts, with the figures that a bug report needs."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from msgspec import Struct

from vllm_headroom.expose import drawing
from vllm_headroom.expose.drawing import Frame, Point, escaped
from vllm_headroom.expose.page import PAGE_STYLE
from vllm_headroom.model import EngineReading, GpuReading, Snapshot, called
from vllm_headroom.trace.parse import YEAR_10000
from vllm_headroom.units import GIB, duration, instant, size
from vllm_headroom.vocabulary import EngineState, LeakState, Level
from vllm_headroom_tools.history.curves import Curves
from vllm_headroom_tools.history.replay import Watch
from vllm_headroom_tools.postmortem.facts import (
    MOST_SHOWN,
    Circumstances,
    GpuAtEnd,
    Known,
    header_used,
    holders,
    log_lines,
    probed,
    records,
    sentences,
)
from vllm_headroom_tools.postmortem.rules import TODO, Diagnosis, Sureness
from vllm_headroom_tools.terminal import headed, paragraphs, wrapped

MOST: Final = 40
"""What a person reads; the newest stay."""

Moment = tuple[float, str]

STATES: Final = {
    EngineState.UNKNOWN: "the engine may be up or down, that is not known",
    EngineState.DOWN: "the engine is down",
    EngineState.STARTING: "the engine is starting",
    EngineState.SERVING: "the engine serves",
    EngineState.STALLED: "the engine is stalled: nothing moves",
    EngineState.ASLEEP: "the engine sleeps",
}


class Timeline:
    """Notes what the engine did, what the leak detector said, and when others came to its GPUs."""

    def __init__(self) -> None:
        self._moments: deque[Moment] = deque(maxlen=MOST)
        self._state: EngineState | None = None
        self._leaks: dict[str, LeakState] = {}
        self._others: dict[str, int] = {}

    def step(self, snapshot: Snapshot, watch: Watch) -> None:
        """Take note of the next sample, with what is known of the engine's life and of its leaks then."""
        now, life = snapshot.time_seconds, snapshot.life
        if life is not None:
            if life.ended is not None:
                self._moments.append((now, "a life of the engine ended"))
            if life.state is not self._state:
                first = "the record begins: " if self._state is None else ""
                self._moments.append((now, f"{first}{STATES[life.state]}"))
            self._state = life.state
        for index, uuid, course in watch.gpus:
            if course.state in (LeakState.GROWING, LeakState.LEAKING) and self._leaks.get(uuid) is not course.state:
                verb = "leaks" if course.state is LeakState.LEAKING else "may leak"
                self._moments.append((now, f"by this record {called(index, uuid)} {verb}"))
            self._leaks[uuid] = course.state
        for gpu in snapshot.owned:
            if gpu.other_bytes is not None:
                self._neighbour(now, gpu.reading, gpu.other_bytes)

    def moments(self, known: Known) -> tuple[Moment, ...]:
        """Return what happened, and among it the XIDs that the header tells of."""
        xids = [
            (float(each["t"]), f"the driver reported XID {each.get('xid')} on {each.get('uuid')}")
            for each in records(known, "xids")
            if isinstance(each.get("t"), int | float) and 0 <= each["t"] < YEAR_10000
        ]
        return tuple(sorted((*self._moments, *xids)))

    def _neighbour(self, now: float, gpu: GpuReading, other_bytes: int) -> None:
        before = self._others.setdefault(gpu.uuid, other_bytes)
        if abs(other_bytes - before) >= GIB:
            self._moments.append((now, f"others hold {size(other_bytes)} of {gpu.called}, {size(before)} before"))
            self._others[gpu.uuid] = other_bytes


MOST_HOLDERS: Final = 16
LAST_LINES: Final = 10
Line = tuple[str, str]
"""What stands on the left, and what is said of it."""


def numbers(facts: Circumstances, known: Known) -> Iterator[Line]:
    """Yield names and values, without what is not known."""
    yield facts.what.value, instant(facts.seconds)
    if facts.reason is not None:
        yield "counted as", facts.reason.value
    if facts.seen_seconds:
        began = "" if facts.began_seconds is None else f"began {instant(facts.began_seconds)}, "
        yield "this life", f"{began}seen for {duration(facts.seen_seconds)}"
    for engine in facts.engines:
        yield f"{engine.model_name} / {engine.engine}", ", ".join(_engine(engine)) or "says nothing of itself"
    for gpu in facts.gpus:
        yield gpu.called, ", ".join(_gpu(gpu))
    yield from (("held by", each) for each in islice(holders(known), MOST_HOLDERS))
    yield from (("held by torch", each) for each in islice(probed(known), MOST_HOLDERS))
    if isinstance(known.get("version"), str):
        yield "vllm-headroom", known["version"]


def _engine(engine: EngineReading) -> Iterator[str]:
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


def _gpu(gpu: GpuAtEnd) -> Iterator[str]:
    known = (
        ("in all", gpu.total_bytes),
        ("left at the least", gpu.last_room_bytes),
        ("left at first", gpu.first_room_bytes),
        ("held by the engine", gpu.last_engine_bytes),
        ("more than at first", gpu.grown_bytes),
        ("held by others", gpu.last_other_bytes),
    )
    yield from (f"{size(max(0, n_bytes))} {word}" for word, n_bytes in known if n_bytes is not None)
    yield f"leak detector: {gpu.leak}"


class Postmortem(Struct, frozen=True, kw_only=True):
    """What was found in a file, the surest first, and what shows it."""

    file: str
    findings: tuple[Diagnosis, ...]
    facts: Circumstances | None
    known: Known
    timeline: tuple[Moment, ...]
    curves: Curves

    @property
    def answer(self) -> Diagnosis:
        """What it was, as far as can be told."""
        return self.findings[0]


def text(report: Postmortem) -> Iterator[str]:
    """Yield one page."""
    also = (line for each in report.findings[1:] for line in headed("or", f"{each.sentence} ({each.sureness})"))
    yield from paragraphs((_answer(report), also, *(_section(*each) for each in sections(report, LAST_LINES))))


def sections(report: Postmortem, most_log_lines: int) -> Iterator[tuple[str, list[Line]]]:
    """Yield headings and what is known under each, which may be nothing."""
    yield "The sidecar said then", [("", each) for each in sentences(report.known)]
    yield "Timeline", [(instant(seconds), what) for seconds, what in report.timeline]
    yield "Numbers for a bug report", [] if report.facts is None else [*numbers(report.facts, report.known)]
    steps = enumerate(TODO[report.answer.cause])
    yield "What to do", [("then" if place else "first", ": ".join(filter(None, step))) for place, step in steps]
    yield "The sidecar's log then", [("", each) for each in log_lines(report.known)[-most_log_lines:]]


def _section(title: str, lines: list[Line]) -> Iterator[str]:
    if lines:
        yield title
    columns = max((len(head) for head, _ in lines), default=0)
    for head, body in lines:
        yield from wrapped(f"  {head:<{columns}}  ", body) if head else (f"  {body}",)


def _answer(report: Postmortem) -> Iterator[str]:
    when = "" if report.facts is None else f"{instant(report.facts.seconds)}: "
    yield from wrapped(when, f"{report.answer.sentence} ({report.answer.sureness})", indent=2)
    for evidence in report.answer.evidence:
        yield from headed("seen", evidence)


def document(report: Postmortem) -> dict[str, Any]:
    """Return the one object of --json."""
    facts = report.facts
    return {
        "file": report.file,
        "t": None if facts is None else facts.seconds,
        "what": None if facts is None else facts.what,
        "reason": None if facts is None else facts.reason,
        **_finding(report.answer),
        "also": [_finding(each) for each in report.findings[1:]],
        "timeline": [{"t": seconds, "text": what} for seconds, what in report.timeline],
        "numbers": {} if facts is None else dict(numbers(facts, report.known)),
        "todo": [{"text": what, "link": link} for what, link in TODO[report.answer.cause]],
        "known": report.known or None,
    }


def _finding(finding: Diagnosis) -> dict[str, Any]:
    return {
        "cause": finding.cause,
        "sure": finding.sureness,
        "sentence": finding.sentence,
        "evidence": list(finding.evidence),
    }


COLUMNS: Final = 480
_LINK: Final = re.compile("|".join({re.escape(link) for steps in TODO.values() for _, link in steps if link}))
"""Our own: what a file has from anywhere leads nowhere."""

LEVELS: Final = {Sureness.SURE: Level.ALARM, Sureness.LIKELY: Level.WARNING, Sureness.POSSIBLE: Level.UNKNOWN}


def page(report: Postmortem) -> str:
    """Return the page."""
    title = f"Post-mortem: {report.answer.sentence}"
    when = "" if report.facts is None else instant(report.facts.seconds)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escaped(title)}</title><style>{PAGE_STYLE}</style></head><body>"
        f"<header><h1>Post-mortem</h1><p class=dim>{when} {escaped(report.file)}</p></header><main>"
        f"{''.join(_body(report))}</main></body></html>\n"
    )


def _body(report: Postmortem) -> Iterator[str]:
    yield "<ul class=verdicts>"
    for finding in report.findings:
        yield (
            f"<li class={LEVELS[finding.sureness]}><b>{finding.sureness.upper()}</b> {escaped(finding.sentence)}"
            f"<ul>{''.join(f'<li>{escaped(each)}</li>' for each in finding.evidence)}</ul></li>"
        )
    yield "</ul>"
    yield from _figures(report)
    for title, lines in sections(report, MOST_SHOWN):
        items = (f"<b>{escaped(head)}</b> {escaped(body)}" for head, body in lines)
        yield _list(title, [_LINK.sub(r'<a href="\g<0>">\g<0></a>', item) for item in items])


def _figures(report: Postmortem) -> Iterator[str]:
    at = None if report.facts is None else report.facts.seconds
    gpus = {} if report.facts is None else {gpu.uuid: gpu for gpu in report.facts.gpus}
    used = header_used(report.known)
    for uuid in report.curves.uuids:
        gpu = gpus.get(uuid)
        what = f"Free memory of {uuid if gpu is None else gpu.called}"
        yield _figure(f"{what}, down to zero", report.curves.free(uuid), at, sized=True)
        if gpu is not None and gpu.usable_bytes is not None:
            free: list[Point] = [(seconds, gpu.usable_bytes - n_bytes) for seconds, n_bytes in used.get(uuid, ())]
            yield _figure(f"{what} in the last minutes, second by second", free, at, sized=True)
    yield _figure("Running requests", report.curves.running, at, sized=False)


def _figure(title: str, points: list[Point], at: float | None, *, sized: bool) -> str:
    known = [value for seconds, value in points if value is not None and (at is None or not sized or seconds <= at)]
    if not known:
        return ""
    times = [seconds for seconds, _ in points]
    frame = Frame(begin=min(times), end=max(times), top=drawing.scale(known) if sized else max(known))
    stretches = drawing.thinned(drawing.through(points), COLUMNS)
    shapes = (
        drawing.curve(frame, stretches),
        "" if at is None else drawing.upright(frame, at),
        drawing.zero(frame) if sized else "",
    )
    top = size(frame.top) if sized else f"{frame.top:.0f}"
    return (
        f"<figure><figcaption>{escaped(title)}; the upright line is the end</figcaption><i>{top}</i>"
        f"{drawing.picture(frame, shapes, title=title)}"
        f"<div class=axis><span>{instant(frame.begin)}</span><span>{instant(frame.end)}</span></div></figure>"
    )


def _list(title: str, items: list[str]) -> str:
    lines = "".join(f"<li>{each}</li>" for each in items)
    return f"<h2>{escaped(title)}</h2><ul>{lines}</ul>" if items else ""
