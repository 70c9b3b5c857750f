"""The options of `load`: words of the command line → order."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx

from vllm_headroom.commands.cli import Parser, accepting
from vllm_headroom.commands.load.lengths import lengths
from vllm_headroom.commands.load.order import Order
from vllm_headroom.commands.load.prompts import Api
from vllm_headroom.commands.load.target import base_url
from vllm_headroom.config.values import gpu_names, metrics_url
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.units import duration_seconds, share

MOST_CLIENTS: Final = 1_000_000

DESCRIPTION: Final = """\
Puts a bounded load on a server that you name, and watches its memory meanwhile
as the daemon does: steps of 50, 75, 100 and 120 % of --concurrency, in which
each client asks again as soon as it has its answer. Run it beside vLLM, so that
it sees the GPUs and the processes.
"""

EXAMPLES: Final = """\
LENGTHS are a number of tokens, or two such as 256..2048: all lengths between
them, each doubling as likely as the next. Of prompts they are about so many, for
words stand in for tokens; the report has the server's own counts.

It ends with status 0 when requests were served and no answer was out of memory;
with 1 when one was, when none succeeded, when the engine died or leaks; with 2
when it cannot tell or cannot use its options. Ctrl-C ends the step and reports
what there is.

Example:
  vllm-headroom load --url http://127.0.0.1:8000 --concurrency 64
  vllm-headroom load --url http://127.0.0.1:8000 --concurrency 200 --api chat \\
    --prompt-tokens 256..8192 --output-tokens 64..512 --shared-prefix 30% \\
    --duration 5m --max-requests 20000 --json
"""

Add = Callable[..., Any]


def parser() -> Parser:
    """Return what understands the words."""
    made = Parser(
        prog="vllm-headroom load",
        usage="%(prog)s --url URL --concurrency NUMBER [OPTION]...",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for group in (_target, _asked, _bounds, _sight):
        group(made.add_argument)
    return made


def order(given: argparse.Namespace) -> Order:
    """Return what was ordered."""
    when = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return Order(
        url=given.url,
        metrics_url=given.metrics_url,
        api=Api(given.api),
        model=given.model,
        concurrency=given.concurrency,
        seconds=given.duration,
        grace_seconds=given.grace,
        timeout_seconds=given.timeout,
        prompt_tokens=given.prompt_tokens,
        output_tokens=given.output_tokens,
        shared_ratio=given.shared_prefix,
        most_requests=given.max_requests,
        requests_per_second=given.rate,
        bearer_token_file=given.bearer_token_file,
        ca_file=given.ca_file,
        gpus=given.gpus,
        trace=given.trace or Path(f"vllm-headroom-load-{when}.jsonl"),
    )


def _target(add: Add) -> None:
    url = accepting(base_url, "an http or https URL without user, password and query")
    add("--url", metavar="URL", type=url, required=True, help="the server; there is no default")
    add("--api", choices=list(map(str, Api)), default=str(Api.COMPLETIONS), help="how to ask; without it %(default)s")
    add("--model", metavar="NAME", help="the model to ask; without it the first that the server lists")
    add("--bearer-token-file", metavar="FILE", type=Path, help="a file with the token to send")
    add("--ca-file", metavar="FILE", type=Path, help="the certificates, in PEM, to trust for https")


def _asked(add: Add) -> None:
    number = accepting(_number, f"a whole number from 1 to {MOST_CLIENTS}")
    add("--concurrency", metavar="NUMBER", type=number, required=True, help="clients in the step of 100 %%")
    of_tokens = accepting(lengths, "a number of tokens, or two such as 256..2048")
    add("--prompt-tokens", metavar="LENGTHS", type=of_tokens, default="512", help="without it %(default)s")
    add("--output-tokens", metavar="LENGTHS", type=of_tokens, default="128", help="without it %(default)s")
    of_prompt = accepting(_ratio, "a share such as 30% or 0.3")
    add("--shared-prefix", metavar="SHARE", type=of_prompt, default="0", help="of each prompt, the same in all")


def _bounds(add: Add) -> None:
    time = accepting(_seconds, "a duration above 0 such as 90s, 5m or 1h")
    add("--duration", metavar="TIME", type=time, default="60s", help="of each step; without it %(default)s")
    add("--grace", metavar="TIME", type=time, default="30s", help="for what is open then; without it %(default)s")
    add("--timeout", metavar="TIME", type=time, default="5m", help="of one request; without it %(default)s")
    count = accepting(_count, "a whole number above 0")
    add("--max-requests", metavar="NUMBER", type=count, help="requests of all steps together, at most")
    rate = accepting(_rate, "a number above 0")
    add("--rate", metavar="NUMBER", type=rate, help="requests a second, at most")


def _sight(add: Add) -> None:
    page = accepting(_page, "an http or https URL")
    add("--metrics-url", metavar="URL", type=page, help="the engine's page; without it /metrics of --url")
    names = accepting(_selection, "auto, all, or GPU indices or UUIDs separated by commas")
    add("--gpus", metavar="GPUS", type=names, help="the engine's; without it those its processes use")
    add("--trace", metavar="FILE", type=Path, help="the new file to record in; without it one named by the time")
    add("--json", action="store_true", help="print one JSON object instead of words")


def _number(text: str) -> int:
    number = _count(text)
    if number > MOST_CLIENTS:
        raise ValueError
    return number


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ValueError
    return int(text)


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 < rate < float("inf"):
        raise ValueError
    return rate


def _ratio(text: str) -> float:
    ratio = share(text)
    if ratio > 1:
        raise ValueError
    return ratio


def _seconds(text: str) -> float:
    seconds = duration_seconds(text)
    if not 0 < seconds < float("inf"):
        raise ValueError
    return seconds


def _page(text: str) -> httpx.URL:
    return httpx.URL(metrics_url(text))


def _selection(text: str) -> Selection | None:
    names = gpu_names(text)
    if names == "auto":
        return None
    return Selection(listed=names) if isinstance(names, tuple) else Selection(everything=True)
