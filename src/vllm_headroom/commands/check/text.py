"""Judgements as a table for people, as JSON, and as a build shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final
from xml.etree import ElementTree as ET

from vllm_headroom.commands.check.judgement import Judgement, overall
from vllm_headroom.commands.check.record import Record
from vllm_headroom.commands.conclusion import Conclusion
from vllm_headroom.commands.terminal import wrapped
from vllm_headroom.units import duration

MARKS: Final = {Conclusion.GOOD: "passed", Conclusion.NOT_GOOD: "FAILED", Conclusion.CANNOT_TELL: "cannot tell"}
OUTCOMES: Final = {Conclusion.GOOD: "passed", Conclusion.NOT_GOOD: "failed", Conclusion.CANNOT_TELL: "cannot_tell"}
"""The words of --json."""

HEADS: Final = ("", "limit", "of", "found", "at most", "baseline")
INDENT: Final = " " * 13
"""The width of the marks: a reason stands below the limit's name."""


def told(judgements: Sequence[Judgement]) -> str:
    """Return the sum in a line."""
    verdict = overall(judgements)
    counts = {each: sum(judgement.verdict is each for judgement in judgements) for each in Conclusion}
    if verdict is Conclusion.GOOD:
        return f"Passed: all {len(judgements)} limits kept."
    failed, unknown = counts[Conclusion.NOT_GOOD], counts[Conclusion.CANNOT_TELL]
    if verdict is Conclusion.CANNOT_TELL:
        return f"Cannot tell: {unknown} of {len(judgements)} limits cannot be judged, {counts[Conclusion.GOOD]} kept."
    also = f", {unknown} cannot be judged" if unknown else ""
    return f"FAILED: {failed} of {len(judgements)} limits exceeded{also}."


def table(traces: Sequence[tuple[str, Record]], judgements: Sequence[Judgement]) -> list[str]:
    """Return what each trace is, a row for each judgement with its reason below it, and the sum."""
    rows: list[tuple[str, ...]] = [HEADS]
    rows += [(MARKS[each.verdict], each.limit, each.of, *each.words) for each in judgements]
    rows = rows if any(row[-1] for row in rows[1:]) else [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    shown = [lines[0]]
    for judgement, line in zip(judgements, lines[1:], strict=True):
        shown += [line, *wrapped(INDENT, judgement.why)]
    heads = [f"{name}: {_extent(record)}" for name, record in traces]
    return [*heads, "", *shown, "", told(judgements)]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    widths = (len(INDENT) - 2, *widths[1:])
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _extent(record: Record) -> str:
    done = record.finished.total
    requests = "requests unknown" if done is None else f"{done:,.0f} requests finished"
    return f"{record.samples:,} samples over {duration(record.span_seconds)}, {requests}"


def document(traces: Sequence[tuple[str, Record]], judgements: Sequence[Judgement]) -> dict[str, Any]:
    """Return what --json prints; None is what is unknown, or was not given."""
    (trace, *others) = [_summary(name, record) for name, record in traces]
    return {
        "outcome": OUTCOMES[overall(judgements)],
        "trace": trace,
        "baseline": others[0] if others else None,
        "limits": [_judged(judgement) for judgement in judgements],
    }


def _summary(name: str, record: Record) -> dict[str, Any]:
    return {
        "file": name,
        "samples": record.samples,
        "span_seconds": record.span_seconds,
        "requests_finished": record.finished.total,
        "engine_restarts": record.restarts,
    }


def _judged(judgement: Judgement) -> dict[str, Any]:
    return {
        "limit": judgement.limit,
        "of": judgement.of or None,
        "outcome": OUTCOMES[judgement.verdict],
        "unit": judgement.unit,
        "value": judgement.value,
        "most": judgement.most,
        "least": judgement.least,
        "baseline": judgement.baseline,
        "why": judgement.why or None,
    }


LEVELS: Final = {Conclusion.NOT_GOOD: "error", Conclusion.CANNOT_TELL: "warning"}
SUITE: Final = "vllm-headroom check"
HEAD: Final = '<?xml version="1.0" encoding="utf-8"?>'
CLASS: Final = "vllm_headroom.commands.check"
ELEMENTS: Final = {Conclusion.NOT_GOOD: "failure", Conclusion.CANNOT_TELL: "error"}
"""What cannot be told is an error: a skipped test would count as good."""


def report(judgements: Sequence[Judgement]) -> str:
    """Return a suite with a test for each judgement."""
    return _suite([_case(each.name, ELEMENTS.get(each.verdict), message(each), each.why) for each in judgements])


def broken(why: str) -> str:
    """Return a suite with one error: a report of an earlier build must not be left in its place."""
    return _suite([_case("trace", ELEMENTS[Conclusion.CANNOT_TELL], why, "")])


def message(judgement: Judgement) -> str:
    """Return what was found and what is allowed, in a line."""
    found, allowed, before = judgement.words
    at_most = f", at most {allowed}" if allowed else ""
    baseline = f", baseline {before}" if before else ""
    return f"{judgement.name}: {found}{at_most}{baseline}"


def _suite(cases: Sequence[ET.Element]) -> str:
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(case.find("failure") is not None for case in cases)),
        "errors": str(sum(case.find("error") is not None for case in cases)),
    }
    root = ET.Element("testsuites", counts)
    suite = ET.SubElement(root, "testsuite", {"name": SUITE, **counts, "skipped": "0"})
    suite.extend(cases)
    ET.indent(root)
    return f"{HEAD}\n{ET.tostring(root, encoding='unicode')}\n"


def _case(name: str, element: str | None, text: str, why: str) -> ET.Element:
    """Return a test: `text` is its message where it has not passed, and its output where it has."""
    case = ET.Element("testcase", {"classname": CLASS, "name": name})
    if element is None:
        ET.SubElement(case, "system-out").text = f"{text}\n{why}".rstrip()
    else:
        ET.SubElement(case, element, {"message": text}).text = why or text
    return case


def commands(judgements: Sequence[Judgement]) -> Iterator[str]:
    """Yield an error for each limit that is exceeded, a warning for each that cannot be judged, else one notice.

    GitHub shows ten of a kind and step, so what is kept has one together.
    """
    for judgement in judgements:
        if level := LEVELS.get(judgement.verdict):
            why = f" ({judgement.why})" if judgement.why else ""
            yield _annotation(level, f"{message(judgement)}{why}")
    if overall(judgements) is Conclusion.GOOD:
        yield _annotation("notice", told(judgements))


def _annotation(level: str, text: str) -> str:
    """Return a workflow command; its text is escaped as GitHub's own toolkit does (actions/toolkit, command.ts)."""
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{level} title={SUITE}::{escaped}"
