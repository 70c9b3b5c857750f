"""The command `replay`."""

import re
import shutil
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import datetime
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import asdict

from vllm_headroom.derive.host_memory import SCOPES
from vllm_headroom.derive.leak.inside import PLACES
from vllm_headroom.model import Snapshot, name_device
from vllm_headroom.trace.entries import build_host_entry
from vllm_headroom.units import NUMBER, format_duration, format_instant, format_size, parse_duration
from vllm_headroom_tools.cli import Command, save, save_lines
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report, find_worst
from vllm_headroom_tools.history import (
    Curves,
    Interval,
    LeakCourse,
    LeakReplay,
    LeakVerdict,
    Moment,
    describe_span,
    judge_course,
)
from vllm_headroom_tools.options import (
    FILE,
    TRACE,
    BadOptions,
    Parser,
    Value,
    add_reported_bytes,
    bounded,
    url,
)
from vllm_headroom_tools.replay.picture import draw_charts, draw_replay
from vllm_headroom_tools.trace import name_by_index, parse_snapshot, read_trace

if TYPE_CHECKING:
    from vllm_headroom_tools.replay.openmetrics import SampleExport

MIN_STRANDED_RATIO: Final = 0.01
"""The smallest stranded share of a KV cache that is reported, as a ratio.

An idle engine may free a block or two late. The alert HeadroomKvBlocksLeak watches for growth above
this share.
"""

NO_GPU: Final = "The trace has no GPU of the engine's."
MOST_INTERVALS: Final = 5
"""Our choice: the number of intervals per series in the text report. With --json, all of them are
listed.
"""


def format_verdict(replay: LeakReplay) -> Iterator[str]:
    """Yield the report's lines about the span, each GPU and each kind of host process.

    Lines about host memory, sleeps and idle engines follow. For a trace without samples, there is a
    single line.
    """
    if not replay.samples:
        yield "The trace has no samples."
        return
    begin, end = replay.span
    yield f"{describe_span(replay.samples, begin, end)}."
    for name, course in _name_series(replay):
        if course.growing or course.leaking:
            yield ""
        yield _judge_series(name, course, end - begin).text
        yield from _format_intervals("early warning", course.growing)
        yield from _format_intervals("alarm", course.leaking)
        first_alarm = course.first_alarm
        last_alarm = course.last_alarm
        if first_alarm is not None:
            delay = format_duration(first_alarm.seconds - begin)
            yield f"  at the first alarm, {delay} after the trace begins:"
            yield from _format_moment(first_alarm)
        # The last alarm has a better estimate than the first.
        if last_alarm is not None and last_alarm is not first_alarm:
            yield f"  at the last, {format_instant(last_alarm.seconds)}:"
            yield from _format_moment(last_alarm)
    yield from _describe_host(replay)
    if not replay.gpus:
        yield NO_GPU


def _name_series(replay: LeakReplay) -> Iterator[tuple[str, LeakCourse]]:
    """Yield the name and leak course of each GPU and then of each host role."""
    for index, uuid, course in replay.gpus:
        name = f"GPU {index}"
        if uuid != name_by_index(index):
            name += f" ({uuid})"
        yield name, course
    for role, course in replay.host:
        yield f"Host memory of {role}", course


def _describe_host(replay: LeakReplay) -> Iterator[str]:
    """Yield the lines about host memory, sleeps, and the KV cache of an idle engine."""
    memory = replay.memory
    if memory is not None and memory.used_bytes is not None:
        use = format_size(memory.used_bytes)
        if memory.limit_bytes is not None:
            use += f" of {format_size(memory.limit_bytes)}"
        yield f"Host memory: at most {use} in use{SCOPES.get(memory.basis, '')}."
    if memory is not None and memory.oom_kills:
        yield f"Out-of-memory kills by the kernel: {memory.oom_kills}."
    for gpu, sleeps in replay.residues.items():
        residues_bytes = tuple(sleeps.values())
        line = f"{name_device(*gpu)}, asleep: kept {format_size(residues_bytes[0])}"
        if len(residues_bytes) > 1:
            newest = format_size(residues_bytes[-1])
            line += f" in the first sleep, {newest} in the last of {len(residues_bytes)}"
        yield f"{line}."
    for (model, engine), ratio in replay.stranded.items():
        # A few blocks are always held, so a small share is not reported.
        if ratio >= MIN_STRANDED_RATIO:
            yield (
                f"{model}, engine {engine}: idle, at most {ratio:.0%} of its KV cache was held by"
                " no request."
            )


def _judge_series(name: str, course: LeakCourse, span_seconds: float) -> Finding:
    """Return the finding on a series; an early warning alone is not conclusive."""
    verdict, reason = judge_course(course, span_seconds)
    match verdict:
        case LeakVerdict.LEAKING:
            conclusion = Conclusion.NOT_GOOD
            answer = "LEAKING" if course.is_holder_known else "FILLS, by whom is not known"
        case LeakVerdict.NO_LEAK:
            conclusion = Conclusion.GOOD
            answer = "no leak"
        case LeakVerdict.GROWING:
            conclusion = Conclusion.CANNOT_TELL
            answer = reason
        case LeakVerdict.CANNOT_TELL:
            conclusion = Conclusion.CANNOT_TELL
            answer = f"cannot tell, {reason}"
    return Finding(name, conclusion, f"{name}: {answer}; {course.state} at the end.")


def _format_intervals(name: str, intervals: list[Interval]) -> Iterator[str]:
    """Yield a line for each of the first intervals, and one that counts the others."""
    for begin, end in intervals[:MOST_INTERVALS]:
        until = "to the end"
        if end is not None:
            until = f"to {format_instant(end)}, {format_duration(end - begin)}"
        yield f"  {name:<14} {format_instant(begin)} {until}"
    if len(intervals) > MOST_INTERVALS:
        yield f"  {name:<14} and {len(intervals) - MOST_INTERVALS} times more"


def _format_moment(moment: Moment) -> Iterator[str]:
    """Yield a line for each figure that the detector reported at this sample."""
    if moment.bytes_per_second is not None:
        yield f"    how fast     {_format_rate(moment, moment.bytes_per_second)}"
    if moment.by_requests is not None:
        yield f"    driven by    {'requests' if moment.by_requests else 'time'}"
    if moment.location is not None:
        yield f"    in           {PLACES[moment.location]}"
    if moment.leaked_bytes is not None:
        yield f"    how much     {format_size(moment.leaked_bytes)} since it began"
    if moment.time_to_oom_seconds is not None:
        time_left = f"about {format_duration(moment.time_to_oom_seconds)}"
        # The lower bound comes first, because operators should plan with it.
        if moment.time_to_oom_seconds_lower is not None:
            earliest = format_duration(moment.time_to_oom_seconds_lower)
            time_left = f"{earliest} at the earliest, likely {time_left}"
        yield f"    time to OOM  {time_left}"


def _format_rate(moment: Moment, bytes_per_second: float) -> str:
    """Return the rate over time with its 95 % interval.

    If the rate per request is known, it is added.
    """
    text = f"{format_size(bytes_per_second)}/s"
    lower = moment.bytes_per_second_lower
    upper = moment.bytes_per_second_upper
    if lower is not None and upper is not None:
        text += f" (95 %: {format_size(lower)}/s to {format_size(upper)}/s)"
    if moment.bytes_per_request is not None:
        text += f", {format_size(1000 * moment.bytes_per_request)} per thousand requests"
    return text


def _build_data(replay: LeakReplay) -> dict[str, Any]:
    """Return the --json data.

    An interval that lasts until the trace's end has None as its end.
    """
    begin, end = replay.span
    return {
        "samples": replay.samples,
        "span_seconds": end - begin,
        "gpus": [
            {
                "gpu": index,
                "uuid": None if uuid == name_by_index(index) else uuid,
                "state": course.state,
                "verdict": judge_course(course, end - begin)[0],
                "growing_intervals": course.growing,
                "leaking_intervals": course.leaking,
                "first_leaking": _build_figures(course.first_alarm),
                "last_leaking": _build_figures(course.last_alarm),
            }
            for index, uuid, course in replay.gpus
        ],
        "host": [
            {
                "process": role,
                "state": course.state,
                "verdict": judge_course(course, end - begin)[0],
                "growing_intervals": course.growing,
                "leaking_intervals": course.leaking,
                "first_leaking": _build_figures(course.first_alarm),
                "last_leaking": _build_figures(course.last_alarm),
            }
            for role, course in replay.host
        ],
        "host_memory": None if replay.memory is None else build_host_entry(replay.memory),
        "sleeps": [
            {"gpu": int(gpu), "uuid": uuid, "residue_bytes": list(sleeps.values())}
            for (gpu, uuid), sleeps in replay.residues.items()
        ],
        "stranded": [
            {"model_name": model, "engine": engine, "most_ratio": ratio}
            for (model, engine), ratio in replay.stranded.items()
        ],
    }


def _build_figures(moment: Moment | None) -> dict[str, float | None] | None:
    """Return the --json figures of one sample, or None if there is no sample."""
    if moment is None:
        return None
    figures = asdict(moment)
    # The JSON schema has no such field.
    del figures["by_requests"]
    return {"t": figures.pop("seconds"), **figures}


_MATCHER: Final = re.compile(r"\s*([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*(.*?)\s*", re.DOTALL)
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|`[^`]*`')


def _parse_time(text: str) -> tuple[bool, float]:
    """Parse a time that is relative to now or absolute.

    Returns whether the time is relative, and its seconds from now or since the epoch. Raises
    ValueError if the text is not a time or has no time zone.
    """
    if text == "now":
        return True, 0.0
    # Relative times are resolved later, so that all of them refer to the same moment.
    if text.startswith("-"):
        return True, -parse_duration(text[1:])
    if re.fullmatch(NUMBER, text):
        return False, float(text)
    moment = datetime.fromisoformat(text)
    # Without a time zone, the text could mean the reader's or the server's local time.
    if moment.tzinfo is None:
        raise ValueError
    return False, moment.timestamp()


def _parse_matcher(text: str) -> str:
    """Return a PromQL label matcher, with its quotes restored if a shell removed them.

    Raises ValueError if the text is not a matcher.
    """
    match = _MATCHER.fullmatch(text)
    if match is None:
        raise ValueError
    label, operator, value = match.groups()
    if not _QUOTED.fullmatch(value):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        value = f'"{escaped}"'
    return f"{label}{operator}{value}"


TIME: Final = Value(
    read=_parse_time,
    accepts="2026-01-31T08:00:00Z, seconds since the epoch, now, or a time ago such as -24h",
)
STEP: Final = Value(
    read=bounded(parse_duration, 1, inf), accepts="a duration from 1s on such as 15s, 1m or 1h"
)
MATCHER: Final = Value(read=_parse_matcher, accepts='label="value", with =, !=, =~ or !~')


def _add_options(parser: Parser) -> None:
    """Declare the options of `replay`."""
    parser.add_argument(
        "trace", metavar="TRACE", nargs="?", type=TRACE, help="the trace, - for standard input"
    )
    parser.add_argument(
        "--fail-on-leak", action="store_true", help="exit with status 1 if there was an alarm"
    )
    add_reported_bytes(parser)
    parser.add_argument("--svg", metavar="FILE", type=FILE, help="draw memory and load into a file")
    parser.add_argument(
        "--openmetrics",
        metavar="FILE",
        type=FILE,
        help="write the daemon's series, for promtool's create-blocks-from",
    )
    about = """\
Reads this exporter's series, or DCGM's or nvidia_gpu_exporter's together with
vLLM's. A history is as coarse as its scrape interval and lacks what happened
between two scrapes."""
    add = parser.add_argument_group("history", about).add_argument
    add("--from-prometheus", metavar="URL", type=url("http://prometheus:9090"), help="Prometheus")
    add(
        "--start",
        metavar="TIME",
        type=TIME,
        help="2026-01-31T08:00:00Z, seconds since the epoch, or -24h",
    )
    add(
        "--end",
        metavar="TIME",
        type=TIME,
        default="now",
        help="the same, or now, which is the default",
    )
    step = "between samples: 15s, or the scrape interval where it is longer"
    add("--step", metavar="TIME", type=STEP, default="15s", help=step)
    for option, whose in (
        ("--match", "all"),
        ("--match-gpu", "the GPUs'"),
        ("--match-engine", "the engine's"),
    ):
        text = f"choose among {whose} series; may be given again"
        add(option, metavar='LABEL="VALUE"', type=MATCHER, default=[], help=text)
    add("--bearer-token-file", metavar="FILE", type=FILE, help="a token for Prometheus")
    add("--ca-file", metavar="FILE", type=FILE, help="the CA of its certificate, PEM")


NARROWEST_COLUMNS: Final = 20
"""Our choice: a narrower chart would show nothing useful."""

WIDEST_COLUMNS: Final = 160
"""Our choice: a wider chart would leave no room for other windows next to it."""


def build_report(replay: LeakReplay, curves: Curves, *, fails: bool = False) -> Report:
    """Return the report on the detector's verdicts for a trace.

    The verdict is the worst of all series, or "cannot tell" without series. The exit status is 1
    after an alarm if `fails` is set, and 0 otherwise.
    """
    begin, end = replay.span
    findings = [_judge_series(name, course, end - begin) for name, course in _name_series(replay)]
    worst = Conclusion.CANNOT_TELL
    headline = NO_GPU
    if findings:
        worst = find_worst(finding.verdict for finding in findings)
        headline = next(finding.text for finding in findings if finding.verdict is worst)
    columns = max(NARROWEST_COLUMNS, shutil.get_terminal_size().columns)
    columns = min(columns, WIDEST_COLUMNS)
    has_leaked = any(course.leaking for _, course in _name_series(replay))
    return Report(
        verdict=worst,
        headline=headline,
        findings=findings,
        data=_build_data(replay),
        lines=chain(format_verdict(replay), draw_charts(replay, curves, columns=columns)),
        exit_status=int(fails and has_leaked),
    )


def _run(options: Namespace) -> Report:
    """Run the detector on the recorded data and return the report.

    Raises BadOptions if no source or more than one is named.
    """
    if (options.trace is None) == (options.from_prometheus is None):
        raise BadOptions("needs a TRACE or --from-prometheus, and not both")
    if options.openmetrics is None:
        return _run_detector(options, None)
    # Imported here, because this module imports the daemon.
    from vllm_headroom_tools.replay.openmetrics import SampleExport  # noqa: PLC0415

    # Prometheus data does not show why a source is absent.
    export = SampleExport(
        has_health=options.from_prometheus is None, reported_bytes=options.reported_bytes
    )
    with closing(export):
        return _run_detector(options, export)


def _run_detector(options: Namespace, export: "SampleExport | None") -> Report:
    """Run all snapshots through the detector, write the requested files, and return the report."""
    replay = LeakReplay(reported_bytes=options.reported_bytes)
    # The curves are kept only for a picture, because they need memory for every sample.
    curves = Curves()
    has_charts = options.svg or not options.json
    for snapshot in _read_snapshots(options):
        judged_snapshot = replay.step(snapshot)
        if has_charts:
            curves.step(snapshot)
        if export is not None:
            export.step(judged_snapshot, replay)
    if export is not None:
        lines = export.write_lines()
        save_lines(options.openmetrics, lines, "--openmetrics ", (options.trace,))
    if options.svg:
        inputs = (options.trace, options.openmetrics)
        save(options.svg, draw_replay(replay, curves), "--svg ", inputs)
    return build_report(replay, curves, fails=options.fail_on_leak)


def _read_snapshots(options: Namespace) -> Iterable[Snapshot]:
    """Return an iterable that reads snapshots one by one from the trace or from Prometheus.

    BadInput may be raised while the snapshots are read.
    """
    if options.from_prometheus is None:
        return read_trace(options.trace)
    # Imported here, because reading a trace does not need an HTTP client.
    from vllm_headroom_tools.replay.prometheus.records import read_records  # noqa: PLC0415

    return map(parse_snapshot, read_records(options))


COMMAND: Final[Command] = Command(
    usage="%(prog)s [OPTION]... TRACE\n"
    "       %(prog)s [OPTION]... --from-prometheus URL --start TIME",
    description="""\
Runs a recorded trace through the daemon's leak detector: would it have caught
our outage?

TRACE is HEADROOM_TRACE_FILE of the daemon, flight.jsonl of its state directory
or - for standard input.
""",
    epilog="""\
The exit status is 0, 1 if there was an alarm and --fail-on-leak is given, and 2
if the trace cannot be read.

Example:
  vllm-headroom replay trace.jsonl
  cat trace.jsonl.1 trace.jsonl | vllm-headroom replay - --json
""",
    options=_add_options,
    run=_run,
)
