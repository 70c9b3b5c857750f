"""The options of `check`, understood."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from vllm_headroom.commands.check.limits import Limits
from vllm_headroom.commands.cli import Parser, accepting
from vllm_headroom.units import share, some_bytes, utilization

DESCRIPTION: Final = """\
The gate for CI: says whether an engine kept its limits while a trace of it was
recorded, and beside it what an older version did. A limit is kept, exceeded, or
cannot be judged on this trace; only when all are kept has it passed.
"""

EXAMPLES: Final = """\
It ends with status 0 when every limit is kept, 1 when one is exceeded, and 2
when one cannot be judged or the trace cannot be read.

Example:
  vllm-headroom check --trace new.jsonl --max-leak-per-thousand-requests 1MB \\
    --baseline old.jsonl --max-growth-over-baseline 5% --junit report.xml
"""

NO_LIMIT: Final = "needs a limit, such as --max-leak-per-thousand-requests 1MB"
NO_BASELINE: Final = "--max-growth-over-baseline needs a --baseline"
TWICE_STDIN: Final = "--trace and --baseline cannot both be standard input"
A_SIZE: Final = "a number of bytes, or a size such as 8MiB"
A_SHARE: Final = "a share such as 3% or 0.03"


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Return the options; ends the process when they cannot be used."""
    parser = _parser()
    given = parser.parse_args(words)
    limits = limits_of(given)
    if replace(limits, restarts=0) == Limits():
        parser.error(NO_LIMIT)
    if limits.growth_ratio is not None and given.baseline is None:
        parser.error(NO_BASELINE)
    if given.trace == given.baseline == "-":
        parser.error(TWICE_STDIN)
    return given


def limits_of(given: argparse.Namespace) -> Limits:
    """Return the limits among the options."""
    return Limits(
        discrepancy_ratio=given.max_discrepancy,
        leak_bytes=given.max_leak_per_thousand_requests,
        host_leak_bytes=given.max_host_leak_per_thousand_requests,
        bytes_per_request=given.max_bytes_per_request,
        preemptions=given.max_preemptions_per_thousand_requests,
        growth_ratio=given.max_growth_over_baseline,
        restarts=given.max_restarts,
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="vllm-headroom check",
        usage="%(prog)s --trace FILE [--baseline FILE] [LIMIT]... [OPTION]...",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    traces = parser.add_argument_group("traces")
    traces.add_argument("--trace", metavar="FILE", required=True, help="what is judged; - for standard input")
    traces.add_argument("--baseline", metavar="FILE", help="an older version's, under the same load")
    _add_limits(parser)
    _add_report(parser)
    _add_outputs(parser)
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("limits, on each GPU, process or engine; at least one").add_argument
    size, ratio = accepting(some_bytes, A_SIZE), accepting(_share, A_SHARE)
    add("--max-leak-per-thousand-requests", metavar="SIZE", type=size, help="GPU memory, by the leak detector")
    add("--max-host-leak-per-thousand-requests", metavar="SIZE", type=size, help="host memory, in the same way")
    add("--max-discrepancy", metavar="SHARE", type=ratio, help="GPU memory held beyond what the engine was told to use")
    add("--max-bytes-per-request", metavar="SIZE", type=size, help="GPU memory over running requests, at full load")
    count = accepting(_count, "a number, 0 or more")
    add("--max-preemptions-per-thousand-requests", metavar="N", type=count, help="as vLLM counts them")
    growth = "GPU and host memory at the same load, and as little KV cache less"
    add("--max-growth-over-baseline", metavar="SHARE", type=ratio, help=growth)
    whole = accepting(_whole, "a whole number, 0 or more")
    add("--max-restarts", metavar="N", type=whole, default=0, help="of the engine during the trace; 0 if not given")


def _add_report(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what the engine was told to use of each GPU, for --max-discrepancy")
    either = group.add_mutually_exclusive_group()
    ratio = accepting(utilization, "a ratio above 0, at most 1")
    either.add_argument("--gpu-memory-utilization", metavar="RATIO", type=ratio, help="as vLLM's")
    either.add_argument("--reported-bytes", metavar="SIZE", type=accepting(some_bytes, A_SIZE), help="in bytes")


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--junit", metavar="FILE", type=Path, help="write JUnit XML, which GitLab and Jenkins show")
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--format", choices=["text", "github"], default="text", help="github adds annotations for a workflow's run"
    )
    either.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def _share(text: str) -> float:
    ratio = share(text)
    if ratio > 1:  # "3" is hardly 300 %
        raise ValueError
    return ratio


def _count(text: str) -> float:
    count = float(text)
    if not 0 <= count < float("inf"):
        raise ValueError
    return count


def _whole(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError
    return count
