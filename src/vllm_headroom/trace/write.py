"""A snapshot as a line of a trace."""

from __future__ import annotations

import json
from typing import Any, Final

from vllm_headroom.model import EnginePage, Failure, Snapshot
from vllm_headroom.trace.entries import engine_entry, gpu_entry, host_entry, process_entry

HEADER: Final = {"headroom_trace": 1}


def line(record: dict[str, Any]) -> bytes:
    """Return a record as a line."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def record_of(snapshot: Snapshot) -> dict[str, Any]:
    """Return what a trace keeps of a snapshot: the engine's GPUs, the engines, their processes; None for a failure.

    What is unknown is left out.
    """
    gpus, engines, processes = snapshot.gpus, snapshot.engines, snapshot.processes
    host = {} if snapshot.host is None else {"host": host_entry(snapshot.host)}
    return {
        "t": round(snapshot.time_seconds, 3),
        "gpus": None if isinstance(gpus, Failure) else [gpu_entry(gpu) for gpu in gpus if gpu.attribution is not None],
        "engines": [engine_entry(engine) for engine in engines.engines] if isinstance(engines, EnginePage) else None,
        "processes": None if isinstance(processes, Failure) else [process_entry(process) for process in processes],
        **host,
    }
