"""Judgements as a build shows them: JUnit XML for GitLab, Jenkins and others, annotations for GitHub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final
from xml.etree import ElementTree as ET

from vllm_headroom.commands.check.judgement import Judgement, overall
from vllm_headroom.commands.check.text import told
from vllm_headroom.commands.verdict import Verdict

LEVELS: Final = {Verdict.NOT_GOOD: "error", Verdict.CANNOT_TELL: "warning"}
SUITE: Final = "vllm-headroom check"
HEAD: Final = '<?xml version="1.0" encoding="utf-8"?>'
CLASS: Final = "vllm_headroom.commands.check"
ELEMENTS: Final = {Verdict.NOT_GOOD: "failure", Verdict.CANNOT_TELL: "error"}
"""What cannot be told is an error: a skipped test would count as good."""


def report(judgements: Sequence[Judgement]) -> bytes:
    """Return a suite with a test for each judgement."""
    return _suite([_case(each.name, ELEMENTS.get(each.verdict), message(each), each.why) for each in judgements])


def broken(why: str) -> bytes:
    """Return a suite with one error: a report of an earlier build must not be left in its place."""
    return _suite([_case("trace", ELEMENTS[Verdict.CANNOT_TELL], why, "")])


def message(judgement: Judgement) -> str:
    """Return what was found and what is allowed, in a line."""
    found, allowed, before = judgement.words
    at_most = f", at most {allowed}" if allowed else ""
    baseline = f", baseline {before}" if before else ""
    return f"{judgement.name}: {found}{at_most}{baseline}"


def _suite(cases: Sequence[ET.Element]) -> bytes:
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(case.find("failure") is not None for case in cases)),
        "errors": str(sum(case.find("error") is not None for case in cases)),
    }
    root = ET.Element("testsuites", counts)
    suite = ET.SubElement(root, "testsuite", {"name": SUITE, **counts, "skipped": "0"})
    suite.extend(cases)
    ET.indent(root)
    return f"{HEAD}\n{ET.tostring(root, encoding='unicode')}\n".encode()


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
    if overall(judgements) is Verdict.GOOD:
        yield _annotation("notice", told(judgements))


def _annotation(level: str, text: str) -> str:
    """Return a workflow command; its text is escaped as GitHub's own toolkit does (actions/toolkit, command.ts)."""
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{level} title={SUITE}::{escaped}"
