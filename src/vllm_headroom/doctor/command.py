"""The command `doctor`: looks at everything at once, tells it, and how it stands as the exit status."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Final

from vllm_headroom import logs
from vllm_headroom.app import version
from vllm_headroom.config import Settings
from vllm_headroom.console import say
from vllm_headroom.doctor.engine import engine
from vllm_headroom.doctor.files import state_dir, trace_file
from vllm_headroom.doctor.finding import Finding, all_available
from vllm_headroom.doctor.gpus import gpus, nvml
from vllm_headroom.doctor.look import look
from vllm_headroom.doctor.offers import engine_inputs, reported_memory
from vllm_headroom.doctor.ownership import gpu_attribution
from vllm_headroom.doctor.port import listen_port
from vllm_headroom.doctor.processes import process_memory, processes
from vllm_headroom.doctor.tokens import kv_bytes
from vllm_headroom.doctor.words import document, text

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
