"""The command `preflight`."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_headroom.commands.cli import Command, tell
from vllm_headroom.commands.preflight.budget import Ask
from vllm_headroom.commands.preflight.choice import Wanted
from vllm_headroom.commands.preflight.finding import Kind
from vllm_headroom.commands.preflight.look import look
from vllm_headroom.commands.preflight.options import DEFAULT_UTILIZATION, DESCRIPTION, EXAMPLES, options
from vllm_headroom.commands.preflight.report import Report, judge
from vllm_headroom.commands.preflight.text import document, text
from vllm_headroom.commands.preflight.wait import settled
from vllm_headroom.config.options import BadOptions
from vllm_headroom.config.values import GPU
from vllm_headroom.daemon import logs
from vllm_headroom.scrape.nvml.reader import Nvml
from vllm_headroom.scrape.proc.reader import Processes

PATIENCE_SECONDS: Final = 15.0
"""The first to use a GPU without the persistence daemon waits seconds for the driver to wake it."""

DEVICE_SECONDS: Final = 5.0
PROC: Final = Path("/proc")
SHM: Final = Path("/dev/shm")  # noqa: S108 - it is looked at, nothing is written there


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The report, and how long it was waited for."""

    report: Report
    waited_seconds: float


async def _run(given: Namespace) -> Settled:
    logs.configure("logfmt", "error")  # the readers log what is told here in full
    report, waited_seconds = await _settled(given, _wanted(given, os.environ))
    return Settled(report=report, waited_seconds=waited_seconds)


def _wanted(given: Namespace, environ: Mapping[str, str]) -> Wanted:
    """Return which GPUs are meant; raises BadOptions where CUDA_VISIBLE_DEVICES does not say."""
    count, visible = given.tensor_parallel_size, environ.get("CUDA_VISIBLE_DEVICES")
    in_slot_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if isinstance(given.gpus, tuple):
        return Wanted(named=given.gpus, count=count)
    if visible is None or given.gpus == "all":
        return Wanted(count=count, in_slot_order=in_slot_order)
    names = tuple(name.strip() for name in visible.split(",") if name.strip())
    if not all(GPU.fullmatch(name) for name in names):
        raise BadOptions(f"CUDA_VISIBLE_DEVICES: got {visible!r}, accepts GPU indices or UUIDs; --gpus takes its place")
    return Wanted(visible=names, count=count, in_slot_order=in_slot_order)


async def _settled(given: Namespace, wanted: Wanted) -> tuple[Report, float]:
    plain = given.gpu_memory_utilization is None and given.bytes is None
    ask = Ask(
        utilization_ratio=DEFAULT_UTILIZATION if plain else given.gpu_memory_utilization,
        bytes_per_gpu=given.bytes,
        tensor_parallel_size=given.tensor_parallel_size or 1,
    )
    ignored = frozenset(Kind(name) for name in given.ignore)
    nvml = Nvml(monotonic=time.monotonic, call_timeout_seconds=DEVICE_SECONDS, process_interval_seconds=0.0)
    processes = Processes(engine_port=0, proc=PROC, monotonic=time.monotonic)  # it is asked who is there, not whose

    async def report() -> Report:
        sight = await look(nvml, processes, proc=PROC, shm=SHM, timeout_seconds=PATIENCE_SECONDS)
        return judge(sight, ask, wanted, ignored)

    try:
        return await settled(report, given.wait, tell)
    finally:
        await nvml.close()


COMMAND: Final[Command[Settled]] = Command(
    usage="%(prog)s [OPTION]...",
    description=DESCRIPTION,
    epilog=EXAMPLES,
    options=options,
    run=_run,
    text=lambda settled: text(settled.report, settled.waited_seconds),
    document=lambda settled: document(settled.report, settled.waited_seconds),
    status=lambda settled: settled.report.verdict.status,
)
