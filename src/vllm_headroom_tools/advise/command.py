"""The command `advise`."""

from argparse import Namespace
from collections.abc import Coroutine, Iterator
from typing import Any, Final

from msgspec.structs import asdict

from vllm_headroom_tools.advise.facts import Facts, Origin
from vllm_headroom_tools.advise.finding import Change
from vllm_headroom_tools.advise.history import TraceHistory
from vllm_headroom_tools.advise.settings import EngineArgs, Flag
from vllm_headroom_tools.advise.verdict import Assessment, judge
from vllm_headroom_tools.cli import Command
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report
from vllm_headroom_tools.history import describe_span
from vllm_headroom_tools.options import (
    RATIO,
    TRACE,
    BadOptions,
    Parser,
    Value,
    page_url,
    tokens,
    whole_number,
)
from vllm_headroom_tools.terminal import wrap_headed, wrap_text
from vllm_headroom_tools.trace import BadInput, read_trace
from vllm_headroom_tools.versions import Version, format_version, parse_version


def build_report(answer: Assessment) -> Report:
    """Return the report; bytes, seconds, ratios and tokens, null where unknown."""
    advised = [
        Finding(
            each.cause, Conclusion.NOT_GOOD, each.summary, tuple(map(write_advice, each.changes))
        )
        for each in answer.advice
    ]
    missing = [Finding("missing", Conclusion.CANNOT_TELL, each) for each in answer.missing]
    notes = [Finding("note", Conclusion.GOOD, each) for each in answer.notes]
    return Report(
        verdict=answer.verdict,
        headline=answer.advice[0].summary
        if answer.advice
        else next(_format_end(answer)).removesuffix(" Missing:"),
        findings=(*advised, *missing, *notes),
        data=_build_data(answer),
        lines=_render_text(answer),
    )


def _render_text(answer: Assessment) -> list[str]:
    facts = answer.facts
    version = (
        "" if facts.settings.version is None else f"; vLLM {format_version(facts.settings.version)}"
    )
    seen = "The sidecar's page, now"
    if (
        facts.origin is Origin.TRACE
        and facts.begin_seconds is not None
        and facts.end_seconds is not None
    ):
        seen = describe_span(facts.samples, facts.begin_seconds, facts.end_seconds)
    lines = [f"{seen}{version}."]
    for number, advice in enumerate(answer.advice, start=1):
        lines += ["", *wrap_text("", f"{number}. {advice.summary}", indent=3)]
        lines += (
            line for evidence in advice.evidence for line in wrap_headed("seen", evidence.text)
        )
        for place, change in enumerate(advice.changes):
            lines += wrap_headed("then" if place else "first", write_advice(change))
            lines += wrap_headed("", f"costs {change.cost}")
        lines += [] if advice.remark is None else wrap_headed("mind", advice.remark)
    end = [
        *_format_end(answer),
        *(line for note in answer.notes for line in wrap_headed("note", note)),
    ]
    lines += ["", *end] if answer.advice and end else end
    return lines


def write_advice(change: Change) -> str:
    """Return what to do, with the option and its value, or by how much to change it, where there is one."""
    flag = change.flag
    if flag is None:
        return change.text
    if change.difference is not None:
        word = "lower" if change.difference < 0 else "higher"
        return f"{flag} {_format_number(abs(change.difference), flag)} {word} than it is: {change.text}"
    value = "" if change.value is None else f" {_format_number(change.value, flag)}"
    now = "" if change.now is None else f" (now {_format_number(change.now, flag)})"
    return f"{flag}{value}{now}: {change.text}"


def _format_number(value: float, flag: Flag) -> str:
    if flag is not Flag.GPU_MEMORY_UTILIZATION:
        return f"{value:.0f}"
    return f"{value:.2f}" if round(value, 2) == value else f"{value:.4g}"


def _format_end(answer: Assessment) -> Iterator[str]:
    if answer.verdict is Conclusion.GOOD:
        yield (
            "Nothing to change."
            if answer.facts.origin is Origin.TRACE
            else "Nothing to change now."
        )
    if answer.verdict is Conclusion.CANNOT_TELL:
        yield "Cannot tell whether anything should be changed. Missing:"
    elif answer.missing:
        yield "There may be more causes. Missing:"
    for missing in answer.missing:
        yield from wrap_headed("", missing)


def _build_data(answer: Assessment) -> dict[str, Any]:
    facts = answer.facts
    version = facts.settings.version
    advice = [
        {
            **asdict(advice),
            "evidence": {evidence.name: evidence.value for evidence in advice.evidence},
            "changes": [
                {
                    name: int(value)
                    if isinstance(value, float) and change.flag is not Flag.GPU_MEMORY_UTILIZATION
                    else value
                    for name, value in asdict(change).items()
                }
                for change in advice.changes
            ],
        }
        for advice in answer.advice
    ]
    return {
        "origin": facts.origin,
        "samples": facts.samples,
        "span_seconds": facts.span_seconds,
        "vllm_version": None if version is None else format_version(version),
        "vllm_version_at_least": format_version(facts.settings.known),
        "advice": advice,
        "missing": list(answer.missing),
        "notes": list(answer.notes),
    }


def _options(parser: Parser) -> None:
    parser.add_argument(
        "trace", metavar="TRACE", nargs="?", type=TRACE, help="the trace, - for standard input"
    )
    parser.add_argument(
        "--trace", dest="trace_option", metavar="TRACE", type=TRACE, help="the same"
    )
    page = page_url("http://gpu-7:9839")
    parser.add_argument(
        "--headroom-url", metavar="URL", type=page, help="a sidecar to read instead of a trace"
    )
    add = parser.add_argument_group(
        "what the engine was started with, for values that depend on it"
    ).add_argument
    engine = page_url("http://127.0.0.1:8000")
    add(
        "--engine-url",
        metavar="URL",
        type=engine,
        help="vLLM itself, to read its version and its share of the GPU",
    )
    version = Value(read=_read_version, accepts="a version of vLLM from 0.4 on, such as 0.11.2")
    only = "advise only options of this version; default: of every version that it can be"
    add("--vllm-version", metavar="VERSION", type=version, help=only)
    add("--gpu-memory-utilization", metavar="RATIO", type=RATIO, help="as vLLM's")
    for name, kind in (
        ("num-seqs", whole_number()),
        ("model-len", tokens()),
        ("num-batched-tokens", tokens()),
    ):
        add(f"--max-{name}", metavar="N", type=kind, help="as vLLM's")


def _read_version(text: str) -> Version:
    version = parse_version(text)
    if version is None:
        raise ValueError
    return version


def _run(given: Namespace) -> Report | Coroutine[Any, Any, Report]:
    if (
        sum(source is not None for source in (given.trace, given.trace_option, given.headroom_url))
        != 1
    ):
        raise BadOptions("needs a TRACE or --headroom-url, and not both")
    settings = EngineArgs(
        version=given.vllm_version,
        gpu_memory_utilization=given.gpu_memory_utilization,
        max_num_seqs=given.max_num_seqs,
        max_model_len=given.max_model_len,
        max_num_batched_tokens=given.max_num_batched_tokens,
    )
    if given.engine_url is None and given.headroom_url is None:
        return build_report(judge(_read_trace(given, settings)))
    return _judge_live(given, settings)


async def _judge_live(given: Namespace, settings: EngineArgs) -> Report:
    from vllm_headroom_tools.advise import page  # noqa: PLC0415 - a trace alone needs no HTTP client

    if given.engine_url is not None:
        settings = await page.add_engine_settings(settings, given.engine_url)
    if given.headroom_url is None:
        return build_report(judge(_read_trace(given, settings)))
    return build_report(judge(await page.fetch_facts(given.headroom_url, settings)))


def _read_trace(given: Namespace, settings: EngineArgs) -> Facts:
    past = TraceHistory()
    for snapshot in read_trace(given.trace or given.trace_option):
        past.step(snapshot)
    facts = past.facts(settings)
    if not facts.samples:
        raise BadInput("the trace has no samples")
    return facts


COMMAND: Final[Command] = Command(
    usage="%(prog)s [OPTION]... TRACE\n       %(prog)s [OPTION]... --headroom-url URL",
    description="""\
Finds which known cause of memory trouble fits an engine, shows the figures, and
advises a change: vLLM's option with a value computed from this engine's
figures, the least costly first.

TRACE is HEADROOM_TRACE_FILE of the daemon, flight.jsonl of its state directory
or - for standard input, ideally of a day. A sidecar's page is only the present.
""",
    epilog="""\
The exit status is 0 if there is nothing to change, 1 if there is advice, and 2
if it cannot tell or cannot use its input.

Example:
  vllm-headroom advise trace.jsonl --engine-url http://127.0.0.1:8000
  vllm-headroom advise --headroom-url http://gpu-7:9839 --json
""",
    options=_options,
    run=_run,
)
