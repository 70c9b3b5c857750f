"""The command `watch`: a sidecar's verdicts and their curves in the terminal, live."""

from __future__ import annotations

import asyncio
import signal
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NoReturn

import httpx
from msgspec.structs import replace

from vllm_headroom.daemon.sources import close_all
from vllm_headroom.expose.drawing import find_top
from vllm_headroom.model import Failure, name_device
from vllm_headroom.scrape.http.failures import strip_advice
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.units import format_duration, format_size
from vllm_headroom.vocabulary import CONTROLS, WORDS, EngineState, LeakState, Level
from vllm_headroom_tools.cli import Command, say
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report, find_worst
from vllm_headroom_tools.openai import parse_object
from vllm_headroom_tools.options import DURATION, FILE, BadOptions, Parser, url
from vllm_headroom_tools.terminal import (
    NO_SIDECAR,
    Point,
    console,
    draw_bars,
    is_terminal,
    wrap_line,
)
from vllm_headroom_tools.trace import BadInput

if TYPE_CHECKING:
    from rich.text import Text

HERE: Final = "http://127.0.0.1:9839"
EVERY_SECONDS: Final = 2.0
TIMEOUT_SECONDS: Final = 5.0
STALE_SECONDS: Final = 900.0
"""Three times the longest sample interval."""

NO_DOCUMENT: Final = f"what answers is not vllm-headroom: {NO_SIDECAR}"
KEYS: Final = frozenset({"headroom_snapshot", "verdicts", "gpus", "history"})

Document = dict[str, Any]
FetchDocument = Callable[[], Awaitable[Document | str]]


async def fetch_document(reader: PageReader) -> Document | str:
    """Return the document, or in one line why there is none."""
    page = await reader.fetch()
    if isinstance(page, Failure):
        return f"{strip_advice(page)}: {NO_SIDECAR}"
    document = parse_object(page)
    return document if document.keys() >= KEYS else NO_DOCUMENT


def describe_verdict(verdict: dict[str, Any]) -> str:
    """Return a verdict: its level as a word, which a colour only repeats."""
    return f"{WORDS.get(verdict['level'], verdict['level']):<11}{verdict['sentence']}".translate(
        CONTROLS
    )


def _options(parser: Parser) -> None:
    parser.add_argument(
        "url", metavar="URL", nargs="?", type=url(HERE), help=f"the sidecar, else {HERE}"
    )
    parser.add_argument(
        "--headroom-url", metavar="URL", type=url(HERE), help="the same, as in advise"
    )
    text = "ask once; 1 if a leak may be out of memory so soon"
    parser.add_argument("--exit-code", metavar="DURATION", type=DURATION, help=text)
    parser.add_argument(
        "--ca-file", metavar="FILE", type=FILE, help="the authority behind its certificate, PEM"
    )


async def _run(given: Namespace) -> Report | int:
    if given.url and given.headroom_url:
        raise BadOptions("URL and --headroom-url cannot both be given")
    where = (given.url or given.headroom_url or httpx.URL(HERE)).copy_with(
        path="/snapshot.json", query=None
    )
    reader = PageReader(url=str(where), timeout_seconds=TIMEOUT_SECONDS, ca_file=given.ca_file)
    try:
        if given.json or given.exit_code is not None:
            found = await fetch_document(reader)
            if isinstance(found, str):
                raise BadInput(found)
            return (
                build_report(found)
                if given.exit_code is None
                else judge_leak(found, given.exit_code)
            )
        follow = _draw_live if is_terminal(sys.stdout) else _write_lines
        following = asyncio.create_task(
            follow(lambda: fetch_document(reader), where.netloc.decode())
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, following.cancel)
        try:
            await following
        except asyncio.CancelledError:
            return 0
        except (
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            ArithmeticError,
        ):  # a document of another shape
            raise BadInput(NO_DOCUMENT) from None
    finally:
        await close_all(reader)


VERDICTS: Final = {
    Level.ALARM: Conclusion.NOT_GOOD,
    Level.WARNING: Conclusion.NOT_GOOD,
    Level.UNKNOWN: Conclusion.CANNOT_TELL,
}


def build_report(document: Document) -> Report:
    """Return the report on a sidecar's document, which is the data; it does not judge, so its exit status is 0."""
    findings = [
        Finding(each["subject"], VERDICTS.get(each["level"], Conclusion.GOOD), each["sentence"])
        for each in document["verdicts"]
    ]
    worst = find_worst(each.verdict for each in findings) if findings else Conclusion.CANNOT_TELL
    headline = next(
        (each.text for each in findings if each.verdict is worst), "The sidecar has no verdict yet."
    )
    return Report(verdict=worst, headline=headline, findings=findings, data=document, exit_status=0)


def judge_leak(document: Document, within_seconds: float) -> Report:
    """Return the report, with status 1 where a sure leak may end an engine that serves so soon; raises BadInput."""
    try:
        is_stale = document["age_seconds"] is None or document["age_seconds"] > STALE_SECONDS
        host = document["host_time_to_oom_seconds_lower"]
        leaks = [
            (each["leak_state"], each["time_to_oom_seconds_lower"]) for each in document["gpus"]
        ]
        leaks += [(state, host) for state in (document["host_leak_state"] or {}).values()]
        near = [state for state, left in leaks if left is not None and left < within_seconds]
        is_due = document["engine_state"] == EngineState.SERVING and LeakState.LEAKING in near
        report, lines = build_report(document), list(_describe_verdicts(document).values())
    except (AttributeError, LookupError, TypeError):
        raise BadInput(NO_DOCUMENT) from None
    if is_stale:
        raise BadInput("the sidecar has no new sample: read its log")
    return replace(report, lines=lines, exit_status=int(is_due))


async def _draw_live(asked: FetchDocument, host: str) -> NoReturn:
    """Draw on the whole terminal until it is cancelled, and leave it as it was."""
    from rich.console import Group  # noqa: PLC0415 - lines and --json need no drawing
    from rich.live import Live  # noqa: PLC0415 - the same

    with Live(console=console(sys.stdout), screen=True, auto_refresh=False) as live:
        while True:
            live.update(Group(*draw_frame(await asked(), host, live.console.width)), refresh=True)
            await asyncio.sleep(EVERY_SECONDS)


async def _write_lines(asked: FetchDocument, _host: str) -> NoReturn:
    """Write what is said, and again what changed in it: a level or what the engine does, not each figure."""
    before: set[str] = set()
    while True:
        found = await asked()
        lines = {found: found} if isinstance(found, str) else _describe_verdicts(found)
        for key, line in lines.items():
            if key not in before:
                say(line.translate(CONTROLS))
        before = set(lines)
        await asyncio.sleep(EVERY_SECONDS)


def _describe_verdicts(document: Document) -> dict[str, str]:
    """Return the line of each verdict by its identity: for the engine's, with the engine's state."""
    state = {"engine": document.get("engine_state")}
    return {
        f"{each['subject']} {each['level']} {each['alert'] or state.get(each['subject'])}": describe_verdict(
            each
        )
        for each in document["verdicts"]
    }


ROWS: Final = 5


def draw_frame(found: Document | str, title: str, width: int) -> Iterator[Text]:
    """Yield what is said, then free memory of each GPU of the engine's down to zero, then the load; or why not."""
    if isinstance(found, str):
        yield _draw("bold red", found)
        return
    age = found["age_seconds"]
    seen = "nothing seen yet" if age is None else f"seen {format_duration(age)} ago"
    first = found["verdicts"][0]
    situation = f"{WORDS.get(first['level'], '')}: {first['subject']} {first.get('situation', '').replace('_', ' ')}"
    yield _draw("bold", f"{title}  {seen}  {situation}", whole=False)
    for verdict in found["verdicts"]:
        yield wrap_line(describe_verdict(verdict), width)
    history = found["history"]
    for gpu in found["gpus"]:
        curve: list[Point] = next(
            (each["free_bytes"] for each in history["gpus"] if each["uuid"] == gpu["uuid"]), []
        )
        if (gpu["info"] or {}).get("attribution"):
            yield from _draw_room(name_device(gpu["gpu"], gpu["uuid"]), gpu, curve, width)
    limit, used = found["host_memory_limit_bytes"], found["host_memory_used_bytes"]
    host = {
        "memory_free_bytes": None if limit is None or used is None else max(0, limit - used),
        "time_to_oom_seconds": found["host_time_to_oom_seconds"],
        "leak_state": "leaking" if "leaking" in (found["host_leak_state"] or {}).values() else None,
    }
    yield from _draw_room("host memory", host, history.get("host_free_bytes", []), width)
    if found["history"]["running"]:
        yield _draw("dim", "running requests, the last day at most", whole=False)
        yield from (
            _draw("blue", line)
            for line in draw_bars(found["history"]["running"], width, 1, pick=max)
        )


def _draw(style: str, text: str, *, whole: bool = True) -> Text:
    from rich.text import Text  # noqa: PLC0415 - lines and --json need no drawing

    return Text(
        text.translate(CONTROLS), style, no_wrap=not whole, overflow=None if whole else "ellipsis"
    )


def _draw_room(name: str, facts: dict[str, Any], curve: list[Point], width: int) -> Iterator[Text]:
    if not curve:
        return
    free, left = facts["memory_free_bytes"], facts["time_to_oom_seconds"]
    now = "not known now" if free is None else f"{format_size(free)} free"
    until = "" if left is None else f", full in {format_duration(left)}"
    span = format_duration(curve[-1][0] - curve[0][0])
    yield _draw("bold", f"{name}: {now}{until}; the last {span}, down to zero")
    style = "red" if facts["leak_state"] == "leaking" else "cyan"
    ends = 0.0, find_top(value for _, value in curve)
    yield from (_draw(style, line) for line in draw_bars(curve, width, ROWS, ends=ends))


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
    options=_options,
    run=_run,
)
