"""The command `watch`, which shows a sidecar's verdicts and curves live in the terminal."""

from __future__ import annotations

import asyncio
import signal
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import httpx
from msgspec.structs import replace

from vllm_headroom.daemon.sources import close_all
from vllm_headroom.expose.drawing import find_top
from vllm_headroom.model import name_device
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.units import format_duration, format_size
from vllm_headroom.vocabulary import CONTROLS, LEVEL_NAMES, EngineState, LeakState, Level
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.cli import Command, write_result
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report, find_worst
from vllm_headroom_tools.engine_choice import ENGINE_HELP, ENGINE_METAVAR
from vllm_headroom_tools.options import (
    DURATION,
    FILE,
    LOCAL_SIDECAR,
    BadOptions,
    Parser,
    find_local_sidecar,
    url,
)
from vllm_headroom_tools.sidecar import (
    FETCH_TIMEOUT_SECONDS,
    MOST_DOCUMENT_BYTES,
    NO_DOCUMENT,
    Document,
    fetch_document,
)
from vllm_headroom_tools.terminal import (
    Point,
    build_console,
    draw_bars,
    is_terminal,
    wrap_line,
)

if TYPE_CHECKING:
    from rich.text import Text

FETCH_INTERVAL_SECONDS: Final = 2.0
"""Our choice: the time between two fetches."""

SNAPSHOT_STALE_SECONDS: Final = 900.0
"""A document that is older than this is stale. This is three times the longest sample interval."""

FetchDocument = Callable[[], Awaitable[Document | str]]
"""Returns the document, or one line that explains why it is not available."""


def describe_verdict(verdict: dict[str, Any]) -> str:
    """Return a verdict's level as a word, followed by its sentence."""
    level = LEVEL_NAMES.get(verdict["level"], verdict["level"])
    return f"{level:<11}{verdict['sentence']}".translate(CONTROLS)


def _add_options(parser: Parser) -> None:
    """Declare the options of `watch`."""
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        type=url(LOCAL_SIDECAR),
        help=f"the sidecar, else {LOCAL_SIDECAR}",
    )
    parser.add_argument(
        "--headroom-url", metavar="URL", type=url(LOCAL_SIDECAR), help="the same, as in advise"
    )
    parser.add_argument("--engine", metavar=ENGINE_METAVAR, help=ENGINE_HELP)
    parser.add_argument(
        "--exit-code",
        metavar="DURATION",
        type=DURATION,
        help="ask once; 1 if a leak may be out of memory so soon",
    )
    parser.add_argument(
        "--ca-file", metavar="FILE", type=FILE, help="the authority behind its certificate, PEM"
    )


async def _run(arguments: Namespace) -> Report | int:
    """Return a report with --json or --exit-code; otherwise show verdicts until a signal arrives.

    Raises BadOptions if two addresses are given, and BadInput if the sidecar does not respond.
    """
    if arguments.url and arguments.headroom_url:
        raise BadOptions("URL and --headroom-url cannot both be given")
    sidecar = arguments.url or arguments.headroom_url or httpx.URL(find_local_sidecar())
    snapshot_url = sidecar.copy_with(path="/snapshot.json", query=None)
    reader = PageReader(
        url=str(snapshot_url),
        timeout_seconds=FETCH_TIMEOUT_SECONDS,
        max_bytes=MOST_DOCUMENT_BYTES,
        ca_file=arguments.ca_file,
    )
    try:
        # With `--json` or `--exit-code`, a program needs a single result, so the document is read
        # only once.
        if arguments.json or arguments.exit_code is not None:
            document = await fetch_document(reader, arguments.engine)
            if isinstance(document, str):
                raise BadInput(document)
            if arguments.exit_code is None:
                return build_report(document)
            return judge_leak(document, arguments.exit_code)
        fetch = partial(fetch_document, reader, arguments.engine)
        return await _follow(fetch, snapshot_url.netloc.decode())
    finally:
        await close_all(reader)


async def _follow(fetch: FetchDocument, host: str) -> int:
    """Show the document until a signal arrives; then return exit status 0.

    Raises BadInput if the document is not from a sidecar.
    """
    show = _draw_live if is_terminal(sys.stdout) else _write_lines
    showing = asyncio.create_task(show(fetch, host))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, showing.cancel)
    try:
        await showing
    except asyncio.CancelledError:
        return 0
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError):
        # These errors are raised if the document does not have the expected structure.
        raise BadInput(NO_DOCUMENT) from None


CONCLUSIONS: Final = {
    Level.ALARM: Conclusion.NOT_GOOD,
    Level.WARNING: Conclusion.NOT_GOOD,
    Level.UNKNOWN: Conclusion.CANNOT_TELL,
}
"""The conclusion for each verdict level; any other level is good."""


def build_report(document: Document) -> Report:
    """Return the report on a sidecar's document, with the document as its data.

    The exit status is always 0, because this command only shows verdicts. Raises BadInput if the
    document has a different structure.
    """
    findings = []
    try:
        for verdict in document["verdicts"]:
            conclusion = CONCLUSIONS.get(verdict["level"], Conclusion.GOOD)
            findings.append(Finding(verdict["subject"], conclusion, verdict["sentence"]))
    except (LookupError, TypeError):
        raise BadInput(NO_DOCUMENT) from None
    worst = Conclusion.CANNOT_TELL
    headline = "The sidecar has no verdict yet."
    if findings:
        worst = find_worst(finding.verdict for finding in findings)
        headline = next(finding.text for finding in findings if finding.verdict is worst)
    return Report(verdict=worst, headline=headline, findings=findings, data=document, exit_status=0)


def judge_leak(document: Document, within_seconds: float) -> Report:
    """Return the report on whether a leak may soon end a serving engine.

    The exit status is 1 if both conditions are met:

    - There is a leak alarm.
    - By the lower bound, memory may run out within `within_seconds`.

    In all other cases, the exit status is 0. Raises BadInput if the document is stale or has a
    different structure.
    """
    try:
        age_seconds = document["age_seconds"]
        is_stale = age_seconds is None or age_seconds > SNAPSHOT_STALE_SECONDS
        is_serving = document["engine_state"] == EngineState.SERVING
        is_leaking_soon = LeakState.LEAKING in _list_states_within(document, within_seconds)
        report = build_report(document)
        lines = list(_describe_verdicts(document).values())
    except (AttributeError, LookupError, TypeError):
        raise BadInput(NO_DOCUMENT) from None
    if is_stale:
        raise BadInput("the sidecar has no new sample: read its log")
    # A leak cannot bring down an engine that is already down.
    exit_status = 1 if is_serving and is_leaking_soon else 0
    return replace(report, lines=lines, exit_status=exit_status)


def _list_states_within(document: Document, within_seconds: float) -> list[str]:
    """Return the leak states of GPUs and roles that may soon run out of memory.

    Soon means within `within_seconds`.
    """
    host_seconds = document["host_time_to_oom_seconds_lower"]
    leaks = [(gpu["leak_state"], gpu["time_to_oom_seconds_lower"]) for gpu in document["gpus"]]
    leaks += [(state, host_seconds) for state in (document["host_leak_state"] or {}).values()]
    return [state for state, seconds in leaks if seconds is not None and seconds < within_seconds]


async def _draw_live(fetch: FetchDocument, host: str) -> NoReturn:
    """Draw on the full terminal until the task is cancelled, and then restore the terminal."""
    from rich.console import Group  # noqa: PLC0415 - lines and --json need no drawing
    from rich.live import Live  # noqa: PLC0415 - the same

    with Live(console=build_console(sys.stdout), screen=True, auto_refresh=False) as live:
        while True:
            frame = draw_frame(await fetch(), host, live.console.width)
            live.update(Group(*frame), refresh=True)
            await asyncio.sleep(FETCH_INTERVAL_SECONDS)


async def _write_lines(fetch: FetchDocument, _host: str) -> NoReturn:
    """Write all verdicts once, then each one whose level, alert or engine state changes.

    Lines are written until the task is cancelled.
    """
    previous_keys: set[str] = set()
    while True:
        document = await fetch()
        # A string explains why there is no document. The string is used as its own key, so that it
        # is written only once.
        lines = {document: document} if isinstance(document, str) else _describe_verdicts(document)
        for key, line in lines.items():
            if key not in previous_keys:
                write_result(line.translate(CONTROLS))
        previous_keys = set(lines)
        await asyncio.sleep(FETCH_INTERVAL_SECONDS)


def _describe_verdicts(document: Document) -> dict[str, str]:
    """Return each verdict's line under a key that changes when its level or alert changes.

    The key of an engine's verdict without an alert also changes with the engine's state.
    """
    lines = {}
    for verdict in document["verdicts"]:
        subject = verdict["subject"]
        state = document.get("engine_state") if subject == "engine" else None
        lines[f"{subject} {verdict['level']} {verdict['alert'] or state}"] = describe_verdict(
            verdict
        )
    return lines


CHART_ROWS: Final = 5


def draw_frame(document: Document | str, title: str, width: int) -> Iterator[Text]:
    """Yield the lines of the screen: verdicts, free memory and load.

    Free memory is that of the GPUs and the host. If `document` is a string, it explains why there
    is no document. If there is no document, only this string is yielded.
    """
    if isinstance(document, str):
        yield _draw("bold red", document)
        return
    yield _draw_line("bold", f"{title}  {_describe_age(document)}  {_describe_situation(document)}")
    for verdict in document["verdicts"]:
        yield wrap_line(describe_verdict(verdict), width)
    history = document["history"]
    # The list is reversed, so that the first of two curves for the same GPU is used.
    curves = {gpu["uuid"]: gpu["free_bytes"] for gpu in reversed(history["gpus"])}
    for gpu in document["gpus"]:
        is_of_engine = (gpu["info"] or {}).get("attribution")
        if is_of_engine:
            name = name_device(gpu["gpu"], gpu["uuid"])
            yield from _draw_free_memory(name, gpu, curves.get(gpu["uuid"], []), width)
    host_curve = history.get("host_free_bytes", [])
    yield from _draw_free_memory("host memory", _read_host(document), host_curve, width)
    if history["running"]:
        yield _draw_line("dim", "running requests, the last day at most")
        for line in draw_bars(history["running"], width, 1, pick=max):
            yield _draw("blue", line)


def _describe_age(document: Document) -> str:
    age_seconds = document["age_seconds"]
    if age_seconds is None:
        return "nothing seen yet"
    return f"seen {format_duration(age_seconds)} ago"


def _describe_situation(document: Document) -> str:
    """Return the level, subject and situation of the first and most important verdict."""
    verdict = document["verdicts"][0]
    situation = verdict.get("situation", "").replace("_", " ")
    return f"{LEVEL_NAMES.get(verdict['level'], '')}: {verdict['subject']} {situation}"


def _read_host(document: Document) -> dict[str, Any]:
    """Return the facts about host memory, named like those about a GPU."""
    limit_bytes = document["host_memory_limit_bytes"]
    used_bytes = document["host_memory_used_bytes"]
    free_bytes = None
    if limit_bytes is not None and used_bytes is not None:
        free_bytes = max(0, limit_bytes - used_bytes)
    is_leaking = "leaking" in (document["host_leak_state"] or {}).values()
    return {
        "memory_free_bytes": free_bytes,
        "time_to_oom_seconds": document["host_time_to_oom_seconds"],
        "leak_state": "leaking" if is_leaking else None,
    }


def _draw(style: str, text: str) -> Text:
    """Return a text in one of rich's styles; it may span several lines."""
    from rich.text import Text  # noqa: PLC0415 - lines and --json need no drawing

    return Text(text.translate(CONTROLS), style, no_wrap=False)


def _draw_line(style: str, text: str) -> Text:
    """Return a text in one of rich's styles.

    The text is cut off at the end of the line.
    """
    from rich.text import Text  # noqa: PLC0415 - lines and --json need no drawing

    return Text(text.translate(CONTROLS), style, no_wrap=True, overflow="ellipsis")


def _draw_free_memory(
    name: str, facts: dict[str, Any], curve: list[Point], width: int
) -> Iterator[Text]:
    """Yield a heading and a chart of the free memory on a scale from 0.

    Yields nothing if there is no curve.
    """
    if not curve:
        return
    free_bytes = facts["memory_free_bytes"]
    free = "not known now" if free_bytes is None else f"{format_size(free_bytes)} free"
    seconds_to_oom = facts["time_to_oom_seconds"]
    end = "" if seconds_to_oom is None else f", full in {format_duration(seconds_to_oom)}"
    span = format_duration(curve[-1][0] - curve[0][0])
    yield _draw("bold", f"{name}: {free}{end}; the last {span}, on a scale from 0")
    style = "red" if facts["leak_state"] == "leaking" else "cyan"
    top_bytes = find_top(value for _, value in curve)
    for line in draw_bars(curve, width, CHART_ROWS, ends=(0.0, top_bytes)):
        yield _draw(style, line)


COMMAND: Final[Command] = Command(
    usage="%(prog)s [OPTION]... [URL]",
    description="""\
Shows what a sidecar says, live: its verdict on each GPU, the engine and the
host, free memory of the last day, and the time that is left.
""",
    epilog="""\
On a terminal it draws until Ctrl-C, elsewhere it writes a line when something
changes. It ends with status 0; with --json and --exit-code, which ask once,
with 2 without an answer.

Example:
  vllm-headroom watch http://gpu-7:9839
  kubectl exec -it POD -c headroom -- vllm-headroom watch
""",
    options=_add_options,
    run=_run,
)
