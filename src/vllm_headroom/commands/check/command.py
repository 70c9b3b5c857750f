"""The command `check`: its options, and every limit that was given, judged."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from vllm_headroom.commands.check.absolute import costs, discrepancies, preemptions, restarts
from vllm_headroom.commands.check.judgement import (
    COST,
    DISCREPANCY,
    GROWTH,
    HOST_LEAK,
    LEAK,
    PREEMPTIONS,
    RESTARTS,
    Judgement,
    Unit,
    overall,
)
from vllm_headroom.commands.check.leaks import gpu_leaks, host_leaks
from vllm_headroom.commands.check.record import Record
from vllm_headroom.commands.check.relative import growths
from vllm_headroom.commands.check.series import Budget
from vllm_headroom.commands.check.text import broken, commands, document, report, table
from vllm_headroom.commands.cli import Command, save
from vllm_headroom.commands.conclusion import Conclusion
from vllm_headroom.commands.progress import reading
from vllm_headroom.config.kinds import FILE, RATIO, SHARE, TRACE, Value, bounded, choice, size, whole
from vllm_headroom.config.options import BadOptions, Parser
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.trace.parse import recorded

DESCRIPTION: Final = """\
The gate for CI: says whether an engine kept its limits while a trace of it was
recorded, and beside it what an older version did. A limit is kept, exceeded, or
cannot be judged on this trace; only when all are kept has it passed.
"""

EXAMPLES: Final = """\
It ends with status 0 when every limit is kept, 1 when one is exceeded, and 2
when one cannot be judged or the trace cannot be read.

Example:
  vllm-headroom check --trace new.jsonl --max-leak-per-thousand-requests 1MiB \\
    --baseline old.jsonl --max-growth-over-baseline 5% --junit report.xml
"""

Judge = Callable[[Record, Record | None, float], Iterator[Judgement]]
"""Takes the trace, the baseline and the limit; yields a judgement for each thing that the limit is on."""

SIZE: Final = size("1MiB")
NUMBER: Final = Value(read=bounded(float, 0, 1.7e308), accepts="a number, 0 or more")
SAME_LOAD: Final = "GPU and host memory at the same load; the KV cache may be as much smaller"
JUDGES: Final[dict[str, tuple[str, Judge, str, Value[Any], str]]] = {
    "max_leak_per_thousand_requests": (LEAK, gpu_leaks, "SIZE", SIZE, "GPU memory, by the leak detector"),
    "max_host_leak_per_thousand_requests": (HOST_LEAK, host_leaks, "SIZE", SIZE, "host memory, in the same way"),
    "max_discrepancy": (
        DISCREPANCY,
        discrepancies,
        "SHARE",
        SHARE,
        "GPU memory held beyond what the engine was told to use",
    ),
    "max_bytes_per_request": (COST, costs, "SIZE", SIZE, "GPU memory over running requests, at full load"),
    "max_preemptions_per_thousand_requests": (PREEMPTIONS, preemptions, "N", NUMBER, "as vLLM counts them"),
    "max_growth_over_baseline": (GROWTH, growths, "SHARE", SHARE, SAME_LOAD),
    "max_restarts": (RESTARTS, restarts, "N", whole(0), "of the engine during the trace; 0 if not given"),
}
"""The limit that an option sets: its name, who judges it, and what is said of the option."""


def judge(limits: Mapping[str, float], record: Record, before: Record | None) -> Iterator[Judgement]:
    """Yield the judgements on each limit, which is by its option; on what is not in the trace it cannot be told."""
    for option, most in limits.items():
        name, judged, *_ = JUDGES[option]
        why = f"the trace has no {'process' if name == HOST_LEAK else 'GPU'} of the engine's"
        nothing = Judgement(limit=name, verdict=Conclusion.CANNOT_TELL, unit=Unit.BYTES, why=why)
        yield from tuple(judged(record, before, most)) or (nothing,)


NO_LIMIT: Final = "needs a limit, such as --max-leak-per-thousand-requests 1MiB"
NO_BASELINE: Final = "--max-growth-over-baseline needs a --baseline"
TWICE_STDIN: Final = "--trace and --baseline cannot both be standard input"
ONE_OUTPUT: Final = "--json and --format cannot both be given"
ONE_REPORT: Final = "--gpu-memory-utilization and --reported-bytes cannot both be given"


def limits_of(given: Namespace) -> dict[str, float]:
    """Return the limits among the options, by their names; raises BadOptions where options do not go together."""
    limits = {option: most for option in JUDGES if (most := getattr(given, option)) is not None}
    problems = {
        NO_LIMIT: not limits,
        NO_BASELINE: "max_growth_over_baseline" in limits and given.baseline is None,
        TWICE_STDIN: given.trace == given.baseline == "-",
        ONE_OUTPUT: given.json and given.format is not None,
        ONE_REPORT: given.gpu_memory_utilization is not None and given.reported_bytes is not None,
    }
    if any(problems.values()):
        raise BadOptions(*(problem for problem, is_there in problems.items() if is_there))
    return {"max_restarts": 0, **limits}


def options(parser: Parser) -> None:
    """Add the options to the parser."""
    traces = parser.add_argument_group("traces")
    traces.add_argument("--trace", metavar="FILE", required=True, type=TRACE, help="what is judged; - for stdin")
    traces.add_argument("--baseline", metavar="FILE", type=TRACE, help="an older version's, under the same load")
    limits = parser.add_argument_group("limits, on each GPU, process or engine; at least one").add_argument
    for name, (_, _, word, kind, text) in JUDGES.items():
        limits(f"--{name.replace('_', '-')}", metavar=word, type=kind, help=text)
    _add_report(parser)
    output = parser.add_argument_group("output").add_argument
    output("--junit", metavar="FILE", type=FILE, help="write JUnit XML, which GitLab and Jenkins show")
    formats = choice(("text", "github"))
    output("--format", metavar="NAME", type=formats, help="text, or github with annotations for a workflow's run")


def _add_report(parser: Parser) -> None:
    add = parser.add_argument_group("what the engine was told to use of each GPU, for --max-discrepancy").add_argument
    add("--gpu-memory-utilization", metavar="RATIO", type=RATIO, help="as vLLM's")
    add("--reported-bytes", metavar="SIZE", type=size("72GiB"), help="as HEADROOM_REPORTED_BYTES")


class Checked(Struct, frozen=True, kw_only=True):
    """The traces with their names, the first of which was judged, and how; `for_github` as it was asked for."""

    traces: Sequence[tuple[str, Record]]
    judgements: tuple[Judgement, ...]
    for_github: bool


def _run(given: Namespace) -> Checked:
    limits = limits_of(given)
    try:
        traces = [
            (name, _read(option, name, given))
            for option, name in (("--trace", given.trace), ("--baseline", given.baseline))
            if name is not None
        ]
    except BadInput as error:
        save(given.junit, broken(str(error)))
        raise
    records = [record for _, record in traces]
    judgements = tuple(judge(limits, records[0], records[1] if records[1:] else None))
    save(given.junit, report(judgements))
    return Checked(traces=traces, judgements=judgements, for_github=given.format == "github")


def _read(option: str, name: str, given: Namespace) -> Record:
    """Return the trace that an option names; raises BadInput, which names the option."""
    expected = Budget(reported_bytes=given.reported_bytes, utilization_ratio=given.gpu_memory_utilization)
    record = Record(
        expected,
        keeps_gpus=given.max_leak_per_thousand_requests is not None,
        keeps_host=given.max_host_leak_per_thousand_requests is not None,
    )
    try:
        for snapshot in recorded(name, reading):
            record.step(snapshot)
    except BadInput as error:
        raise BadInput(f"{option}: {error}") from error
    return record


def _text(checked: Checked) -> Iterator[str]:
    yield from table(checked.traces, checked.judgements)
    if checked.for_github:
        yield from commands(checked.judgements)


COMMAND: Final[Command[Checked]] = Command(
    usage="%(prog)s --trace FILE [--baseline FILE] [LIMIT]... [OPTION]...",
    description=DESCRIPTION,
    epilog=EXAMPLES,
    options=options,
    run=_run,
    text=_text,
    document=lambda checked: document(checked.traces, checked.judgements),
    status=lambda checked: overall(checked.judgements).status,
)
