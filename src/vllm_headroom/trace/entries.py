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

_ENGINE_NAMES: Final = {
    "gpu_memory_utilization_ratio": "gpu_memory_utilization",
    "started_at_seconds": "started_at",
}
"""The fields of EngineReading that have a different name in a trace."""

ENGINE_FIELDS: Final = tuple(
    (field, _ENGINE_NAMES.get(field, field)) for field in EngineReading.__struct_fields__
)
"""Each field of EngineReading and its name in a trace."""

HOST_FIELDS: Final = tuple(
    (field, field.removesuffix("_bytes"))
    for field in HostMemory.__struct_fields__
    if field != "basis"
)
"""Each figure in HostMemory and its name in a trace."""

PROCESS_FIELDS: Final = tuple(
    (field, field.removesuffix("_bytes").removesuffix("_seconds").removesuffix("_ratio"))
    for field in EngineProcess.__struct_fields__
    if field not in {"pid", "role", "since_boot_seconds"}
)
"""Each recorded field of EngineProcess, except its role, and the field's name in a trace."""


def build_engine_entry(engine: EngineReading) -> dict[str, Any]:
    """Return all known facts about an engine, by their names in a trace."""
    return drop_unreadable({name: getattr(engine, field) for field, name in ENGINE_FIELDS})


def build_gpu_entry(gpu: Gpu) -> dict[str, Any]:
    """Return the record of one of the engine's GPUs, without unknown values.

    `used` is omitted while the engine's share of the memory is unknown. If it were included,
    readers of a trace would take `used` for the engine's memory.
    """
    entry = {
        "gpu": gpu.reading.index,
        "uuid": gpu.reading.uuid,
        "total": None,
        "used": None,
        "reserved": None,
    }
    memory = gpu.reading.memory
    if memory is not None:
        entry["total"] = memory.total_bytes
        entry["reserved"] = memory.reserved_bytes
        if gpu.held_bytes is not None:
            entry["used"] = memory.used_bytes
    leftovers = [
        drop_unreadable({"fate": leftover.fate, "used": leftover.used_bytes})
        for leftover in gpu.leftovers
    ]
    # Without the probe, all fields of the empty Inside are None and are dropped.
    inside = gpu.inside or Inside()
    return drop_unreadable(
        {
            **entry,
            # The peak is in every record, because a replay has no readings between two samples.
            "used_peak": gpu.reading.used_peak_bytes,
            "utilization": gpu.reading.utilization_ratio,
            "engine": gpu.engine_bytes,
            "other": gpu.other_bytes,
            "processes": gpu.process_count,
            "leftovers": leftovers or None,
            "granted": inside.granted_bytes,
            "allocated": inside.allocated_bytes,
            "reserved_by_torch": inside.reserved_bytes,
            "parts": dict(inside.parts) or None,
        }
    )


def build_process_entry(process: EngineProcess) -> dict[str, Any]:
    """Return the record of one of the engine's processes, without unknown values."""
    figures = {name: getattr(process, field) for field, name in PROCESS_FIELDS}
    return drop_unreadable({"role": process.role, **figures})


def build_host_entry(host: HostMemory) -> dict[str, Any]:
    """Return the record of the host memory, without unknown values."""
    figures = {name: getattr(host, field) for field, name in HOST_FIELDS}
    return drop_unreadable({"basis": host.basis, **figures})


def drop_unreadable(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry without the values that readers reject: None and numbers above LARGEST.

    Text that is not printable is escaped.
    """
    readable = {}
    for field, value in entry.items():
        if value is None or _is_too_large(value):
            continue
        readable[field] = _escape_text(value)
    return readable


def _is_too_large(value: object) -> bool:
    return isinstance(value, float) and value > LARGEST


def _escape_text(value: object) -> object:
    if not isinstance(value, str) or value.isprintable():
        return value
    return str(value).encode("unicode_escape").decode()


HEADER: Final = {"headroom_trace": 1}
"""The first line of a trace, with the version of the format."""

LONGEST_LINE_BYTES: Final = 2**20
"""The maximum number of bytes read from a line. With this maximum, a file without line breaks is
not read as a whole.
"""

YEAR_10000: Final = 253_402_300_800
"""The start of the year 10000, in seconds since the epoch. Later times cannot be shown as dates."""


def encode_line(record: dict[str, Any]) -> bytes:
    """Return a record as a line of JSON.

    Raises ValueError for a number that is not finite.
    """
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def build_record(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot's record for a trace.

    The record contains the engine's GPUs, the engines on the page, and their processes. The record
    also contains the configured pools and the host memory. If the source of the GPUs, engines or
    processes failed, their entry is None.
    """
    record: dict[str, Any] = {
        "t": round(snapshot.time_seconds, 3),
        "gpus": None,
        "engines": None,
        "processes": None,
    }
    gpus = snapshot.gpus
    if not isinstance(gpus, Failure):
        # On a large machine, other engines' GPUs would fill up the record.
        record["gpus"] = [build_gpu_entry(gpu) for gpu in gpus if gpu.attribution is not None]
    page = snapshot.engines
    if isinstance(page, Failure):
        # In a replay, the failure's reason determines whether the engine was down.
        record["engines_failure"] = page.reason
        if page.http_status is not None:
            record["engines_status"] = page.http_status
    else:
        record["engines"] = [build_engine_entry(engine) for engine in page.engines]
    # Most samples have none of the following fields, and an absent field takes no space.
    if snapshot.has_silent_core:
        record["silent_core"] = True
    if snapshot.server is not None:
        server = {"answer": snapshot.server.answer, "requests": snapshot.server.requests}
        record["server"] = drop_unreadable(server)
    processes = snapshot.processes
    if not isinstance(processes, Failure):
        record["processes"] = [build_process_entry(process) for process in processes]
    if snapshot.pools:
        record["pools"] = [
            {"part": pool.part, "role": pool.role, "bytes": pool.size_bytes}
            for pool in snapshot.pools
        ]
    if snapshot.host is not None:
        record["host"] = build_host_entry(snapshot.host)
    return record
