"""The command `advise`."""

from argparse import Namespace
from collections.abc import Coroutine, Iterable, Iterator
from itertools import chain
from typing import Any, Final

from msgspec.structs import asdict, replace

from vllm_headroom.daemon.pod import read_engine_pod
from vllm_headroom.inputs import parse_metrics_url
from vllm_headroom_tools.advise.facts import Facts, FactsSource, list_leaks
from vllm_headroom_tools.advise.finding import Advice, Change
from vllm_headroom_tools.advise.history import TraceHistory
from vllm_headroom_tools.advise.log.judge import (
    LogAssessment,
    build_log_data,
    format_source,
    judge_log,
    list_part_lines,
)
from vllm_headroom_tools.advise.settings import EngineArgs, Flag
from vllm_headroom_tools.advise.verdict import Assessment, judge_facts
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.cli import Command
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report
from vllm_headroom_tools.engine_choice import ENGINE_HELP, ENGINE_METAVAR
from vllm_headroom_tools.engine_log import parse_engine_log
from vllm_headroom_tools.history import describe_span
from vllm_headroom_tools.options import (
    RATIO,
    TRACE,
    BadOptions,
    Parser,
    Value,
    add_reported_bytes,
    find_local_sidecar,
    page_url,
    tokens,
    whole_number,
)
from vllm_headroom_tools.terminal import wrap_headed, wrap_text
from vllm_headroom_tools.trace import begins_trace, open_lines, read_snapshots
from vllm_headroom_tools.versions import Version, format_version, parse_version


def build_report(assessment: Assessment) -> Report:
    """Return the report.

    The report's headline names the first cause or says that there is no cause. In the data, unknown
    figures are None.
    """
    findings = _list_findings(assessment.advice, assessment.missing, assessment.notes)
    # The first cause is the most severe.
    if assessment.advice:
        headline = assessment.advice[0].summary
    else:
        headline = next(_format_end(assessment)).removesuffix(" Missing:")
    return Report(
        verdict=assessment.verdict,
        headline=headline,
        findings=findings,
        data=_build_data(assessment),
        lines=_render_text(assessment),
    )


def build_log_report(assessment: LogAssessment) -> Report:
    """Return the report on an engine log."""
    return Report(
        verdict=assessment.verdict,
        headline=assessment.headline,
        findings=_list_findings(assessment.advice, assessment.missing, assessment.notes),
        data=_build_log_data(assessment),
        lines=_render_log_text(assessment),
    )


def _list_findings(
    all_advice: Iterable[Advice], missing: Iterable[str], notes: Iterable[str]
) -> tuple[Finding, ...]:
    """Return the causes, the missing facts that make the verdict uncertain, and the notes."""
    findings = [
        Finding(
            advice.cause,
            Conclusion.NOT_GOOD,
            advice.summary,
            tuple(write_advice(change) for change in advice.changes),
        )
        for advice in all_advice
    ]
    findings += [Finding("missing", Conclusion.CANNOT_TELL, text) for text in missing]
    findings += [Finding("note", Conclusion.GOOD, note) for note in notes]
    return tuple(findings)


def _render_text(assessment: Assessment) -> list[str]:
    """Return the report's lines: the source, the numbered pieces of advice, and the notes."""
    lines = [_format_source(assessment.facts)]
    for number, advice in enumerate(assessment.advice, start=1):
        lines.append("")
        lines += _render_advice(number, advice)
    end = list(_format_end(assessment))
    for note in assessment.notes:
        end += wrap_headed("note", note)
    if assessment.advice and end:
        lines.append("")
    return lines + end


def _render_log_text(assessment: LogAssessment) -> list[str]:
    """Return the advice on a log or, without advice, the memory by part."""
    lines = [format_source(assessment)]
    for number, advice in enumerate(assessment.advice, start=1):
        lines.append("")
        lines += _render_advice(number, advice)
    if not assessment.advice:
        lines += ["", assessment.headline, *list_part_lines(assessment)]
    for missing in assessment.missing:
        lines += wrap_headed("missing", missing)
    for note in assessment.notes:
        lines += wrap_headed("note", note)
    return lines


def _format_source(facts: Facts) -> str:
    """Return a line on the input: a page or a trace, with any version."""
    source = "The sidecar's page, now"
    begin_seconds = facts.begin_seconds
    end_seconds = facts.end_seconds
    if facts.origin is FactsSource.TRACE and begin_seconds is not None and end_seconds is not None:
        source = describe_span(facts.samples, begin_seconds, end_seconds)
    if facts.settings.version is None:
        return f"{source}."
    return f"{source}; vLLM {format_version(facts.settings.version)}."


def _render_advice(number: int, advice: Advice) -> list[str]:
    """Return the lines for one cause: figures, changes in order, and any remark."""
    lines = wrap_text("", f"{number}. {advice.summary}", indent=3)
    for evidence in advice.evidence:
        lines += wrap_headed("seen", evidence.text)
    head = "first"
    for change in advice.changes:
        lines += wrap_headed(head, write_advice(change))
        lines += wrap_headed("", f"costs {change.cost}")
        head = "then"
    if advice.remark is not None:
        lines += wrap_headed("mind", advice.remark)
    return lines


def write_advice(change: Change) -> str:
    """Return a change as text: the option, its values and the reason.

    The values are the new one and the current one. If the current value is unknown, the text gives
    only the increase or decrease. If the change involves no option, its own text is returned.
    """
    flag = change.flag
    if flag is None:
        return change.text
    # If the current value is unknown, so is the new value. In that case, only the difference is
    # given.
    if change.difference is not None:
        direction = "lower" if change.difference < 0 else "higher"
        amount = _format_number(abs(change.difference), flag)
        return f"{flag} {amount} {direction} than it is: {change.text}"
    value = ""
    if change.value is not None:
        value = f" {_format_number(change.value, flag)}"
    now = ""
    if change.now is not None:
        now = f" (now {_format_number(change.now, flag)})"
    return f"{flag}{value}{now}: {change.text}"


JSON_KEYS: Final = {
    Flag.LIMIT_MM_PER_PROMPT: "image",
    Flag.MM_PROCESSOR_KWARGS: "max_pixels",
}
"""The key whose value is changed, for each option that takes a JSON object."""


def _format_number(value: float, flag: Flag) -> str:
    """Return an option's value as a user types it.

    A share has decimals, and any other value is an integer.
    """
    if flag in JSON_KEYS:
        return f"'{{\"{JSON_KEYS[flag]}\": {value:.0f}}}'"
    if flag is not Flag.GPU_MEMORY_UTILIZATION:
        return f"{value:.0f}"
    # Use two decimals, or more if the configured share has more.
    return f"{value:.2f}" if round(value, 2) == value else f"{value:.4g}"


def _format_end(assessment: Assessment) -> Iterator[str]:
    """Yield the closing lines.

    The last lines are the verdict, if there is no advice, and any missing facts.
    """
    if assessment.verdict is Conclusion.GOOD:
        is_trace = assessment.facts.origin is FactsSource.TRACE
        yield "Nothing to change." if is_trace else "Nothing to change now."
    if assessment.verdict is Conclusion.CANNOT_TELL:
        yield "Cannot tell whether anything should be changed. Missing:"
    elif assessment.missing:
        yield "There may be more causes. Missing:"
    for missing in assessment.missing:
        yield from wrap_headed("", missing)


def _build_data(assessment: Assessment) -> dict[str, Any]:
    """Return the data for --json; unknown figures are None."""
    facts = assessment.facts
    version = facts.settings.version
    return {
        "origin": facts.origin,
        "samples": facts.samples,
        "span_seconds": facts.span_seconds,
        "vllm_version": None if version is None else format_version(version),
        "vllm_version_at_least": format_version(facts.settings.earliest_version),
        "leaks": [
            {"series": name, "state": leak.state, "verdict": leak.verdict}
            for name, leak in list_leaks(facts)
        ],
        "advice": [_build_advice_data(advice) for advice in assessment.advice],
        "missing": list(assessment.missing),
        "notes": list(assessment.notes),
    }


def _build_log_data(assessment: LogAssessment) -> dict[str, Any]:
    """Return the data for --json about a log; unknown figures are None."""
    settings = assessment.start_facts.settings
    return {
        "origin": FactsSource.LOG,
        "samples": None,
        "span_seconds": None,
        "vllm_version": None if settings.version is None else format_version(settings.version),
        "vllm_version_at_least": format_version(settings.earliest_version),
        "leaks": [],
        "advice": [_build_advice_data(advice) for advice in assessment.advice],
        "missing": list(assessment.missing),
        "notes": list(assessment.notes),
        "log": build_log_data(assessment),
    }


def _build_advice_data(advice: Advice) -> dict[str, Any]:
    return {
        **asdict(advice),
        "evidence": {evidence.name: evidence.value for evidence in advice.evidence},
        "changes": [_build_change_data(change) for change in advice.changes],
    }


def _build_change_data(change: Change) -> dict[str, Any]:
    """Return the fields of a change.

    Every option except the utilization is a whole number.
    """
    data = asdict(change)
    if change.flag is Flag.GPU_MEMORY_UTILIZATION:
        return data
    return {name: int(value) if isinstance(value, float) else value for name, value in data.items()}


def _add_options(parser: Parser) -> None:
    """Declare the options of `advise`."""
    parser.add_argument(
        "trace",
        metavar="FILE",
        nargs="?",
        type=TRACE,
        help="a trace or a log of the engine, - for standard input",
    )
    parser.add_argument("--trace", dest="trace_option", metavar="FILE", type=TRACE, help="the same")
    parser.add_argument(
        "--headroom-url",
        metavar="URL",
        type=page_url("http://gpu-7:9839"),
        help="a sidecar to read instead of a file; without either, the one beside this command",
    )
    parser.add_argument("--engine", metavar=ENGINE_METAVAR, help=ENGINE_HELP)
    group = parser.add_argument_group(
        "what the engine was started with, for values that depend on it"
    )
    group.add_argument(
        "--engine-url",
        metavar="URL",
        type=page_url("http://127.0.0.1:8000"),
        help="vLLM itself, to read its version and its share of the GPU",
    )
    group.add_argument(
        "--vllm-version",
        metavar="VERSION",
        type=Value(read=_read_version, accepts="a version of vLLM from 0.4 on, such as 0.11.2"),
        help="advise only options of this version; default: of every version that it can be",
    )
    group.add_argument("--gpu-memory-utilization", metavar="RATIO", type=RATIO, help="as vLLM's")
    add_reported_bytes(group)
    group.add_argument("--max-num-seqs", metavar="N", type=whole_number(), help="as vLLM's")
    group.add_argument("--max-model-len", metavar="N", type=tokens(), help="as vLLM's")
    group.add_argument("--max-num-batched-tokens", metavar="N", type=tokens(), help="as vLLM's")


def _read_version(text: str) -> Version:
    """Return the release named in a text; raise ValueError if there is none."""
    version = parse_version(text)
    if version is None:
        raise ValueError
    return version


def _run(options: Namespace) -> Report | Coroutine[Any, Any, Report]:
    """Return the report.

    If a page has to be fetched, a coroutine is returned instead. Raises BadOptions if two sources
    are named.
    """
    sources = (options.trace, options.trace_option, options.headroom_url)
    # A positional FILE and --trace mean the same thing.
    given_sources = [source for source in sources if source is not None]
    if len(given_sources) > 1:
        raise BadOptions("takes a FILE or --headroom-url, and not both")
    settings = EngineArgs(
        version=options.vllm_version,
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    # If `--engine-url` is also given, the file and the engine's page are judged together.
    if options.engine_url is None and given_sources and options.headroom_url is None:
        return _judge_file(options, settings)
    return _judge_live(options, settings)


async def _judge_live(options: Namespace, settings: EngineArgs) -> Report:
    """Return the report on a file or a sidecar's page.

    Settings are read from the engine.
    """
    from vllm_headroom_tools.advise import page  # noqa: PLC0415 - a file alone needs no HTTP client

    if options.engine_url is not None:
        settings = await page.add_engine_settings(settings, options.engine_url)
    if options.trace is not None or options.trace_option is not None:
        return _judge_file(options, settings)
    if options.headroom_url is not None:
        facts = await page.fetch_facts(options.headroom_url, settings, engine_name=options.engine)
    else:
        sidecar_url = parse_metrics_url(find_local_sidecar())
        facts = await page.fetch_facts(sidecar_url, settings, NO_SOURCE, engine_name=options.engine)
    return build_report(judge_facts(facts))


def _judge_file(options: Namespace, settings: EngineArgs) -> Report:
    """Return the report on a file, which is either a trace or a log.

    Raises BadInput if the file cannot be read. Also raises BadInput if it is neither a trace nor a
    log.
    """
    name = options.trace or options.trace_option
    with open_lines(name) as lines:
        # The first line shows the type of the file. A trace begins with a header.
        first_line = next(lines, b"")
        all_lines = chain((first_line,), lines)
        if begins_trace(first_line):
            report = build_report(
                judge_facts(_read_facts(all_lines, name, settings, options.reported_bytes))
            )
        else:
            log = parse_engine_log(all_lines, TRACE_OR_LOG)
            report = build_log_report(judge_log(log, settings))
    return report


NO_SOURCE: Final = "name a FILE or --headroom-url, or run this beside vllm-headroom"
TRACE_OR_LOG: Final = "a trace of this version or a log of an engine"


def _read_facts(
    lines: Iterable[bytes], name: str, settings: EngineArgs, reported_bytes: int | None
) -> Facts:
    """Return the facts of a trace.

    Raises BadInput if the trace cannot be read or is empty.
    """
    history = TraceHistory(reported_bytes=reported_bytes)
    for snapshot in read_snapshots(lines, name):
        history.step(snapshot)
    facts = history.build_facts(settings)
    if not facts.samples:
        raise BadInput("the trace has no samples")
    pod = read_engine_pod()
    return facts if pod is None else replace(facts, log_command=pod.log_command)


COMMAND: Final[Command] = Command(
    usage="%(prog)s [OPTION]... [FILE]\n       %(prog)s [OPTION]... --headroom-url URL",
    description="""\
Finds which known cause of memory trouble fits an engine, shows the figures, and
advises a change: vLLM's option with a value computed from this engine's
figures, the least costly first.

FILE is a trace or a log of the engine, - for standard input. A trace is
HEADROOM_TRACE_FILE of the daemon or flight.jsonl of its state directory,
ideally of a day. A log is what the engine wrote, as docker, kubectl, the
kubelet or journald keep it: of a start that failed, a death, or an engine that
serves. A sidecar's page is only the present; without FILE it is that of the
sidecar here.
""",
    epilog="""\
The exit status is 0 if there is nothing to change, 1 if there is advice, and 2
if it cannot tell or cannot use its input.

Example:
  vllm-headroom advise trace.jsonl --engine-url http://127.0.0.1:8000
  kubectl logs --previous vllm-0 | vllm-headroom advise -
  vllm-headroom advise --headroom-url http://gpu-7:9839 --json
  kubectl exec vllm-0 -c headroom -- vllm-headroom advise
""",
    options=_add_options,
    run=_run,
)
