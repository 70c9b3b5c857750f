"""A post-mortem for people, and for scripts, with the figures that a bug report needs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from msgspec import Struct

from vllm_headroom.commands.postmortem.facts import Circumstances, GpuAtEnd
from vllm_headroom.commands.postmortem.finding import TODO, Diagnosis
from vllm_headroom.commands.postmortem.known import Known, holders, log_lines, probed, sentences
from vllm_headroom.commands.postmortem.timeline import Moment
from vllm_headroom.commands.terminal import headed, paragraphs, wrapped
from vllm_headroom.model import EngineReading
from vllm_headroom.trace.curves import Curves
from vllm_headroom.units import duration, instant, size

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
