"""The command `doctor`: looks at everything at once, tells it, and how it stands as the exit status."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Final

from vllm_headroom.commands.cli import say
from vllm_headroom.commands.doctor.engine import engine
from vllm_headroom.commands.doctor.files import state_dir, trace_file
from vllm_headroom.commands.doctor.finding import Finding, all_available
from vllm_headroom.commands.doctor.gpus import gpus, nvml
from vllm_headroom.commands.doctor.look import look
from vllm_headroom.commands.doctor.offers import engine_inputs, reported_memory
from vllm_headroom.commands.doctor.ownership import gpu_attribution
from vllm_headroom.commands.doctor.port import listen_port
from vllm_headroom.commands.doctor.processes import process_memory, processes
from vllm_headroom.commands.doctor.text import document, text
from vllm_headroom.commands.doctor.tokens import kv_bytes
from vllm_headroom.config.settings import Settings
from vllm_headroom.daemon import logs
from vllm_headroom.daemon.app import version

AVAILABLE: Final = 0
NOT_ALL_AVAILABLE: Final = 1
PROC: Final = Path("/proc")


async def serve(settings: Settings, *, as_json: bool) -> int:
    """Print what is found; return the exit status."""
    logs.configure(settings.log_format, "error")  # the readers log what is told here in full
    findings = await examine(settings)
    say(json.dumps(document(findings, version()), indent=2) if as_json else text(findings))
    return AVAILABLE if all_available(findings) else NOT_ALL_AVAILABLE


async def examine(settings: Settings, proc: Path = PROC) -> tuple[Finding, ...]:
    """Look at everything at the same time, and return one finding for each name."""
    sight, port, state, trace = await asyncio.gather(
        look(settings, proc),
        listen_port(settings.listen_host, settings.listen_port),
        state_dir(settings.state_dir),
        trace_file(settings.trace_file),
    )
    return (
        engine(sight),
        engine_inputs(sight),
        reported_memory(sight, settings.reported_bytes),
        kv_bytes(sight, settings.kv_bytes_per_token, settings.model_shape),
        nvml(sight),
        gpus(sight),
        gpu_attribution(sight, settings.selection),
        processes(sight),
        process_memory(sight),
        port,
        state,
        trace,
    )
