"""Findings as text for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from vllm_headroom.commands.doctor.finding import Finding, Fix, State, all_available
from vllm_headroom.commands.text import wrapped

MARKS: Final = {State.OK: "ok", State.MISSING: "MISSING", State.UNKNOWN: "unknown", State.NOT_APPLICABLE: "-"}
Findings = Mapping[str, Finding]
"""By the name of what was looked at, in the order in which it is told."""

INDENT: Final = " " * 9
"""The width of the marks: what follows stands below the name."""


def text(findings: Findings) -> list[str]:
    """Return a line for each finding with its mark, what else there is to say below it, and the sum."""
    lines = [line for name, finding in findings.items() for line in _lines(name, finding)]
    return [*lines, *(("",) if lines[-1] else ()), _sum(findings)]


def document(findings: Findings, version: str) -> dict[str, Any]:
    """Return what --json prints; `ok` is null where it is not known or does not apply."""
    return {
        "ok": all_available(findings.values()),
        "version": version,
        "checks": [_check(name, finding) for name, finding in findings.items()],
    }


def _check(name: str, finding: Finding) -> dict[str, Any]:
    state = finding.state
    return {
        "name": name,
        "state": state,
        "ok": {State.OK: True, State.MISSING: False}.get(state),
        "found": finding.text if state is State.OK else None,
        "missing": finding.text if state is State.MISSING else None,
        "reason": finding.text if state in {State.UNKNOWN, State.NOT_APPLICABLE} else None,
        "details": list(finding.details),
        "absent": list(finding.absent),
        "fix": [{"where": fix.where, "lines": list(fix.lines)} for fix in finding.fixes],
    }


def _lines(name: str, finding: Finding) -> Iterator[str]:
    yield from wrapped(f"{MARKS[finding.state]:<8} {name:<16} ", finding.text)
    for detail in finding.details:
        yield from wrapped(f"{INDENT}  ", detail)
    if finding.absent:
        yield from wrapped(f"{INDENT}absent   ", ", ".join(finding.absent))
    for index, fix in enumerate(finding.fixes):
        yield from _fix(fix, "or" if index else "fix")
    if finding.absent or finding.fixes:
        yield ""


def _fix(fix: Fix, word: str) -> Iterator[str]:
    yield from wrapped(f"{INDENT}{word:<8} ", f"{fix.where}:")
    yield from (f"{INDENT}{'':<8}   {line}" for line in fix.lines)


def _sum(findings: Findings) -> str:
    if all_available(findings.values()):
        return "Everything is available."
    states = [finding.state for finding in findings.values()]
    return f"{states.count(State.MISSING)} missing and {states.count(State.UNKNOWN)} unknown, of {len(states)}."
