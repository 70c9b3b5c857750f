"""Build the lines of a trace: GPUs, engines, processes and the host."""

import json
from collections.abc import Mapping
from typing import Any, Final

from vllm_headroom.model import (
    EngineProcess,
    EngineReading,
    Failure,
    Gpu,
    HostMemory,
    Inside,
    Snapshot,
)
from vllm_headroom.parse.fields import LARGEST

_NAMES: Final = {
    "gpu_memory_utilization_ratio": "gpu_memory_utilization",
    "started_at_seconds": "started_at",
}
"""The engine's facts with another name in the format."""

ENGINE_FIELDS: Final = tuple(
    (fact, _NAMES.get(fact, fact)) for fact in EngineReading.__struct_fields__
)
"""Each field of EngineReading, and its name in a trace."""

HOST_FIELDS: Final = tuple(
    (fact, fact.removesuffix("_bytes")) for fact in HostMemory.__struct_fields__ if fact != "basis"
)
"""Each figure of HostMemory, and its name in a trace."""

PROCESS_FIELDS: Final = tuple(
    (fact, fact.removesuffix("_bytes").removesuffix("_seconds").removesuffix("_ratio"))
    for fact in EngineProcess.__struct_fields__
    if fact not in {"pid", "role", "since_boot_seconds"}
)
"""Each fact of EngineProcess but its role, and its name in a trace."""


def build_engine_entry(engine: EngineReading) -> dict[str, Any]:
    """Return all facts of an engine."""
    return drop_unreadable({name: getattr(engine, fact) for fact, name in ENGINE_FIELDS})


def build_gpu_entry(gpu: Gpu) -> dict[str, Any]:
    """Return a GPU of the engine's, without `used` while its holders are unknown: readers take it as the engine's."""
    memory, inside = gpu.reading.memory, gpu.inside or Inside()
    return drop_unreadable(
        {
            "gpu": gpu.reading.index,
            "uuid": gpu.reading.uuid,
            "total": None if memory is None else memory.total_bytes,
            "used": None if memory is None or gpu.held_bytes is None else memory.used_bytes,
            "reserved": None if memory is None else memory.reserved_bytes,
            "used_peak": gpu.reading.used_peak_bytes,
            "engine": gpu.engine_bytes,
            "other": gpu.other_bytes,
            "processes": gpu.process_count,
            "leftovers": [
                drop_unreadable({"fate": left.fate, "used": left.used_bytes})
                for left in gpu.leftovers
            ]
            or None,
            "granted": inside.granted_bytes,
            "allocated": inside.allocated_bytes,
            "reserved_by_torch": inside.reserved_bytes,
            "parts": dict(inside.parts) or None,
        }
    )


def build_process_entry(process: EngineProcess) -> dict[str, Any]:
    """Return a process of the engine's."""
    return drop_unreadable(
        {"role": process.role, **{name: getattr(process, fact) for fact, name in PROCESS_FIELDS}}
    )


def build_host_entry(host: HostMemory) -> dict[str, Any]:
    """Return the engine's host memory."""
    return drop_unreadable(
        {"basis": host.basis, **{name: getattr(host, fact) for fact, name in HOST_FIELDS}}
    )


def drop_unreadable(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry for writing: without unknown values and numbers beyond LARGEST, with unprintable text escaped."""
    known = ((field, value) for field, value in entry.items() if value is not None)
    return {
        field: _escape_text(value)
        for field, value in known
        if not (isinstance(value, float) and value > LARGEST)
    }


def _escape_text(value: object) -> object:
    is_shown = not isinstance(value, str) or value.isprintable()
    return value if is_shown else str(value).encode("unicode_escape").decode()


HEADER: Final = {"headroom_trace": 1}
LONGEST_LINE_BYTES: Final = 2**20
"""Bytes of a line: a file without lines is not read into memory."""

YEAR_10000: Final = 253_402_300_800


def encode_line(record: dict[str, Any]) -> bytes:
    """Return a record as a line."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def build_record(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot's record: the engine's GPUs, the engines and their processes, None for a failed source."""
    gpus, page, processes = snapshot.gpus, snapshot.engines, snapshot.processes
    record: dict[str, Any] = {
        "t": round(snapshot.time_seconds, 3),
        "gpus": None,
        "engines": None,
        "processes": None,
    }
    if not isinstance(gpus, Failure):
        record["gpus"] = [build_gpu_entry(gpu) for gpu in gpus if gpu.attribution is not None]
    if isinstance(page, Failure):
        record["engines_failure"] = page.reason
    else:
        record["engines"] = [build_engine_entry(engine) for engine in page.engines]
    if snapshot.has_silent_core:
        record["silent_core"] = True
    if not isinstance(processes, Failure):
        record["processes"] = [build_process_entry(process) for process in processes]
    if snapshot.pools:
        record["pools"] = [
            {"part": each.part, "role": each.role, "bytes": each.size_bytes}
            for each in snapshot.pools
        ]
    return record if snapshot.host is None else {**record, "host": build_host_entry(snapshot.host)}
