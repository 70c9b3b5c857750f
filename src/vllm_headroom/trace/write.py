"""A snapshot as a line of a trace."""

from __future__ import annotations

import json
from typing import Any, Final

from vllm_headroom.model import EnginePage, EngineProcess, EngineReading, Failure, Gpu, Snapshot

HEADER: Final = {"headroom_trace": 1}

_ENGINE_FIELDS: Final = (
    "model_name",
    "engine",
    "running",
    "waiting",
    "kv_used_ratio",
    "kv_capacity_tokens",
    "finished_total",
    "preemptions_total",
    "prefix_queries_total",
    "prefix_hits_total",
    "awake",
)
"""Those that a trace names as we do."""


def line(record: dict[str, Any]) -> bytes:
    """Return a record as a line."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def record_of(snapshot: Snapshot) -> dict[str, Any]:
    """Return what a trace keeps of a snapshot: the engine's GPUs, the engines and their processes; None for a failure.

    What is unknown is left out. A GPU whose holders are unknown for now is without `used` as well, since a reader would
    take all that is used for the engine's.
    """
    return {
        "t": round(snapshot.time_seconds, 3),
        "gpus": None
        if isinstance(snapshot.gpus, Failure)
        else [_gpu(gpu) for gpu in snapshot.gpus if gpu.attribution is not None],
        "engines": [_engine(engine) for engine in snapshot.engines.engines]
        if isinstance(snapshot.engines, EnginePage)
        else None,
        "processes": None
        if isinstance(snapshot.processes, Failure)
        else [_process(process) for process in snapshot.processes],
    }


def _gpu(gpu: Gpu) -> dict[str, Any]:
    memory = gpu.reading.memory
    fields = {
        "gpu": gpu.reading.index,
        "uuid": gpu.reading.uuid,
        "total": None if memory is None else memory.total_bytes,
        "used": None if memory is None or gpu.held_bytes is None else memory.used_bytes,
        "reserved": None if memory is None else memory.reserved_bytes,
        "engine": gpu.engine_bytes,
        "other": gpu.other_bytes,
        "processes": gpu.process_count,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _engine(engine: EngineReading) -> dict[str, Any]:
    fields = {name: getattr(engine, name) for name in _ENGINE_FIELDS} | {"started_at": engine.started_at_seconds}
    return {name: value for name, value in fields.items() if value is not None}


def _process(process: EngineProcess) -> dict[str, Any]:
    return {"role": process.role, "rss": process.rss_bytes, "started_at": process.started_at_seconds}
