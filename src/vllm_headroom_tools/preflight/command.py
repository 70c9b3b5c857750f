"""The command `preflight`."""

import asyncio
import os
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from msgspec.structs import replace

from vllm_headroom.daemon import logs
from vllm_headroom.inputs import GPU
from vllm_headroom.scrape.gpus import Gpus
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.units import parse_duration
from vllm_headroom_tools.cli import Command, write_note
from vllm_headroom_tools.conclusion import Report
from vllm_headroom_tools.options import (
    GPUS,
    RATIO,
    BadOptions,
    Parser,
    Value,
    choice,
    page_url,
    size_value,
    whole_number,
)
from vllm_headroom_tools.preflight.checks import (
    GpuChoice,
    Kind,
    MemoryRequest,
    check_unknown_options,
)
from vllm_headroom_tools.preflight.look import read_conditions
from vllm_headroom_tools.preflight.report import (
    Clearance,
    build_report,
    judge_conditions,
    judge_wake,
)
from vllm_headroom_tools.serve_line import read_serve_line
from vllm_headroom_tools.sizing.question import DEFAULT_UTILIZATION
from vllm_headroom_tools.vllm_options import VLLM_RELEASES, list_vllm_options

GPU_SECONDS: Final = 15.0
"""The time limit for reading all GPUs. Without the persistence daemon, it takes seconds to wake up
a GPU.
"""

GPU_CALL_SECONDS: Final = 5.0
"""The time limit for one NVML call."""

PAGE_SECONDS: Final = 15.0
LOOK_INTERVAL_SECONDS: Final = 1.0
"""Our choice: with --wait, the pause between two readings."""

WAIT_REPORT_SECONDS: Final = 10.0
"""Our choice: the interval at which --wait reports what it is waiting for."""

PROC: Final = Path("/proc")
SHM: Final = Path("/dev/shm")  # noqa: S108 - it is only read, never written

IGNORABLE: Final = (Kind.ECC, Kind.IDENTICAL, Kind.SHM, Kind.HOST)
"""The kinds of findings that --ignore accepts, because vLLM may start despite them."""

DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def add_options(parser: Parser) -> None:
    """Add all options of `preflight` to the parser."""
    parser.add_argument(
        "--gpu-memory-utilization",
        metavar="RATIO",
        type=RATIO,
        help=f"as vLLM's; {DEFAULT_UTILIZATION} without it and --bytes (before vLLM 0.20 the"
        " default was 0.9)",
    )
    parser.add_argument(
        "--bytes",
        metavar="SIZE",
        type=size_value("72GiB"),
        help="what has to be free on each GPU; vLLM checks its utilization even with"
        " --kv-cache-memory-bytes",
    )
    parser.add_argument(
        "--gpus",
        metavar="GPUS",
        type=GPUS,
        help="the GPUs that vLLM will use; without it those that CUDA_VISIBLE_DEVICES, or HIP's,"
        " leaves",
    )
    parser.add_argument(
        "-tp",
        "--tensor-parallel-size",
        metavar="N",
        type=whole_number(1, 64),
        help="as vLLM's, times its pipeline size: how many GPUs it will use here; without it, all"
        " are looked at",
    )
    parser.add_argument(
        "--engine-url",
        metavar="URL",
        type=page_url("http://127.0.0.1:8000"),
        help="where a vLLM sleeps: says whether it could wake now, in place of whether another"
        " would start",
    )
    parser.add_argument(
        "--wait",
        metavar="DURATION",
        default=0.0,
        type=Value(read=parse_duration, accepts="a duration such as 120s or 2m"),
        help="look again for so long while memory is taken or the driver does not answer; ends as"
        " soon as it is a go",
    )
    parser.add_argument(
        "--ignore",
        metavar="WHAT",
        default=[],
        type=choice([str(kind) for kind in IGNORABLE]),
        help="go although: ecc (NVIDIA lets new work start while a remapping is due), identical,"
        " shm or host; repeatable",
    )
    parser.accept_line(
        list_vllm_options(),
        read_serve_line,
        f"an option of preflight or of {VLLM_RELEASES}",
        is_lenient=True,
    )


async def wait_until_settled(
    look: Callable[[], Awaitable[Clearance]],
    wait_seconds: float,
    say: Callable[[str], None],
) -> Clearance:
    """Repeat the reading until waiting cannot improve the result or the time limit is reached.

    Returns the last result with the time that was spent waiting. Every ten seconds, the obstacles
    are reported.
    """
    now = asyncio.get_running_loop().time
    ends_at_seconds = now() + wait_seconds
    clearance = await look()
    looked_at_seconds = now()
    repeat_at_seconds = looked_at_seconds
    # Waiting is only useful if the obstacles may go away by themselves.
    while clearance.may_pass and now() < ends_at_seconds:
        if now() >= repeat_at_seconds:
            reasons = "; ".join(
                f"GPU {hindrance.gpu}: {hindrance.text}" for hindrance in clearance.hindrances
            )
            say(f"waiting, {ends_at_seconds - now():.0f} s left: {reasons}")
            repeat_at_seconds = now() + WAIT_REPORT_SECONDS
        await asyncio.sleep(min(LOOK_INTERVAL_SECONDS, ends_at_seconds - now()))
        clearance = await look()
    return replace(clearance, waited_seconds=now() - looked_at_seconds)


def _read_choice(arguments: Namespace, environ: Mapping[str, str]) -> GpuChoice:
    """Return the operator's choice of GPUs, from --gpus or else from the environment.

    Raises BadOptions if the variable contains anything other than indices or UUIDs.
    """
    count = arguments.tensor_parallel_size
    if isinstance(arguments.gpus, tuple):
        return GpuChoice(named=arguments.gpus, count=count)
    # ROCm also reads CUDA's variable, which takes precedence.
    variable = "HIP_VISIBLE_DEVICES"
    if "CUDA_VISIBLE_DEVICES" in environ:
        variable = "CUDA_VISIBLE_DEVICES"
    visible = environ.get(variable)
    # By default, CUDA orders GPUs by speed, which may differ from NVML's order.
    has_slot_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if visible is None or arguments.gpus == "all":
        return GpuChoice(count=count, has_slot_order=has_slot_order)
    names = tuple(name.strip() for name in visible.split(",") if name.strip())
    if not all(GPU.fullmatch(name) for name in names):
        raise BadOptions(
            f"{variable}: got {visible!r}, accepts GPU indices or UUIDs; --gpus takes its place"
        )
    return GpuChoice(visible=names, count=count, has_slot_order=has_slot_order)


def _read_request(arguments: Namespace) -> MemoryRequest:
    """Return the memory that vLLM requests.

    Without options, the request for a start is vLLM's default share. For a wake-up, the request is
    empty. The share for the wake-up is later taken from the engine's page.
    """
    utilization_ratio = arguments.gpu_memory_utilization
    has_size = utilization_ratio is not None or arguments.bytes is not None
    if not has_size and arguments.engine_url is None:
        utilization_ratio = DEFAULT_UTILIZATION
    return MemoryRequest(
        utilization_ratio=utilization_ratio,
        bytes_per_gpu=arguments.bytes,
        tensor_parallel_size=arguments.tensor_parallel_size or 1,
    )


def _find_port(url: str | None) -> int:
    """Return the engine's port.

    Returns 0 (any engine on this machine) if there is no URL.
    """
    if url is None:
        return 0
    parts = urlsplit(url)
    return parts.port or DEFAULT_PORTS.get(parts.scheme, 0)


async def _run(arguments: Namespace) -> Report:
    """Read the GPUs and return the report; with --wait, first wait until vLLM would start."""
    # The readers would log problems that the report already contains.
    logs.configure("logfmt", "error")
    gpu_choice = _read_choice(arguments, os.environ)
    request = _read_request(arguments)
    ignored_kinds = frozenset(Kind(name) for name in arguments.ignore)
    url = arguments.engine_url
    gpus = Gpus(
        monotonic=time.monotonic,
        call_timeout_seconds=GPU_CALL_SECONDS,
        process_interval_seconds=0.0,
    )
    processes = Processes(engine_port=_find_port(url), proc=PROC, monotonic=time.monotonic)

    async def look_and_judge() -> Clearance:
        """Read once, then judge a start or the wake-up of the engine at `url`."""
        conditions = await read_conditions(
            gpus, processes, proc=PROC, shm=SHM, timeout_seconds=GPU_SECONDS
        )
        if url is None:
            clearance = judge_conditions(conditions, request, gpu_choice, ignored_kinds)
            findings = check_unknown_options(arguments.unknown_options, conditions.vllm_version)
            return replace(clearance, findings=(*clearance.findings, *findings))
        from vllm_headroom.scrape.http.reader import PageReader  # noqa: PLC0415 - a start needs no HTTP
        from vllm_headroom_tools.look import fetch_engines  # noqa: PLC0415 - the same

        page = await fetch_engines(PageReader(url=url, timeout_seconds=PAGE_SECONDS))
        return judge_wake(conditions, page, request)

    try:
        clearance = await wait_until_settled(look_and_judge, arguments.wait, write_note)
        return build_report(clearance)
    finally:
        await gpus.close()


COMMAND: Final[Command] = Command(
    usage="%(prog)s [OPTION]... [-- LINE]",
    description="""\
Says whether vLLM would start on these GPUs now: memory that is free against
what vLLM requests, who holds the rest, what the driver reports about the GPUs,
and /dev/shm. Run it where vLLM will run, with vLLM's own options, or after --
with its whole command line, a script or manifest that has it.
""",
    epilog="""\
It ends with status 0 for a go, 1 for no go, and 2 when it cannot tell or cannot
use its options.

Example:
  vllm-headroom preflight --gpu-memory-utilization 0.92 --wait 120s
  vllm-headroom preflight --tensor-parallel-size 4 --json
  vllm-headroom preflight -- vllm serve Qwen/Qwen3-32B -tp 2
""",
    options=add_options,
    run=_run,
)
