"""Judgements as JUnit XML, which GitLab, Jenkins and others show beside a build."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from xml.etree import ElementTree as ET

from vllm_headroom.commands.check.judgement import Judgement, Outcome

SUITE: Final = "vllm-headroom check"
HEAD: Final = '<?xml version="1.0" encoding="utf-8"?>'
CLASS: Final = "vllm_headroom.commands.check"
ELEMENTS: Final = {Outcome.FAILED: "failure", Outcome.CANNOT_TELL: "error"}
"""What cannot be told is an error: a skipped test would count as good."""


def report(judgements: Sequence[Judgement]) -> bytes:
    """Return a suite with a test for each judgement."""
    return _suite([_case(each.name, ELEMENTS.get(each.outcome), message(each), each.why) for each in judgements])


def broken(why: str) -> bytes:
    """Return a suite with one error: a report of an earlier build must not be left in its place."""
    return _suite([_case("trace", ELEMENTS[Outcome.CANNOT_TELL], why, "")])


def message(judgement: Judgement) -> str:
    """Return what was found and what is allowed, in a line."""
    allowed = f", at most {judgement.allowed}" if judgement.allowed else ""
    before = f", baseline {judgement.before}" if judgement.before is not None else ""
    return f"{judgement.name}: {judgement.found}{allowed}{before}"


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
