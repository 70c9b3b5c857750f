"""The options of `preflight`, understood."""

from __future__ import annotations

import argparse
from typing import Final, TypeVar

from vllm_headroom.commands.cli import Parser, accepting
from vllm_headroom.commands.preflight.finding import Kind
from vllm_headroom.config.values import gpu_names
from vllm_headroom.units import duration_seconds, some_bytes, utilization

T = TypeVar("T")
DEFAULT_UTILIZATION: Final = 0.92
"""vLLM's own since 0.20 (vllm/config/cache.py); 0.9 before."""

MOST_GPUS: Final = 64
IGNORABLE: Final = (Kind.ECC, Kind.IDENTICAL, Kind.SHM)
"""What vLLM may start with all the same."""

DESCRIPTION: Final = """\
Says whether vLLM would start on these GPUs now: memory that is free against
what vLLM asks for, who holds the rest, what the driver says of the GPUs, and
/dev/shm. Run it where vLLM will run, with vLLM's own options.
"""

EXAMPLES: Final = """\
It ends with status 0 for a go, 1 for no go, and 2 when it cannot tell or cannot
use its options.

Example:
  vllm-headroom preflight --gpu-memory-utilization 0.92 --wait 120s
  vllm-headroom preflight --tensor-parallel-size 4 --json
"""


def parser_of_options() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="vllm-headroom preflight",
        usage="%(prog)s [OPTION]...",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--gpu-memory-utilization",
        metavar="RATIO",
        type=accepting(utilization, "a ratio above 0, at most 1"),
        help=f"as vLLM's; {DEFAULT_UTILIZATION} without it and --bytes (before vLLM 0.20 the default was 0.9)",
    )
    add(
        "--bytes",
        metavar="SIZE",
        type=accepting(some_bytes, "a number of bytes, or a size such as 72GiB"),
        help="what has to be free on each GPU; vLLM checks its utilization even with --kv-cache-memory-bytes",
    )
    add(
        "--gpus",
        metavar="GPUS",
        type=accepting(_gpus, "all, or GPU indices or UUIDs separated by commas"),
        help="the GPUs that vLLM will use; without it those that CUDA_VISIBLE_DEVICES leaves",
    )
    add(
        "--tensor-parallel-size",
        metavar="N",
        type=accepting(_count, f"a number from 1 to {MOST_GPUS}"),
        help="as vLLM's, times its pipeline size: how many GPUs it will use here; without it, all are looked at",
    )
    add(
        "--wait",
        metavar="DURATION",
        default=0.0,
        type=accepting(duration_seconds, "a duration such as 120s or 2m"),
        help="look again for so long while memory is taken or the driver does not answer; ends as soon as it is a go",
    )
    add(
        "--ignore",
        metavar="WHAT",
        action="append",
        default=[],
        choices=[str(kind) for kind in IGNORABLE],
        help="go although: ecc (NVIDIA lets new work start while a remapping is due), identical or shm; repeatable",
    )
    add("--json", action="store_true", help="print one JSON object instead of words")
    return parser


def _gpus(text: str) -> object:
    return "all" if text == "auto" else gpu_names(text)


def _count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= MOST_GPUS:
        raise ValueError
    return count
