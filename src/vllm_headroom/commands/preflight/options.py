"""The options of `preflight`."""

from __future__ import annotations

from typing import Final

from vllm_headroom.commands.preflight.finding import Kind
from vllm_headroom.config.kinds import GPUS, RATIO, Value, choice, size, whole
from vllm_headroom.config.options import Parser
from vllm_headroom.units import duration_seconds

WAIT: Final = Value(read=duration_seconds, accepts="a duration such as 120s or 2m")
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


def options(parser: Parser) -> None:
    """Add the options to the parser."""
    add = parser.add_argument
    ratio = f"as vLLM's; {DEFAULT_UTILIZATION} without it and --bytes (before vLLM 0.20 the default was 0.9)"
    add("--gpu-memory-utilization", metavar="RATIO", type=RATIO, help=ratio)
    n_bytes = "what has to be free on each GPU; vLLM checks its utilization even with --kv-cache-memory-bytes"
    add("--bytes", metavar="SIZE", type=size("72GiB"), help=n_bytes)
    gpus = "the GPUs that vLLM will use; without it those that CUDA_VISIBLE_DEVICES leaves"
    add("--gpus", metavar="GPUS", type=GPUS, help=gpus)
    parallel = "as vLLM's, times its pipeline size: how many GPUs it will use here; without it, all are looked at"
    add("-tp", "--tensor-parallel-size", metavar="N", type=whole(1, MOST_GPUS), help=parallel)
    wait = "look again for so long while memory is taken or the driver does not answer; ends as soon as it is a go"
    add("--wait", metavar="DURATION", default=0.0, type=WAIT, help=wait)
    ignore = "go although: ecc (NVIDIA lets new work start while a remapping is due), identical or shm; repeatable"
    add("--ignore", metavar="WHAT", default=[], type=choice([str(kind) for kind in IGNORABLE]), help=ignore)
