"""The command `check`."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from xml.etree import ElementTree as ET

from vllm_headroom.inputs import parse_number
from vllm_headroom.units import format_duration
from vllm_headroom_tools.check.leaks import judge_gpu_leaks, judge_host_leaks
from vllm_headroom_tools.check.limits import (
    COST,
    DISCREPANCY,
    GROWTH,
    HOST_LEAK,
    LEAK,
    PREEMPTIONS,
    RESTARTS,
    Judgement,
    judge_costs,
    judge_discrepancies,
    judge_growths,
    judge_preemptions,
    judge_restarts,
)
from vllm_headroom_tools.check.record import Budget, TraceRecord
from vllm_headroom_tools.cli import Command, save
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report, find_worst
from vllm_headroom_tools.options import (
    FILE,
    RATIO,
    SHARE,
    TRACE,
    BadOptions,
    Parser,
    Value,
    bounded,
    choice,
    name_option,
    size,
    whole_number,
)
from vllm_headroom_tools.terminal import wrap_text
from vllm_headroom_tools.trace import BadInput, read_trace

MARKS: Final = {
    Conclusion.GOOD: "passed",
    Conclusion.NOT_GOOD: "FAILED",
    Conclusion.CANNOT_TELL: "cannot tell",
}
OUTCOMES: Final = {
    Conclusion.GOOD: "passed",
    Conclusion.NOT_GOOD: "failed",
    Conclusion.CANNOT_TELL: "cannot_tell",
}
"""The words of --json."""

HEADS: Final = ("", "limit", "of", "found", "at most", "baseline")
INDENT: Final = " " * 13
"""The width of the marks: a reason goes below the limit's name."""


def sum_up(judgements: Sequence[Judgement]) -> str:
    """Summarise the judgements in a line."""
    kept, failed, unknown = (
        sum(each.verdict is verdict for each in judgements) for verdict in Conclusion
    )
    if failed:
        also = f", {unknown} cannot be judged" if unknown else ""
        return f"FAILED: {failed} of {len(judgements)} limits exceeded{also}."
    if unknown:
        return f"Cannot tell: {unknown} of {len(judgements)} limits cannot be judged, {kept} kept."
    return f"Passed: all {len(judgements)} limits kept."


def format_table(
    traces: Sequence[tuple[str, TraceRecord]], judgements: Sequence[Judgement]
) -> list[str]:
    """Return a line for each trace, a row for each judgement with its reason below it, and the summary."""
    heads: list[str] = []
    rows: list[tuple[str, ...]] = [HEADS]
    rows += [(MARKS[each.verdict], each.limit, each.of, *each.words) for each in judgements]
    rows = rows if any(row[-1] for row in rows[1:]) else [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = len(INDENT) - 2
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    shown = [lines[0]]
    for judgement, line in zip(judgements, lines[1:], strict=True):
        shown += [line, *wrap_text(INDENT, judgement.why)]
    for name, record in traces:
        done = record.finished.total
        requests = "requests unknown" if done is None else f"{done:,.0f} requests finished"
        seen = f"{record.replay.samples:,} samples over {format_duration(record.span_seconds)}"
        heads.append(f"{name}: {seen}, {requests}")
    return [*heads, "", *shown, "", sum_up(judgements)]


def build_report(
    traces: Sequence[tuple[str, TraceRecord]],
    judgements: Sequence[Judgement],
    *,
    for_github: bool = False,
) -> Report:
    """Return the report on the traces, of which the first was judged."""
    return Report(
        verdict=find_worst(each.verdict for each in judgements),
        headline=sum_up(judgements),
        findings=[Finding(each.name, each.verdict, format_message(each)) for each in judgements],
        data=_build_data(traces, judgements),
        lines=(
            *format_table(traces, judgements),
            *(format_annotations(judgements) if for_github else ()),
        ),
    )


def _build_data(
    traces: Sequence[tuple[str, TraceRecord]], judgements: Sequence[Judgement]
) -> dict[str, Any]:
    (trace, *others) = [
        {
            "file": name,
            "samples": record.replay.samples,
            "span_seconds": record.span_seconds,
            "requests_finished": record.finished.total,
            "engine_restarts": record.replay.engine.runs.restarts,
        }
        for name, record in traces
    ]
    return {
        "outcome": OUTCOMES[find_worst(each.verdict for each in judgements)],
        "trace": trace,
        "baseline": others[0] if others else None,
        "limits": [
            {
                "limit": judgement.limit,
                "of": judgement.of or None,
                "outcome": OUTCOMES[judgement.verdict],
                **{
                    name: getattr(judgement, name)
                    for name in ("unit", "value", "most", "least", "baseline")
                },
                "why": judgement.why or None,
            }
            for judgement in judgements
        ],
    }


LEVELS: Final = {Conclusion.NOT_GOOD: "error", Conclusion.CANNOT_TELL: "warning"}
SUITE: Final = "vllm-headroom check"
ELEMENTS: Final = {Conclusion.NOT_GOOD: "failure", Conclusion.CANNOT_TELL: "error"}
"""What cannot be judged is an error: a skipped test would count as good."""


def build_junit(judgements: Iterable[Judgement]) -> str:
    """Build a JUnit suite with a test for each judgement."""
    return _build_suite(
        (each.name, each.verdict, format_message(each), each.why) for each in judgements
    )


def format_message(judgement: Judgement) -> str:
    """Return the value, the bound and the baseline in a line."""
    found, allowed, before = judgement.words
    at_most = f", at most {allowed}" if allowed else ""
    baseline = f", baseline {before}" if before else ""
    return f"{judgement.name}: {found}{at_most}{baseline}"


def _build_suite(cases: Iterable[tuple[str, Conclusion, str, str]]) -> str:
    """Build a suite of a test for each name; its text is its message, or its output where it passed."""
    root = ET.Element("testsuites")
    suite = ET.SubElement(root, "testsuite", {"name": SUITE, "skipped": "0"})
    for name, verdict, text, why in cases:
        case = ET.SubElement(
            suite, "testcase", {"classname": "vllm_headroom_tools.check", "name": name}
        )
        if verdict is Conclusion.GOOD:
            ET.SubElement(case, "system-out").text = f"{text}\n{why}".rstrip()
        else:
            ET.SubElement(case, ELEMENTS[verdict], {"message": text}).text = why or text
    for each in (root, suite):
        each.set("tests", str(len(suite)))
        for count, element in (("failures", "failure"), ("errors", "error")):
            each.set(count, str(len(suite.findall(f"testcase/{element}"))))
    ET.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def format_annotations(judgements: Sequence[Judgement]) -> Iterator[str]:
    """Yield an error for each limit that is exceeded, a warning for each that cannot be judged, else one notice.

    GitHub shows ten of a kind and step, so all limits that are kept share a notice.
    """
    found = [
        (level, format_message(each) + (f" ({each.why})" if each.why else ""))
        for each in judgements
        if (level := LEVELS.get(each.verdict))
    ]
    if not found:
        found.append(("notice", sum_up(judgements)))
    for level, text in found:
        # escaped as GitHub's toolkit does (actions/toolkit, command.ts)
        escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        yield f"::{level} title={SUITE}::{escaped}"


SIZE: Final = size("1MiB")
NUMBER: Final = Value(read=bounded(parse_number, 0, 1.7e308), accepts="a number, 0 or more")
SAME_LOAD: Final = "GPU and host memory at the same load; the KV cache may be as much smaller"
JUDGES: Final[dict[str, tuple[str, Callable[..., Iterator[Judgement]], str, Value[Any], str]]] = {
    "max_leak_per_thousand_requests": (
        LEAK,
        judge_gpu_leaks,
        "SIZE",
        SIZE,
        "GPU memory, by the leak detector",
    ),
    "max_host_leak_per_thousand_requests": (
        HOST_LEAK,
        judge_host_leaks,
        "SIZE",
        SIZE,
        "host memory, in the same way",
    ),
    "max_discrepancy": (
        DISCREPANCY,
        judge_discrepancies,
        "SHARE",
        SHARE,
        "GPU memory held beyond the engine's budget",
    ),
    "max_bytes_per_request": (
        COST,
        judge_costs,
        "SIZE",
        SIZE,
        "GPU memory over running requests, at full load",
    ),
    "max_preemptions_per_thousand_requests": (
        PREEMPTIONS,
        judge_preemptions,
        "N",
        NUMBER,
        "as vLLM counts them",
    ),
    "max_growth_over_baseline": (GROWTH, judge_growths, "SHARE", SHARE, SAME_LOAD),
    "max_restarts": (
        RESTARTS,
        judge_restarts,
        "N",
        whole_number(0),
        "of the engine during the trace; 0 if not given",
    ),
}
"""Each limit by its option: name, judge of each GPU, role or engine, and the option's metavar, type and help."""


def judge(
    given: Mapping[str, float], record: TraceRecord, before: TraceRecord | None
) -> Iterator[Judgement]:
    """Yield the judgements on each limit, by option; what the trace lacks cannot be judged."""
    for key, most in given.items():
        name, judged, *_ = JUDGES[key]
        why = f"the trace has no {'process' if name == HOST_LEAK else 'GPU'} of the engine's"
        nothing = Judgement(limit=name, verdict=Conclusion.CANNOT_TELL, why=why)
        yield from tuple(judged(record, before, most)) or (nothing,)


def read_limits(given: Namespace) -> dict[str, float]:
    """Return the limits that were given, by option; raises BadOptions where options conflict."""
    most = {key: value for key in JUDGES if (value := getattr(given, key)) is not None}
    problems = {
        "needs a limit, such as --max-leak-per-thousand-requests 1MiB": not most,
        "--max-growth-over-baseline needs a --baseline": "max_growth_over_baseline" in most
        and given.baseline is None,
        "--trace and --baseline cannot both be standard input": given.trace
        == given.baseline
        == "-",
        "--json and --format cannot both be given": given.json and given.format is not None,
        "--gpu-memory-utilization and --reported-bytes cannot both be given": given.gpu_memory_utilization
        is not None
        and given.reported_bytes is not None,
    }
    if any(problems.values()):
        raise BadOptions(*(problem for problem, is_there in problems.items() if is_there))
    return {"max_restarts": 0, **most}


def _options(parser: Parser) -> None:
    traces = parser.add_argument_group("traces")
    traces.add_argument(
        "--trace", metavar="FILE", required=True, type=TRACE, help="what is judged; - for stdin"
    )
    traces.add_argument(
        "--baseline", metavar="FILE", type=TRACE, help="an older version's, under the same load"
    )
    limit = parser.add_argument_group(
        "limits, on each GPU, process or engine; at least one"
    ).add_argument
    for name, (_, _, word, kind, text) in JUDGES.items():
        limit(name_option(name), metavar=word, type=kind, help=text)
    budget = parser.add_argument_group(
        "the engine's budget on each GPU, for --max-discrepancy"
    ).add_argument
    budget("--gpu-memory-utilization", metavar="RATIO", type=RATIO, help="as vLLM's")
    budget(
        "--reported-bytes", metavar="SIZE", type=size("72GiB"), help="as HEADROOM_REPORTED_BYTES"
    )
    output = parser.add_argument_group("output").add_argument
    output(
        "--junit", metavar="FILE", type=FILE, help="write JUnit XML, which GitLab and Jenkins show"
    )
    formats = choice(("text", "github"))
    output(
        "--format",
        metavar="NAME",
        type=formats,
        help="text, or github with annotations for a workflow's run",
    )


def _run(given: Namespace) -> Report:
    given_limits, traces = read_limits(given), []
    budget = Budget(
        reported_bytes=given.reported_bytes, utilization_ratio=given.gpu_memory_utilization
    )
    keeps = any(JUDGES[key][0] in (LEAK, HOST_LEAK) for key in given_limits)
    inputs = (given.trace, given.baseline)
    for flag, name in zip(("--trace", "--baseline"), inputs, strict=True):
        record = TraceRecord(budget, keeps=keeps)
        try:
            for snapshot in () if name is None else read_trace(name):
                record.step(snapshot)
        except BadInput as error:
            wrong = f"{flag}: {error}"
            suite = _build_suite([("trace", Conclusion.CANNOT_TELL, wrong, "")])
            save(given.junit, suite, inputs=inputs)  # not an earlier build's
            raise BadInput(wrong) from error
        traces += [] if name is None else [(name, record)]
    records = [record for _, record in traces]
    judgements = tuple(judge(given_limits, records[0], records[1] if records[1:] else None))
    save(given.junit, build_junit(judgements), inputs=inputs)
    return build_report(traces, judgements, for_github=given.format == "github")


COMMAND: Final[Command] = Command(
    usage="%(prog)s --trace FILE [--baseline FILE] [LIMIT]... [OPTION]...",
    description="""\
The gate for CI: judges whether an engine kept its limits while a trace was
recorded, beside the figures of an older version. A limit is kept, exceeded, or
cannot be judged on this trace; the check passes if all limits are kept.
""",
    epilog="""\
It ends with status 0 when every limit is kept, 1 when one is exceeded, and 2
when one cannot be judged or the trace cannot be read.

Example:
  vllm-headroom check --trace new.jsonl --max-leak-per-thousand-requests 1MiB \\
    --baseline old.jsonl --max-growth-over-baseline 5% --junit report.xml
""",
    options=_options,
    run=_run,
)
