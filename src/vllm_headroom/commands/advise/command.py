"""The command `advise`: its options, and where the facts come from."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Coroutine
from typing import Any, Final

from vllm_headroom.commands.advise.facts import Facts
from vllm_headroom.commands.advise.history.history import Past
from vllm_headroom.commands.advise.report import document, text
from vllm_headroom.commands.advise.settings import EngineArgs, Version, version_of
from vllm_headroom.commands.advise.verdict import Assessment, judge
from vllm_headroom.commands.cli import Command
from vllm_headroom.commands.progress import reading
from vllm_headroom.config.kinds import RATIO, TRACE, Value, page_url, tokens, whole
from vllm_headroom.config.options import BadOptions, Parser
from vllm_headroom.trace.parse import recorded

DESCRIPTION: Final = """\
Says which of the known causes of memory trouble fits an engine, the figures
that show it, and the change to make: vLLM's own option, its value computed from
this engine's figures, the least costly first.

TRACE is HEADROOM_TRACE_FILE of the daemon, flight.jsonl of its state directory
or - for standard input: a day says most. A sidecar's page is only the present.
"""

EXAMPLES: Final = """\
It ends with status 0 when there is nothing to change, 1 when there is advice,
and 2 when it cannot tell or cannot use its input.

Example:
  vllm-headroom advise trace.jsonl --engine-url http://127.0.0.1:8000
  vllm-headroom advise --headroom-url http://gpu-7:9839 --json
"""


def options(parser: Parser) -> None:
    """Add the options to the parser."""
    parser.add_argument("trace", metavar="TRACE", nargs="?", type=TRACE, help="the trace, - for standard input")
    parser.add_argument("--trace", dest="trace_option", metavar="TRACE", type=TRACE, help="the same")
    page = page_url("http://gpu-7:9839")
    parser.add_argument("--headroom-url", metavar="URL", type=page, help="a sidecar to read instead of a trace")
    add = parser.add_argument_group("what the engine was started with, for values that depend on it").add_argument
    engine = page_url("http://127.0.0.1:8000")
    add("--engine-url", metavar="URL", type=engine, help="vLLM itself, to ask for its version and its share of the GPU")
    version = Value(read=_version, accepts="a version of vLLM from 0.4 on, such as 0.11.2")
    told = "only options that this version has are advised; without it, that all have that it may be"
    add("--vllm-version", metavar="VERSION", type=version, help=told)
    add("--gpu-memory-utilization", metavar="RATIO", type=RATIO, help="as vLLM's")
    for name, kind in (("num-seqs", whole()), ("model-len", tokens()), ("num-batched-tokens", tokens())):
        add(f"--max-{name}", metavar="N", type=kind, help="as vLLM's")


def settings_of(given: argparse.Namespace) -> EngineArgs:
    """Return what the operator told of the engine."""
    return EngineArgs(
        version=given.vllm_version,
        gpu_memory_utilization=given.gpu_memory_utilization,
        max_num_seqs=given.max_num_seqs,
        max_model_len=given.max_model_len,
        max_num_batched_tokens=given.max_num_batched_tokens,
    )


def _version(text: str) -> Version:
    version = version_of(text)
    if version is None:
        raise ValueError
    return version


ONE_SOURCE: Final = "needs a TRACE or --headroom-url, and not both"


def _run(given: Namespace) -> Assessment | Coroutine[Any, Any, Assessment]:
    if sum(source is not None for source in (given.trace, given.trace_option, given.headroom_url)) != 1:
        raise BadOptions(ONE_SOURCE)
    if given.engine_url is None and given.headroom_url is None:
        return judge(_recorded(given, settings_of(given)))
    return _asked(given)


async def _asked(given: Namespace) -> Assessment:
    from vllm_headroom.commands.advise.history.sources import (  # noqa: PLC0415 - a trace alone needs no HTTP client
        sidecar_facts,
        with_engine,
    )

    settings = settings_of(given)
    if given.engine_url is not None:
        settings = await with_engine(settings, given.engine_url)
    if given.headroom_url is not None:
        return judge(await sidecar_facts(given.headroom_url, settings))
    return judge(_recorded(given, settings))


def _recorded(given: Namespace, settings: EngineArgs) -> Facts:
    past = Past()
    for snapshot in recorded(given.trace or given.trace_option, reading):
        past.step(snapshot)
    return past.facts(settings)


COMMAND: Final[Command[Assessment]] = Command(
    usage="%(prog)s [OPTION]... TRACE\n       %(prog)s [OPTION]... --headroom-url URL",
    description=DESCRIPTION,
    epilog=EXAMPLES,
    options=options,
    run=_run,
    text=text,
    document=document,
    status=lambda answer: answer.verdict.status,
)
