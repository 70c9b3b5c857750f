"""A post-mortem for people, and for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from vllm_headroom.commands.postmortem.facts import Facts
from vllm_headroom.commands.postmortem.finding import TODO, Finding
from vllm_headroom.commands.postmortem.known import Known, log_lines, sentences
from vllm_headroom.commands.postmortem.numbers import numbers
from vllm_headroom.commands.postmortem.timeline import Moment
from vllm_headroom.commands.terminal import HEAD, headed, paragraphs, wrapped
from vllm_headroom.trace.curves import Curves
from vllm_headroom.units import instant

LAST_LINES: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found in a file, the surest first, and what shows it."""

    file: str
    findings: tuple[Finding, ...]
    facts: Facts | None
    known: Known
    timeline: tuple[Moment, ...]
    curves: Curves

    @property
    def answer(self) -> Finding:
        """What it was, as far as can be told."""
        return self.findings[0]


def text(report: Report) -> Iterator[str]:
    """Yield one page."""
    yield from paragraphs(
        (
            _answer(report),
            _also(report),
            _said(report),
            _timeline(report),
            _numbers(report),
            _todo(report),
            _log(report),
        )
    )


def _answer(report: Report) -> Iterator[str]:
    when = "" if report.facts is None else f"{instant(report.facts.seconds)}: "
    yield from wrapped(when, f"{report.answer.sentence} ({report.answer.sureness})", indent=2)
    for evidence in report.answer.evidence:
        yield from headed("seen", evidence)


def _also(report: Report) -> Iterator[str]:
    for finding in report.findings[1:]:
        yield from headed("or", f"{finding.sentence} ({finding.sureness})")


def _said(report: Report) -> Iterator[str]:
    for sentence in sentences(report.known):
        yield from headed("said", f"{sentence} (the sidecar, before)")


def _timeline(report: Report) -> Iterator[str]:
    if report.timeline:
        yield "Timeline"
    yield from (f"  {instant(seconds)}  {what}" for seconds, what in report.timeline)


def _numbers(report: Report) -> Iterator[str]:
    if report.facts is None:
        return
    yield "Numbers for a bug report"
    for name, value in numbers(report.facts, report.known):
        yield from wrapped(f"  {name:<20} ", value)


def _todo(report: Report) -> Iterator[str]:
    for place, (what, link) in enumerate(TODO[report.answer.cause]):
        yield from headed("then" if place else "first", what)
        if link is not None:
            yield f"{'':<{HEAD}}{link}"


def _log(report: Report) -> Iterator[str]:
    if lines := log_lines(report.known)[-LAST_LINES:]:
        yield "The sidecar's log then"
        yield from (f"  {each}" for each in lines)


def document(report: Report) -> dict[str, Any]:
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


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "cause": finding.cause,
        "sure": finding.sureness,
        "sentence": finding.sentence,
        "evidence": list(finding.evidence),
    }
