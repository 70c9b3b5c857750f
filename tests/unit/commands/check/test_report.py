"""What CI reads: JUnit XML, annotations, a table, JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

import pytest

from tests.command import read_data
from tests.unit.commands.check.checking import check
from vllm_headroom_tools.check.judgement import Judgement, Unit
from vllm_headroom_tools.check.report import build_junit, format_annotations
from vllm_headroom_tools.conclusion import Conclusion

ATTRIBUTES: Final = {
    "testsuites": {"name", "time", "tests", "failures", "disabled", "errors"},
    "testsuite": {
        *("name", "tests", "failures", "errors", "time", "disabled", "skipped", "timestamp", "hostname"),
        *("id", "package"),
    },
    "testcase": {"name", "assertions", "time", "classname", "status"},
    "failure": {"type", "message"},
    "error": {"type", "message"},
    "system-out": set(),
}
"""Of jenkins-junit.xsd, the strictest of those in use that know <testsuites>."""

CHILDREN: Final = {
    "testsuites": {"testsuite"},
    "testsuite": {"properties", "testcase", "system-out", "system-err"},
    "testcase": {"skipped", "error", "failure", "system-out", "system-err"},
}

OUTCOMES: Final = {0: None, 1: "failure", 2: "error"}


def well_formed(xml: str | bytes) -> ET.Element:
    """Return the one suite of a report that is in the shape of the schema, its counts right."""
    root = ET.fromstring(xml)  # noqa: S314 - our own
    assert root.tag == "testsuites"
    for element in root.iter():
        assert set(element.keys()) <= ATTRIBUTES[element.tag]
        assert {child.tag for child in element} <= CHILDREN.get(element.tag, set())
    (suite,) = root
    cases = suite.findall("testcase")
    assert int(suite.get("tests", "")) == len(cases) > 0
    assert int(suite.get("failures", "")) == len(suite.findall("testcase/failure"))
    assert int(suite.get("errors", "")) == len(suite.findall("testcase/error"))
    assert all(case.get("name") and case.get("classname") for case in cases)
    assert len({case.get("name") for case in cases}) == len(cases)
    return suite


def judgement(verdict: Conclusion, *, why: str = "", value_text: str = "2 GB") -> Judgement:
    return Judgement(
        limit="memory",
        subject="GPU 0",
        verdict=verdict,
        unit=Unit.BYTES,
        value=2e9,
        highest_allowed=1e9,
        value_text=value_text,
        bound_text="1 GB",
        baseline_text="0.5 GB",
        reason=why,
    )


@pytest.mark.parametrize(("trace", "status"), [("steady", 0), ("leaking", 1), ("short", 2)])
def test_the_junit_report_has_a_test_for_each_judgement(
    trace: str, status: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    file = tmp_path / "report.xml"
    words = ("--trace", request.getfixturevalue(trace), "--max-leak-per-thousand-requests", "1MB", "--junit", str(file))
    process = check(*words)
    suite = well_formed(file.read_bytes())
    (leak,) = (case for case in suite if case.get("name") == "leak per thousand requests, GPU 0")

    assert process.returncode == status
    assert [child.tag for child in leak] == [OUTCOMES[status] or "system-out"]
    assert (leak[0].text or "") in " ".join(process.stdout.split()) or status == 0


def test_a_failure_says_what_was_found_what_is_allowed_and_what_was_before() -> None:
    (case,) = well_formed(build_junit((judgement(Conclusion.NOT_GOOD, why="at the highest <&>"),)))

    assert case[0].get("message") == "memory, GPU 0: 2 GB, at most 1 GB, baseline 0.5 GB"
    assert case[0].text == "at the highest <&>"


@pytest.mark.parametrize(
    ("unit", "value", "words"),
    [
        (Unit.RATIO, 0.05, "+5.00%"),
        (Unit.TOKENS, 1e6, "1,000,000 tokens"),
        (Unit.COUNT, 0.25, "0.25"),
        (Unit.COUNT, 1234.0, "1,234"),
        (Unit.COUNT, None, "unknown"),
    ],
)
def test_a_figure_is_said_in_its_unit(unit: Unit, value: float | None, words: str) -> None:
    assert Judgement(limit="x", verdict=Conclusion.GOOD, unit=unit, value=value).texts == (words, "", "")


def test_a_trace_that_cannot_be_read_leaves_no_older_report(tmp_path: Path) -> None:
    file, trace = tmp_path / "report.xml", tmp_path / "trace"
    file.write_text("all is well")
    trace.write_text("no trace\n")
    words = ("--trace", str(trace), "--max-leak-per-thousand-requests", "1MB", "--junit", str(file))
    process = check(*words)
    (case,) = well_formed(file.read_bytes())

    assert process.returncode == 2
    assert case[0].tag == "error"
    assert process.stderr == f"vllm-headroom check: {case[0].get('message')}\n"


def test_the_annotations_of_a_failure(leaking: str) -> None:
    words = ("--max-leak-per-thousand-requests", "1MB", "--max-bytes-per-request", "1GB", "--max-discrepancy", "3%")
    process = check("--trace", leaking, *words, "--format", "github")
    table, _, annotations = process.stdout.partition("limits exceeded, 1 cannot be judged.\n")

    assert process.returncode == 1
    assert table.startswith(f"{leaking}: 1,800 samples")
    assert annotations == (
        "::error title=vllm-headroom check::leak per thousand requests, GPU 0: 12.2 MiB, at most 977 KiB"
        " (the detector's alarm; 95 %25: 11.3 MiB to 13.1 MiB, 1.83 GiB in all)\n"
        "::warning title=vllm-headroom check::discrepancy, GPU 0: unknown, at most 3%25"
        " (the trace does not contain the engine's budget: give --gpu-memory-utilization or --reported-bytes)\n"
        "::error title=vllm-headroom check::bytes per running request, GPU 0: 1.74 GiB at 40 running, at most 954 MiB"
        " (69.4 GiB held at this load)\n"
    )


def test_the_annotation_of_a_pass(steady: str) -> None:
    process = check("--trace", steady, "--max-leak-per-thousand-requests", "1MB", "--format", "github")

    assert process.returncode == 0
    assert process.stdout.splitlines()[-1] == "::notice title=vllm-headroom check::Passed: all 2 limits kept."


def test_an_annotation_is_one_line_whatever_it_says() -> None:
    (line,) = format_annotations((judgement(Conclusion.CANNOT_TELL, why="50%\r\n::error::x"),))

    assert line == (
        "::warning title=vllm-headroom check::memory, GPU 0: 2 GB, at most 1 GB, baseline 0.5 GB"
        " (50%25%0D%0A::error::x)"
    )


def test_the_table(steady: str) -> None:
    process = check(
        *("--trace", steady, "--max-leak-per-thousand-requests", "100kB", "--max-bytes-per-request", "1.5GB"),
        *("--max-preemptions-per-thousand-requests", "0"),
    )

    assert process.returncode == 1
    assert process.stdout.splitlines() == [
        f"{steady}: 1,800 samples over 2 h 29 min, 179,900 requests finished",
        "",
        "             limit                              of     found                   at most",
        "passed       engine restarts                           0                       0",
        "cannot tell  leak per thousand requests         GPU 0  none seen               97.7 KiB",
        f"{' ' * 13}one at the limit would not have been seen in 2 h 29 min and 179,900 requests, only one of 781 KiB",
        "             or more: record about 8 times as many",
        "FAILED       bytes per running request          GPU 0  1.71 GiB at 40 running  1.4 GiB",
        "             68.4 GiB held at this load",
        "passed       preemptions per thousand requests         0                       0",
        "             0 in all, of 179,900 requests",
        "",
        "FAILED: 1 of 4 limits exceeded, 1 cannot be judged.",
    ]


def test_json_has_the_figures(steady: str, short: str) -> None:
    words = ("--trace", steady, "--baseline", short, "--max-bytes-per-request", "2GB", "--json")
    data = read_data(check(*words).stdout)

    assert data["outcome"] == "passed"
    assert data["trace"] == {
        "file": steady,
        "samples": 1800,
        "span_seconds": 8995.0,
        "requests_finished": 179_900.0,
        "engine_restarts": 0,
    }
    assert data["baseline"]["samples"] == 60
    assert data["limits"][1] == {
        "limit": "bytes per running request",
        "of": "GPU 0",
        "outcome": "passed",
        "unit": "bytes",
        "value": 1835008000.0,
        "most": 2_000_000_000,
        "least": None,
        "baseline": None,
        "why": "68.4 GiB held at this load",
        "leak_verdict": None,
    }
