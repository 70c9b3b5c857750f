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
    size,
    whole_number,
)
from vllm_headroom_tools.preflight.checks import GpuChoice, Kind, MemoryRequest
from vllm_headroom_tools.preflight.look import look
from vllm_headroom_tools.preflight.report import Clearance, build_report, judge, judge_wake

DEFAULT_UTILIZATION: Final = 0.92
"""vLLM's own since 0.20 (vllm/config/cache.py); 0.9 before."""

PATIENCE_SECONDS: Final = 15.0
"""The first to use a GPU without the persistence daemon waits seconds for the driver to wake it."""

PROC: Final = Path("/proc")
SHM: Final = Path("/dev/shm")  # noqa: S108 - it is looked at, nothing is written there
IGNORABLE: Final = (Kind.ECC, Kind.IDENTICAL, Kind.SHM, Kind.HOST)
"""What vLLM may start with all the same."""


def add_options(parser: Parser) -> None:
    """Add the options to the parser."""
    add = parser.add_argument
    ratio = f"as vLLM's; {DEFAULT_UTILIZATION} without it and --bytes (before vLLM 0.20 the default was 0.9)"
    add("--gpu-memory-utilization", metavar="RATIO", type=RATIO, help=ratio)
    n_bytes = "what has to be free on each GPU; vLLM checks its utilization even with --kv-cache-memory-bytes"
    add("--bytes", metavar="SIZE", type=size("72GiB"), help=n_bytes)
    gpus = (
        "the GPUs that vLLM will use; without it those that CUDA_VISIBLE_DEVICES, or HIP's, leaves"
    )
    add("--gpus", metavar="GPUS", type=GPUS, help=gpus)
    parallel = "as vLLM's, times its pipeline size: how many GPUs it will use here; without it, all are looked at"
    add("-tp", "--tensor-parallel-size", metavar="N", type=whole_number(1, 64), help=parallel)
    engine = "where a vLLM sleeps: says whether it could wake now, in place of whether another would start"
    add("--engine-url", metavar="URL", type=page_url("http://127.0.0.1:8000"), help=engine)
    duration = Value(read=parse_duration, accepts="a duration such as 120s or 2m")
    wait = "look again for so long while memory is taken or the driver does not answer; ends as soon as it is a go"
    add("--wait", metavar="DURATION", default=0.0, type=duration, help=wait)
    ignore = "go although: ecc (NVIDIA lets new work start while a remapping is due), identical, shm or host; repeatable"
    add(
        "--ignore",
        metavar="WHAT",
        default=[],
        type=choice([str(kind) for kind in IGNORABLE]),
        help=ignore,
    )


async def wait_until_settled(
    look: Callable[[], Awaitable[Clearance]], wait_seconds: float, say: Callable[[str], None]
) -> Clearance:
    """Return the first report that waiting cannot better, or the last; say every ten seconds what it waits for."""
    now = asyncio.get_running_loop().time
    ends = now() + wait_seconds
    report = await look()
    began = say_at = now()
    while report.may_pass and now() < ends:
        if now() >= say_at:
            reasons = "; ".join(f"GPU {each.gpu}: {each.text}" for each in report.hindrances)
            say(f"waiting, {ends - now():.0f} s left: {reasons}")
            say_at = now() + 10.0
        await asyncio.sleep(min(1.0, ends - now()))
        report = await look()
    return replace(report, waited_seconds=now() - began)


def _read_choice(given: Namespace, environ: Mapping[str, str]) -> GpuChoice:
    """Return which GPUs vLLM will use; raises BadOptions for a bad CUDA_VISIBLE_DEVICES, or HIP's."""
    variable = (
        "CUDA_VISIBLE_DEVICES" if "CUDA_VISIBLE_DEVICES" in environ else "HIP_VISIBLE_DEVICES"
    )
    count, visible = given.tensor_parallel_size, environ.get(variable)
    in_slot_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if isinstance(given.gpus, tuple):
        return GpuChoice(named=given.gpus, count=count)
    if visible is None or given.gpus == "all":
        return GpuChoice(count=count, in_slot_order=in_slot_order)
    names = tuple(name.strip() for name in visible.split(",") if name.strip())
    if not all(GPU.fullmatch(name) for name in names):
        raise BadOptions(
            f"{variable}: got {visible!r}, accepts GPU indices or UUIDs; --gpus takes its place"
        )
    return GpuChoice(visible=names, count=count, in_slot_order=in_slot_order)


async def _run(given: Namespace) -> Report:
    logs.configure("logfmt", "error")  # the readers log what the report has in full
    wanted, url = _read_choice(given, os.environ), given.engine_url
    plain = given.gpu_memory_utilization is None and given.bytes is None and url is None
    ask = MemoryRequest(
        utilization_ratio=DEFAULT_UTILIZATION if plain else given.gpu_memory_utilization,
        bytes_per_gpu=given.bytes,
        tensor_parallel_size=given.tensor_parallel_size or 1,
    )
    ignored = frozenset(Kind(name) for name in given.ignore)
    gpus = Gpus(monotonic=time.monotonic, call_timeout_seconds=5.0, process_interval_seconds=0.0)
    engine = urlsplit(url or "")
    port = engine.port or {"http": 80, "https": 443}.get(
        engine.scheme, 0
    )  # without one any engine's processes count
    processes = Processes(engine_port=port, proc=PROC, monotonic=time.monotonic)

    async def report() -> Clearance:
        conditions = await look(
            gpus, processes, proc=PROC, shm=SHM, timeout_seconds=PATIENCE_SECONDS
        )
        if url is None:
            return judge(conditions, ask, wanted, ignored)
        from vllm_headroom.scrape.http.reader import PageReader  # noqa: PLC0415 - a start needs no HTTP client
        from vllm_headroom_tools.look import fetch_engines  # noqa: PLC0415 - as above

        page = await fetch_engines(PageReader(url=url, timeout_seconds=PATIENCE_SECONDS))
        return judge_wake(conditions, page, ask)

    try:
        return build_report(await wait_until_settled(report, given.wait, write_note))
    finally:
        await gpus.close()


COMMAND: Final[Command] = Command(
    usage="%(prog)s [OPTION]...",
    description="""\
Says whether vLLM would start on these GPUs now: memory that is free against
what vLLM requests, who holds the rest, what the driver reports about the GPUs,
and /dev/shm. Run it where vLLM will run, with vLLM's own options.
""",
    epilog="""\
It ends with status 0 for a go, 1 for no go, and 2 when it cannot tell or cannot
use its options.

Example:
  vllm-headroom preflight --gpu-memory-utilization 0.92 --wait 120s
  vllm-headroom preflight --tensor-parallel-size 4 --json
""",
    options=add_options,
    run=_run,
)
