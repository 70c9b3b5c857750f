"""What --json prints of the findings, and the same as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from vllm_headroom.commands.doctor.fixes import Check, State
from vllm_headroom.commands.terminal import wrapped

Found = Mapping[str, Any]
"""A part of what --json prints."""

MARKS: Final = {State.OK: "ok", State.MISSING: "MISSING", State.UNKNOWN: "unknown", State.NOT_APPLICABLE: "-"}
INDENT: Final = " " * 9
"""The width of the marks: what follows stands below the name."""


def document(findings: Mapping[str, Check], version: str) -> dict[str, Any]:
    """Return what --json prints of the findings by name; `ok` is null where it is not known or does not apply."""
    checks = [_check(name, finding) for name, finding in findings.items()]
    is_all = all(check["state"] in {State.OK, State.NOT_APPLICABLE} for check in checks)
    return {"ok": is_all, "version": version, "checks": checks}


def _check(name: str, finding: Check) -> dict[str, Any]:
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


def text(found: Found) -> list[str]:
    """Return a line for each check with its mark, what else there is to say below it, and the sum."""
    lines = [line for check in found["checks"] for line in _lines(check)]
    return [*lines, *(("",) if lines[-1] else ()), _sum(found)]


def _lines(check: Found) -> Iterator[str]:
    told = check["found"] or check["missing"] or check["reason"]
    yield from wrapped(f"{MARKS[check['state']]:<8} {check['name']:<16} ", told)
    for detail in check["details"]:
        yield from wrapped(f"{INDENT}  ", detail)
    if check["absent"]:
        yield from wrapped(f"{INDENT}absent   ", ", ".join(check["absent"]))
    for index, fix in enumerate(check["fix"]):
        yield from wrapped(f"{INDENT}{'or' if index else 'fix':<8} ", f"{fix['where']}:")
        yield from (f"{INDENT}{'':<8}   {line}" for line in fix["lines"])
    if check["absent"] or check["fix"]:
        yield ""


def _sum(found: Found) -> str:
    if found["ok"]:
        return "Everything is available."
    states = [check["state"] for check in found["checks"]]
    return f"{states.count(State.MISSING)} missing and {states.count(State.UNKNOWN)} unknown, of {len(states)}."
