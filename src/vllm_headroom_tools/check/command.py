"""The command `check`."""

import argparse
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from vllm_headroom.inputs import parse_number
from vllm_headroom.trace.flight import FLIGHT
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.check.baseline import judge_growths
from vllm_headroom_tools.check.judgement import (
    COST,
    DISCREPANCY,
    GROWTH,
    HOST_LEAK,
    LEAK,
    PREEMPTIONS,
    RESTARTS,
    Judgement,
)
from vllm_headroom_tools.check.leaks import judge_gpu_leaks, judge_host_leaks
from vllm_headroom_tools.check.limits import (
    judge_costs,
    judge_discrepancies,
    judge_preemptions,
    judge_restarts,
)
from vllm_headroom_tools.check.record import Budget, TraceRecord
from vllm_headroom_tools.check.report import build_junit, build_report, build_suite
from vllm_headroom_tools.check.starts import build_start_report, judge_starts
from vllm_headroom_tools.cli import Command, save
from vllm_headroom_tools.conclusion import Conclusion, Report
from vllm_headroom_tools.engine_choice import ENGINE_HELP, ENGINE_METAVAR
from vllm_headroom_tools.engine_folders import find_engine_folder
from vllm_headroom_tools.engine_log import read_engine_log
from vllm_headroom_tools.options import (
    FILE,
    LOG,
    RATIO,
    SHARE,
    TRACE,
    BadOptions,
    Parser,
    Value,
    bounded,
    choice,
    name_option,
    size_value,
    whole_number,
)
from vllm_headroom_tools.trace import read_trace

SIZE: Final = size_value("1MiB")
NUMBER: Final = Value(read=bounded(parse_number, 0, 1.7e308), accepts="a number, 0 or more")

Judge = Callable[[TraceRecord, TraceRecord | None, float], Iterator[Judgement]]
"""Takes a trace, its baseline and the bound. Yields a judgement on each GPU, role or engine."""


class Limit(Struct, frozen=True, kw_only=True):
    """A limit that the operator can set, and its option."""

    name: str  # The name in the report.
    judge: Judge
    metavar: str  # The option's placeholder in --help.
    kind: Value[Any]  # The type of the value that the option takes.
    help: str


LIMITS: Final = {
    "max_leak_per_thousand_requests": Limit(
        name=LEAK,
        judge=judge_gpu_leaks,
        metavar="SIZE",
        kind=SIZE,
        help="GPU memory, by the leak detector",
    ),
    "max_host_leak_per_thousand_requests": Limit(
        name=HOST_LEAK,
        judge=judge_host_leaks,
        metavar="SIZE",
        kind=SIZE,
        help="host memory, in the same way",
    ),
    "max_discrepancy": Limit(
        name=DISCREPANCY,
        judge=judge_discrepancies,
        metavar="SHARE",
        kind=SHARE,
        help="GPU memory held beyond the engine's budget",
    ),
    "max_bytes_per_request": Limit(
        name=COST,
        judge=judge_costs,
        metavar="SIZE",
        kind=SIZE,
        help="GPU memory divided by running requests, at full load",
    ),
    "max_preemptions_per_thousand_requests": Limit(
        name=PREEMPTIONS,
        judge=judge_preemptions,
        metavar="N",
        kind=NUMBER,
        help="as vLLM counts them",
    ),
    "max_growth_over_baseline": Limit(
        name=GROWTH,
        judge=judge_growths,
        metavar="SHARE",
        kind=SHARE,
        help="GPU and host memory at the same load; the KV cache may shrink by the same share",
    ),
    "max_restarts": Limit(
        name=RESTARTS,
        judge=judge_restarts,
        metavar="N",
        kind=whole_number(0),
        help="restarts of the engine during the trace; 0 if not given",
    ),
}
"""The limits by option."""


def judge_limits(
    bounds: Mapping[str, float], record: TraceRecord, baseline: TraceRecord | None
) -> Iterator[Judgement]:
    """Yield the judgements for each limit; `bounds` maps each limit's option to its value.

    If a limit applies to no GPU or process in the trace, its only judgement is "cannot tell".
    """
    for option, bound in bounds.items():
        limit = LIMITS[option]
        judgements = tuple(limit.judge(record, baseline, bound))
        if judgements:
            yield from judgements
            continue
        subject = "process" if limit.name == HOST_LEAK else "GPU"
        # The trace has no GPU or process of the engine. If nothing were reported, this would look
        # like a pass.
        reason = f"the trace has no {subject} of the engine's"
        yield Judgement(limit=limit.name, verdict=Conclusion.CANNOT_TELL, reason=reason)


def read_limits(options: Namespace) -> dict[str, float]:
    """Return the bound for each option that was given, and the bound on restarts.

    Raises BadOptions if no limit is set, or if options conflict.
    """
    bounds = {}
    for option in LIMITS:
        bound = getattr(options, option)
        if bound is not None:
            bounds[option] = bound
    problems = list(_find_conflicts(options, bounds))
    if problems:
        raise BadOptions(*problems)
    # our choice: without the option, no restart is allowed
    return {"max_restarts": 0, **bounds}


def _find_conflicts(options: Namespace, bounds: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for each invalid combination of options."""
    if not bounds:
        yield "needs a limit, such as --max-leak-per-thousand-requests 1MiB"
    if "max_growth_over_baseline" in bounds and options.baseline is None:
        yield "--max-growth-over-baseline needs a --baseline"
    if options.trace == "-" and options.baseline == "-":
        yield "--trace and --baseline cannot both be standard input"
    if options.json and options.format is not None:
        yield "--json and --format cannot both be given"
    if options.gpu_memory_utilization is not None and options.reported_bytes is not None:
        yield "--gpu-memory-utilization and --reported-bytes cannot both be given"


def _add_options(parser: Parser) -> None:
    """Declare the options of `check`: the traces, the limits and the report files."""
    traces = parser.add_argument_group("traces")
    traces.add_argument(
        "--trace",
        metavar="FILE",
        type=TRACE,
        help="what is judged, or a state folder with a flight record; - for stdin",
    )
    traces.add_argument(
        "--baseline", metavar="FILE", type=TRACE, help="an older version's, under the same load"
    )
    traces.add_argument("--engine", metavar=ENGINE_METAVAR, help=ENGINE_HELP)
    parser.add_argument("newer_log", metavar="LOG", nargs="?", type=LOG, help=argparse.SUPPRESS)
    traces.add_argument(
        "--log",
        dest="logs",
        metavar="FILE",
        type=LOG,
        default=[],
        help="in place of traces the engine's logs of two starts: --log OLDER NEWER",
    )
    limits = parser.add_argument_group("limits, on each GPU, process or engine; at least one")
    for option, limit in LIMITS.items():
        limits.add_argument(
            name_option(option), metavar=limit.metavar, type=limit.kind, help=limit.help
        )
    budget = parser.add_argument_group("the engine's budget on each GPU, for --max-discrepancy")
    budget.add_argument("--gpu-memory-utilization", metavar="RATIO", type=RATIO, help="as vLLM's")
    budget.add_argument(
        "--reported-bytes",
        metavar="SIZE",
        type=size_value("72GiB"),
        help="as HEADROOM_REPORTED_BYTES",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--junit", metavar="FILE", type=FILE, help="write JUnit XML, which GitLab and Jenkins show"
    )
    output.add_argument(
        "--format",
        metavar="NAME",
        type=choice(("text", "github")),
        help="text, or github with annotations for a workflow's run",
    )


def _compare_logs(options: Namespace) -> Report:
    """Compare the starts in two logs, and return the report.

    If requested, the JUnit file is written. Raises BadOptions if an option only applies to traces.
    Raises BadInput if a file is not a log.
    """
    names = [*options.logs]
    if options.newer_log is not None:
        names.append(options.newer_log)
    problems = []
    if len(names) != LOGS:
        problems.append(f"--log: needs two files, got {len(names)}: --log OLDER NEWER")
    if names.count("-") > 1:
        problems.append("--log: both logs cannot be standard input")
    # An option that only applies to traces must not be silently ignored.
    trace_options = (
        "trace",
        "baseline",
        "engine",
        "gpu_memory_utilization",
        "reported_bytes",
        *LIMITS,
    )
    problems += [
        f"{name_option(name)} is about traces and cannot be given with --log"
        for name in trace_options
        # The limit on growth is the only limit that also applies to logs.
        if name != GROWTH_LIMIT and getattr(options, name) is not None
    ]
    if options.json and options.format is not None:
        problems.append("--json and --format cannot both be given")
    if problems:
        raise BadOptions(*problems)
    starts = []
    for name in names:
        try:
            log = read_engine_log(name)
        except BadInput as error:
            problem = f"--log: {error}"
            suite = build_suite([("log", Conclusion.CANNOT_TELL, problem, "")])
            save(options.junit, suite, inputs=names)
            raise BadInput(problem) from error
        # A log may contain several starts; the latest one is compared.
        starts.append((name, log.starts[-1]))
    judgements = judge_starts(starts[0][1], starts[1][1], options.max_growth_over_baseline)
    save(options.junit, build_junit(judgements), inputs=names)
    return build_start_report(starts, judgements, for_github=options.format == "github")


def _locate_trace(name: str, engine: str | None) -> str:
    """Return the file to read.

    If `name` is a state folder, the result is the folder's flight record. If not, the result is
    `name` itself. Raises BadInput if the folder has several engines and none is chosen.
    """
    place = Path(name)
    if not place.is_dir():
        return name
    return str(find_engine_folder(place, engine) / FLIGHT)


LOGS: Final = 2
GROWTH_LIMIT: Final = "max_growth_over_baseline"
"""The only limit that applies to starts."""


def _run(options: Namespace) -> Report:
    """Judge the trace, write the JUnit file if requested, and return the report."""
    if options.logs:
        return _compare_logs(options)
    # A positional argument may be a log only if --log is also given.
    if options.newer_log is not None:
        raise BadOptions(
            f"{options.newer_log!r}: needs --trace before it, or --log before two logs"
        )
    if options.trace is None:
        raise BadOptions(f"--trace: needed, accepts {TRACE.accepts}")
    bounds = read_limits(options)
    budget = Budget(
        reported_bytes=options.reported_bytes, utilization_ratio=options.gpu_memory_utilization
    )
    # only the leak limits rerun the detector, which needs the readings
    keeps_readings = any(LIMITS[option].name in (LEAK, HOST_LEAK) for option in bounds)
    inputs = (options.trace, options.baseline)
    if options.engine is not None and not any(name and Path(name).is_dir() for name in inputs):
        raise BadOptions("--engine: needs a state folder as --trace or --baseline")
    traces = []
    for flag, name in zip(("--trace", "--baseline"), inputs, strict=True):
        if name is None:
            continue
        record = TraceRecord(budget, keeps_readings=keeps_readings)
        try:
            for snapshot in read_trace(_locate_trace(name, options.engine)):
                record.step(snapshot)
        except BadInput as error:
            problem = f"{flag}: {error}"
            # otherwise, CI would show the result file of an earlier build
            suite = build_suite([("trace", Conclusion.CANNOT_TELL, problem, "")])
            save(options.junit, suite, inputs=inputs)
            raise BadInput(problem) from error
        traces.append((name, record))
    records = [record for _, record in traces]
    baseline = records[1] if len(records) > 1 else None
    judgements = tuple(judge_limits(bounds, records[0], baseline))
    save(options.junit, build_junit(judgements), inputs=inputs)
    return build_report(traces, judgements, for_github=options.format == "github")


COMMAND: Final[Command] = Command(
    usage=(
        "%(prog)s --trace FILE [--baseline FILE] [LIMIT]... [OPTION]...\n"
        "       %(prog)s --log OLDER NEWER [OPTION]..."
    ),
    description="""\
The gate for CI: judges whether an engine kept its limits while a trace was
recorded, beside the figures of an older version. A limit is kept, exceeded, or
cannot be judged on this trace; the check passes if all limits are kept.

With --log it compares two starts by the engine's own logs: weights,
activations, CUDA graphs and the KV cache, by version.
""",
    epilog="""\
It ends with status 0 when every limit is kept, 1 when one is exceeded, and 2
when one cannot be judged or the trace cannot be read.

Example:
  vllm-headroom check --trace new.jsonl --max-leak-per-thousand-requests 1MiB \\
    --baseline old.jsonl --max-growth-over-baseline 5% --junit report.xml
  vllm-headroom check --log vllm-0.31.log vllm-0.32.log
""",
    options=_add_options,
    run=_run,
)
