"""The options of `load`, and the order that they make."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx

from vllm_headroom.commands.load.lengths import lengths
from vllm_headroom.commands.load.order import Order
from vllm_headroom.commands.load.prompts import Api
from vllm_headroom.commands.load.target import base_url
from vllm_headroom.config.kinds import (
    DURATION,
    FILE,
    GPUS,
    NUMBER,
    SHARE,
    Value,
    choice,
    page_url,
    shown_url,
    whole,
)
from vllm_headroom.config.options import Parser
from vllm_headroom.derive.attribution import Selection

MOST_CLIENTS: Final = 1_000_000

DESCRIPTION: Final = """\
Puts a bounded load on a server that you name, and watches its memory meanwhile
as the daemon does: steps of 50, 75, 100 and 120 % of --concurrency, in which
each client asks again as soon as it has its answer. Run it beside vLLM, so that
it sees the GPUs and the processes.
"""

EXAMPLES: Final = """\
LENGTHS are a number of tokens, or two such as 256..2048: all lengths between
them, each doubling as likely as the next. Of prompts they are about so many:
words stand in for tokens, and the report has the server's own counts.

It ends with status 0 when requests were served, next to none failed and no
answer was out of memory; with 1 when one was, when more failed, when the engine
died or leaks; with 2 when it cannot tell, was interrupted or cannot use its
options. Ctrl-C ends the step and reports what there is.

Example:
  vllm-headroom load --engine-url http://127.0.0.1:8000 --concurrency 64
  vllm-headroom load --engine-url http://127.0.0.1:8000 --concurrency 200 \\
    --api chat --prompt-tokens 256..8192 --output-tokens 64..512 \\
    --shared-prefix 30% --duration 5m --max-requests 20000 --json
"""

Add = Callable[..., Any]


def options(parser: Parser) -> None:
    """Add the options to the parser."""
    for group in (_target, _asked, _bounds, _sight):
        group(parser.add_argument)


def order(given: Namespace) -> Order:
    """Return what was ordered."""
    when = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return Order(
        url=given.engine_url,
        metrics_url=given.metrics_url and httpx.URL(given.metrics_url),
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
        bearer_token_file=given.engine_bearer_token_file,
        ca_file=given.engine_ca_file,
        gpus=_selection(given.gpus),
        trace=given.trace or Path(f"vllm-headroom-load-{when}.jsonl"),
    )


def _target(add: Add) -> None:
    base = Value(read=base_url, accepts="an http or https URL without user, password and query", shown=shown_url)
    add("--engine-url", metavar="URL", type=base, required=True, help="the server; there is no default")
    add(
        "--api",
        metavar="NAME",
        type=choice(list(map(str, Api))),
        default=str(Api.COMPLETIONS),
        help="how to ask: completions, the default, or chat",
    )
    add("--model", metavar="NAME", help="the model to ask; without it the first that the server lists")
    add("--engine-bearer-token-file", metavar="FILE", type=FILE, help="a file with the token to send")
    add("--engine-ca-file", metavar="FILE", type=FILE, help="the certificates, in PEM, to trust for https")


def _asked(add: Add) -> None:
    number = whole(1, MOST_CLIENTS)
    add("--concurrency", metavar="NUMBER", type=number, required=True, help="clients in the step of 100 %%")
    of_tokens = Value(read=lengths, accepts="a number of tokens, or two such as 256..2048")
    add("--prompt-tokens", metavar="LENGTHS", type=of_tokens, default="512", help="without it %(default)s")
    add("--output-tokens", metavar="LENGTHS", type=of_tokens, default="128", help="without it %(default)s")
    add("--shared-prefix", metavar="SHARE", type=SHARE, default="0", help="of each prompt, the same in all")


def _bounds(add: Add) -> None:
    add("--duration", metavar="TIME", type=DURATION, default="60s", help="of each step; without it %(default)s")
    add("--grace", metavar="TIME", type=DURATION, default="30s", help="for what is open then; without it %(default)s")
    add("--timeout", metavar="TIME", type=DURATION, default="5m", help="of one request; without it %(default)s")
    add("--max-requests", metavar="NUMBER", type=whole(), help="requests of all steps together, at most")
    add("--rate", metavar="NUMBER", type=NUMBER, help="requests a second, at most")


def _sight(add: Add) -> None:
    page = page_url("http://127.0.0.1:8000")
    add("--metrics-url", metavar="URL", type=page, help="the engine's page; without it /metrics of --engine-url")
    add("--gpus", metavar="GPUS", type=GPUS, help="the engine's; without it those its processes use")
    add("--trace", metavar="FILE", type=FILE, help="the new file to record in; without it one named by the time")


def _selection(names: object) -> Selection | None:
    if names in {None, "auto"}:
        return None
    return Selection(listed=names) if isinstance(names, tuple) else Selection(everything=True)
