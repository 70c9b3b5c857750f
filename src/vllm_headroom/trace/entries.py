"""What a line of a trace says of one GPU, one engine, one process and the host, both ways."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, get_type_hints

from vllm_headroom.model import (
    EnginePage,
    EngineProcess,
    EngineReading,
    Failure,
    Fate,
    Gpu,
    GpuMemory,
    GpuReading,
    HostMemory,
    Inside,
    Leftover,
    Snapshot,
)
from vllm_headroom.parse.fields import LARGEST, WrongFieldError, each, number, size, text, truth, within
from vllm_headroom.vocabulary import Attribution, MemoryPart, Role

NO_PID: Final = 0
"""A trace tells processes apart by their start alone."""

_NAMES: Final = {"gpu_memory_utilization_ratio": "gpu_memory_utilization", "started_at_seconds": "started_at"}
"""The engine's facts that the format calls otherwise than the code."""

_READS: Final[Mapping[object, Any]] = {str: text, float | None: number, str | None: text, bool | None: truth}
_FACTS: Final = tuple(
    (name, _NAMES.get(name, name), _READS[kind]) for name, kind in get_type_hints(EngineReading).items()
)
"""Each field of EngineReading, its name in a trace and what reads it there."""


_HOST: Final = tuple((fact, fact.removesuffix("_bytes")) for fact in HostMemory.__struct_fields__ if fact != "basis")
"""Each field of HostMemory that a trace has, and its name there."""


def engine_entry(engine: EngineReading) -> dict[str, Any]:
    """Return all that an engine said of itself."""
    return readable({name: getattr(engine, fact) for fact, name, _ in _FACTS})


def engine_of(entry: Mapping[str, Any], place: int) -> EngineReading:
    """Return an engine; one without a name is known by its place in the list."""
    facts = {fact: value for fact, name, read in _FACTS if name in entry and (value := read(entry, name)) is not None}
    return EngineReading(**{"model_name": "unknown", "engine": str(place)} | facts)


def gpu_entry(gpu: Gpu) -> dict[str, Any]:
    """Return a GPU of the engine's.

    One whose holders are unknown for now is without `used`, since a reader takes all that is used for the engine's.
    """
    memory, inside = gpu.reading.memory, gpu.inside or Inside()
    return readable(
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
            "leftovers": [readable({"fate": left.fate, "used": left.used_bytes}) for left in gpu.leftovers] or None,
            "granted": inside.granted_bytes,
            "allocated": inside.allocated_bytes,
            "reserved_by_torch": inside.reserved_bytes,
            "parts": dict(inside.parts) or None,
        }
    )


def gpu_of(entry: Mapping[str, Any], place: int) -> Gpu:
    """Return a GPU of the engine's, which holds what is attributed to it, else what is used and not others'."""
    index = size(entry, "gpu")
    index = place if index is None else index
    used, engine, other = size(entry, "used"), size(entry, "engine"), size(entry, "other")
    return Gpu(
        reading=GpuReading(
            index=index,
            uuid=text(entry, "uuid") or unnamed(index),
            name="",
            memory=_memory(used, size(entry, "total"), size(entry, "reserved")),
            used_peak_bytes=size(entry, "used_peak"),
        ),
        attribution=Attribution.UUID if engine is None else Attribution.PROCESS,
        engine_bytes=engine,
        other_bytes=other,
        held_bytes=max(0, used - (other or 0)) if engine is None and used is not None else engine,
        process_count=size(entry, "processes"),
        leftovers=each(entry, "leftovers", _leftover_of) or (),
        inside=_inside(entry),
    )


def _leftover_of(entry: Mapping[str, Any], _place: int) -> Leftover:
    named = text(entry, "fate")
    fate = next((fate for fate in Fate if fate == named), None)
    if fate is None:
        raise WrongFieldError("fate", named, ", ".join(Fate))
    return Leftover(pid=NO_PID, fate=fate, used_bytes=size(entry, "used"))


def _inside(entry: Mapping[str, Any]) -> Inside | None:
    """Return what the engine's processes said; parts that are not known here are passed over."""
    parts = within(entry, "parts", lambda parts: tuple((part, size(parts, part)) for part in MemoryPart)) or ()
    found = Inside(
        granted_bytes=size(entry, "granted"),
        allocated_bytes=size(entry, "allocated"),
        reserved_bytes=size(entry, "reserved_by_torch"),
        parts=tuple((part, known_bytes) for part, known_bytes in parts if known_bytes is not None),
    )
    return None if found == Inside() else found


def _memory(used: int | None, total: int | None, reserved: int | None) -> GpuMemory | None:
    if used is None or total is None:
        return None
    free = max(0, total - used - (reserved or 0))
    return GpuMemory(total_bytes=total, used_bytes=used, free_bytes=free, reserved_bytes=reserved)


def unnamed(index: int) -> str:
    """Return what a GPU without a UUID is known by; no UUID looks like it."""
    return f"index {index}"


def process_entry(process: EngineProcess) -> dict[str, Any]:
    """Return a process of the engine's."""
    entry = {"role": process.role, "rss": process.rss_bytes, "started_at": process.started_at_seconds}
    return readable({**entry, "anonymous": process.anonymous_bytes, "file": process.file_bytes})


def process_of(entry: Mapping[str, Any], _place: int) -> EngineProcess | None:
    """Return a process; None where its memory is unknown."""
    name = text(entry, "role")
    role = Role.OTHER if name is None else next((role for role in Role if role == name), None)
    if role is None:
        raise WrongFieldError("role", name, ", ".join(Role))
    rss, started = size(entry, "rss"), number(entry, "started_at")
    if rss is None:
        return None
    return EngineProcess(
        pid=NO_PID,
        role=role,
        rss_bytes=rss,
        started_at_seconds=started or 0.0,
        anonymous_bytes=size(entry, "anonymous"),
        file_bytes=size(entry, "file"),
    )


def host_entry(host: HostMemory) -> dict[str, Any]:
    """Return the host memory that the engine runs in."""
    return readable({name: getattr(host, fact) for fact, name in _HOST})


def host_of(entry: Mapping[str, Any]) -> HostMemory:
    """Return the host memory; how it was known is not in a trace."""
    facts = {fact: size(entry, name) for fact, name in _HOST}
    return HostMemory(basis=None, **facts)


def readable(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry to be written, without what is unknown, so that each of its fields can be read again.

    No reader takes a number beyond LARGEST, or text that cannot be shown: one is left out, the other is escaped.
    """
    known = ((field, value) for field, value in entry.items() if value is not None)
    return {field: _written(value) for field, value in known if not (isinstance(value, float) and value > LARGEST)}


def _written(value: object) -> object:
    is_shown = not isinstance(value, str) or value.isprintable()
    return value if is_shown else str(value).encode("unicode_escape").decode()


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
