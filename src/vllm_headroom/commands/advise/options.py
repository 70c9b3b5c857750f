"""The options of `advise`, understood."""

from __future__ import annotations

import argparse
from typing import Final, TypeVar

from vllm_headroom.commands.advise.flags import Version, version_of
from vllm_headroom.commands.advise.settings import Settings
from vllm_headroom.commands.cli import Parser, accepting
from vllm_headroom.config.values import metrics_url
from vllm_headroom.units import utilization

T = TypeVar("T")

DESCRIPTION: Final = """\
Says which of the known causes of memory trouble fits an engine, the figures
that show it, and the change to make: vLLM's own option, its value computed from
this engine's figures, the least costly first.

TRACE is a file that HEADROOM_TRACE_FILE let the daemon record, or - for
standard input: a day of it says most. A sidecar's page is only the present.
"""

EXAMPLES: Final = """\
It ends with status 0 when there is nothing to change, 1 when there is advice,
and 2 when it cannot tell or cannot use its input.

Example:
  vllm-headroom advise trace.jsonl --engine-url http://127.0.0.1:8000
  vllm-headroom advise --url http://gpu-7:9839 --json
"""


def parser_of_options() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="vllm-headroom advise",
        usage="%(prog)s [OPTION]... TRACE\n       %(prog)s [OPTION]... --url URL",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("trace", metavar="TRACE", nargs="?", help="the trace, - for standard input")
    parser.add_argument("--trace", dest="trace_option", metavar="TRACE", help="the same")
    url = accepting(metrics_url, "an http or https URL such as http://gpu-7:9839")
    parser.add_argument("--url", metavar="URL", type=url, help="a sidecar whose page to read instead of a trace")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")
    _settings_options(parser)
    return parser


def _settings_options(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("what the engine was started with, for values that depend on it")
    add = engine.add_argument
    add(
        "--engine-url",
        metavar="URL",
        type=accepting(metrics_url, "an http or https URL such as http://127.0.0.1:8000"),
        help="vLLM itself, to ask for its version and its share of the GPU",
    )
    add(
        "--vllm-version",
        metavar="VERSION",
        type=accepting(_version, "a version of vLLM from 0.4 on, such as 0.11.2"),
        help="only options that this version has are advised; without it, that all have that it may be",
    )
    add(
        "--gpu-memory-utilization",
        metavar="RATIO",
        type=accepting(utilization, "a ratio above 0, at most 1"),
        help="as vLLM's",
    )
    for name in ("--max-num-seqs", "--max-model-len", "--max-num-batched-tokens"):
        add(name, metavar="N", type=accepting(_count, "a whole number above 0"), help="as vLLM's")


def settings_of(given: argparse.Namespace) -> Settings:
    """Return what the operator told of the engine."""
    return Settings(
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


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError
    return count
