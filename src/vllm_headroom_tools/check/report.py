"""Report the judgements on a trace as text, JSON, JUnit XML and GitHub annotations."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final
from xml.etree import ElementTree as ET

from vllm_headroom.units import format_duration
from vllm_headroom_tools.check.judgement import Judgement
from vllm_headroom_tools.check.record import TraceRecord
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report, find_worst
from vllm_headroom_tools.terminal import wrap_text

MARKS: Final = {
    Conclusion.GOOD: "passed",
    Conclusion.NOT_GOOD: "FAILED",
    Conclusion.CANNOT_TELL: "cannot tell",
}
"""The first cell of a table row, by verdict."""

OUTCOMES: Final = {
    Conclusion.GOOD: "passed",
    Conclusion.NOT_GOOD: "failed",
    Conclusion.CANNOT_TELL: "cannot_tell",
}
"""The `outcome` in --json, by verdict."""

HEADINGS: Final = ("", "limit", "of", "found", "at most", "baseline")
INDENT: Final = " " * 13
"""An indent as wide as the column of marks. A reason then appears below the limit's name."""

COLUMN_GAP: Final = "  "


def build_report(
    traces: Sequence[tuple[str, TraceRecord]],
    judgements: Sequence[Judgement],
    *,
    for_github: bool = False,
) -> Report:
    """Return the report on named traces: the judged trace, then any baseline.

    With `for_github`, GitHub annotations follow the table.
    """
    lines = format_table(traces, judgements)
    if for_github:
        lines += format_annotations(judgements)
    return Report(
        verdict=find_worst(judgement.verdict for judgement in judgements),
        headline=summarize(judgements),
        findings=[
            Finding(judgement.name, judgement.verdict, format_message(judgement))
            for judgement in judgements
        ],
        data=_build_data(traces, judgements),
        lines=tuple(lines),
    )


def summarize(judgements: Sequence[Judgement]) -> str:
    """Return one line with the numbers of limits that were exceeded, undecided and met."""
    verdicts = [judgement.verdict for judgement in judgements]
    failed = verdicts.count(Conclusion.NOT_GOOD)
    unknown = verdicts.count(Conclusion.CANNOT_TELL)
    passed = verdicts.count(Conclusion.GOOD)
    total = len(judgements)
    # Failures come first, followed by limits that cannot be judged.
    if failed:
        addition = f", {unknown} cannot be judged" if unknown else ""
        return f"FAILED: {failed} of {total} limits exceeded{addition}."
    if unknown:
        return f"Cannot tell: {unknown} of {total} limits cannot be judged, {passed} kept."
    return f"Passed: all {total} limits kept."


def format_table(
    traces: Sequence[tuple[str, TraceRecord]], judgements: Sequence[Judgement]
) -> list[str]:
    """Return one line per trace, one row per judgement, and the summary.

    The reason for a judgement appears below its row.
    """
    heading_line, *judgement_lines = format_rows(judgements)
    lines = [_describe_trace(name, record) for name, record in traces]
    lines += ["", heading_line]
    for judgement, line in zip(judgements, judgement_lines, strict=True):
        lines += [line, *wrap_text(INDENT, judgement.reason)]
    lines += ["", summarize(judgements)]
    return lines


def format_rows(judgements: Sequence[Judgement]) -> list[str]:
    """Return the headings and one row per judgement, as lines with aligned columns.

    The baseline column is omitted if no row has a baseline.
    """
    rows: list[tuple[str, ...]] = [HEADINGS]
    for judgement in judgements:
        mark = MARKS[judgement.verdict]
        rows.append((mark, judgement.limit, judgement.subject, *judgement.texts))
    has_baseline = any(row[-1] for row in rows[1:])
    if not has_baseline:
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = len(INDENT) - len(COLUMN_GAP)
    return [_format_row(row, widths) for row in rows]


def _format_row(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
    return COLUMN_GAP.join(cells).rstrip()


def _describe_trace(name: str, record: TraceRecord) -> str:
    """Return a line describing one trace: its length and its number of requests."""
    finished = record.finished_requests.total
    requests = "requests unknown"
    if finished is not None:
        requests = f"{finished:,.0f} requests finished"
    span = format_duration(record.span_seconds)
    return f"{name}: {record.replay.samples:,} samples over {span}, {requests}"


def _build_data(
    traces: Sequence[tuple[str, TraceRecord]], judgements: Sequence[Judgement]
) -> dict[str, Any]:
    """Return the report's JSON data.

    If there are two traces, the second is the baseline.
    """
    trace, *baselines = [
        {
            "file": name,
            "samples": record.replay.samples,
            "span_seconds": record.span_seconds,
            "requests_finished": record.finished_requests.total,
            "engine_restarts": record.restarts,
        }
        for name, record in traces
    ]
    return {
        "outcome": OUTCOMES[find_worst(judgement.verdict for judgement in judgements)],
        "trace": trace,
        "baseline": baselines[0] if baselines else None,
        "limits": [
            {
                "limit": judgement.limit,
                "of": judgement.subject or None,
                "outcome": OUTCOMES[judgement.verdict],
                "unit": judgement.unit,
                "value": judgement.value,
                "most": judgement.highest_allowed,
                "least": judgement.lowest_allowed,
                "baseline": judgement.baseline,
                "why": judgement.reason or None,
                "leak_verdict": judgement.leak_verdict,
            }
            for judgement in judgements
        ],
    }


def format_message(judgement: Judgement) -> str:
    """Return one line with the value and, where known, the bound and the baseline."""
    value, bound, baseline = judgement.texts
    message = f"{judgement.name}: {value}"
    if bound:
        message += f", at most {bound}"
    if baseline:
        message += f", baseline {baseline}"
    return message


SUITE: Final = "vllm-headroom check"
"""The name of the JUnit suite and the title of the GitHub annotations."""

CASE_CLASS: Final = "vllm_headroom_tools.check"
"""The class of the JUnit cases, by which CI systems group them."""

JUNIT_ELEMENTS: Final = {Conclusion.NOT_GOOD: "failure", Conclusion.CANNOT_TELL: "error"}
"""The JUnit element for each verdict. A limit that cannot be judged becomes an error. CI systems
would treat a skipped test as passed.
"""


def build_junit(judgements: Iterable[Judgement]) -> str:
    """Return a JUnit file with one test per judgement."""
    return build_suite(
        (judgement.name, judgement.verdict, format_message(judgement), judgement.reason)
        for judgement in judgements
    )


def build_suite(cases: Iterable[tuple[str, Conclusion, str, str]]) -> str:
    """Return a JUnit file with one test per case.

    A case has a name, a verdict, a message and a reason. The body of a passed test contains its
    message and its reason. The body of any other test contains only the reason.
    """
    root = ET.Element("testsuites")
    suite = ET.SubElement(root, "testsuite", {"name": SUITE, "skipped": "0"})
    for name, verdict, message, reason in cases:
        case = ET.SubElement(suite, "testcase", {"classname": CASE_CLASS, "name": name})
        if verdict is Conclusion.GOOD:
            ET.SubElement(case, "system-out").text = f"{message}\n{reason}".rstrip()
        else:
            problem = ET.SubElement(case, JUNIT_ELEMENTS[verdict], {"message": message})
            problem.text = reason or message
    # JUnit viewers show these counts instead of counting the cases themselves.
    for element in (root, suite):
        element.set("tests", str(len(suite)))
        element.set("failures", str(len(suite.findall("testcase/failure"))))
        element.set("errors", str(len(suite.findall("testcase/error"))))
    ET.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


ANNOTATION_LEVELS: Final = {Conclusion.NOT_GOOD: "error", Conclusion.CANNOT_TELL: "warning"}


def format_annotations(judgements: Sequence[Judgement]) -> Iterator[str]:
    """Yield GitHub annotations for the judgements.

    An exceeded limit is an error. A limit that cannot be judged is a warning. If no limit was
    exceeded or undecided, a single notice covers all limits. GitHub shows at most ten annotations
    of each level per step.
    """
    is_all_kept = True
    for judgement in judgements:
        if judgement.verdict in ANNOTATION_LEVELS:
            is_all_kept = False
            message = format_message(judgement)
            if judgement.reason:
                message += f" ({judgement.reason})"
            yield _format_annotation(ANNOTATION_LEVELS[judgement.verdict], message)
    if is_all_kept:
        yield _format_annotation("notice", summarize(judgements))


def _format_annotation(level: str, message: str) -> str:
    # escaped in the same way as in GitHub's toolkit (actions/toolkit, command.ts)
    escaped = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{level} title={SUITE}::{escaped}"
