"""Write and read the entries of a trace line: GPUs, engines, processes and the host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, get_type_hints

from vllm_headroom.model import (
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
from vllm_headroom.parse.fields import (
    LARGEST,
    WrongFieldError,
    read_each,
    read_number,
    read_size,
    read_text,
    read_truth,
    read_within,
)
from vllm_headroom.vocabulary import Attribution, HostBasis, MemoryPart, Role

NO_PID: Final = 0
"""In a trace, processes are identified by their start only."""

_NAMES: Final = {"gpu_memory_utilization_ratio": "gpu_memory_utilization", "started_at_seconds": "started_at"}
"""The engine's facts with another name in the format."""

_READS: Final[Mapping[object, Any]] = {
    str: read_text,
    float | None: read_number,
    str | None: read_text,
    bool | None: read_truth,
}
_FACTS: Final = tuple(
    (name, _NAMES.get(name, name), _READS[kind]) for name, kind in get_type_hints(EngineReading).items()
)
"""Each field of EngineReading, its name in a trace and its parser."""


_HOST: Final = tuple((fact, fact.removesuffix("_bytes")) for fact in HostMemory.__struct_fields__ if fact != "basis")
"""Each figure of HostMemory, and its name in a trace."""


def build_engine_entry(engine: EngineReading) -> dict[str, Any]:
    """Return all facts of an engine."""
    return drop_unreadable({name: getattr(engine, fact) for fact, name, _ in _FACTS})


def parse_engine(entry: Mapping[str, Any], place: int) -> EngineReading:
    """Return an engine; without a name it is identified by its place in the list."""
    facts = {fact: value for fact, name, read in _FACTS if name in entry and (value := read(entry, name)) is not None}
    return EngineReading(**{"model_name": "unknown", "engine": str(place)} | facts)


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
            "leftovers": [drop_unreadable({"fate": left.fate, "used": left.used_bytes}) for left in gpu.leftovers]
            or None,
            "granted": inside.granted_bytes,
            "allocated": inside.allocated_bytes,
            "reserved_by_torch": inside.reserved_bytes,
            "parts": dict(inside.parts) or None,
        }
    )


def parse_gpu(entry: Mapping[str, Any], place: int) -> Gpu:
    """Return a GPU of the engine's; held is what is attributed to the engine, else what is used without others'."""
    index = read_size(entry, "gpu")
    index = place if index is None else index
    used, engine, other = read_size(entry, "used"), read_size(entry, "engine"), read_size(entry, "other")
    return Gpu(
        reading=GpuReading(
            index=index,
            uuid=read_text(entry, "uuid") or name_by_index(index),
            name="",
            memory=_build_memory(used, read_size(entry, "total"), read_size(entry, "reserved")),
            used_peak_bytes=read_size(entry, "used_peak"),
        ),
        attribution=Attribution.UUID if engine is None else Attribution.PROCESS,
        engine_bytes=engine,
        other_bytes=other,
        held_bytes=max(0, used - (other or 0)) if engine is None and used is not None else engine,
        process_count=read_size(entry, "processes"),
        leftovers=read_each(entry, "leftovers", _parse_leftover) or (),
        inside=_parse_inside(entry),
    )


def _parse_leftover(entry: Mapping[str, Any], _place: int) -> Leftover:
    named = read_text(entry, "fate")
    fate = next((fate for fate in Fate if fate == named), None)
    if fate is None:
        raise WrongFieldError("fate", named, ", ".join(Fate))
    return Leftover(pid=NO_PID, fate=fate, used_bytes=read_size(entry, "used"))


def _parse_inside(entry: Mapping[str, Any]) -> Inside | None:
    """Return the probe's facts, without parts that this version does not know."""
    parts = (
        read_within(entry, "parts", lambda parts: tuple((part, read_size(parts, part)) for part in MemoryPart)) or ()
    )
    found = Inside(
        granted_bytes=read_size(entry, "granted"),
        allocated_bytes=read_size(entry, "allocated"),
        reserved_bytes=read_size(entry, "reserved_by_torch"),
        parts=tuple((part, known_bytes) for part, known_bytes in parts if known_bytes is not None),
    )
    return None if found == Inside() else found


def _build_memory(used: int | None, total: int | None, reserved: int | None) -> GpuMemory | None:
    if used is None or total is None:
        return None
    free = max(0, total - used - (reserved or 0))
    return GpuMemory(total_bytes=total, used_bytes=used, free_bytes=free, reserved_bytes=reserved)


def name_by_index(index: int) -> str:
    """Return the name of a GPU without a UUID; no UUID looks like it."""
    return f"index {index}"


def build_process_entry(process: EngineProcess) -> dict[str, Any]:
    """Return a process of the engine's."""
    entry = {"role": process.role, "rss": process.rss_bytes, "started_at": process.started_at_seconds}
    entry |= {"anonymous": process.anonymous_bytes, "file": process.file_bytes, "swap": process.swap_bytes}
    entry |= {"state": process.state, "cpu": process.cpu_seconds, "cpu_pressure": process.cpu_pressure_ratio}
    return drop_unreadable({**entry, "wait": process.wait_seconds})


def parse_process(entry: Mapping[str, Any], _place: int) -> EngineProcess | None:
    """Return a process; None where its memory is unknown."""
    name = read_text(entry, "role")
    role = Role.OTHER if name is None else next((role for role in Role if role == name), None)
    if role is None:
        raise WrongFieldError("role", name, ", ".join(Role))
    rss, started = read_size(entry, "rss"), read_number(entry, "started_at")
    if rss is None:
        return None
    return EngineProcess(
        pid=NO_PID,
        role=role,
        rss_bytes=rss,
        started_at_seconds=started or 0.0,
        anonymous_bytes=read_size(entry, "anonymous"),
        file_bytes=read_size(entry, "file"),
        state=read_text(entry, "state"),
        cpu_seconds=read_number(entry, "cpu"),
        cpu_pressure_ratio=read_number(entry, "cpu_pressure"),
        wait_seconds=read_number(entry, "wait"),
        swap_bytes=read_size(entry, "swap"),
    )


def build_host_entry(host: HostMemory) -> dict[str, Any]:
    """Return the engine's host memory."""
    return drop_unreadable({"basis": host.basis, **{name: getattr(host, fact) for fact, name in _HOST}})


def parse_host(entry: Mapping[str, Any]) -> HostMemory:
    """Return the host memory; a basis that this version does not know is none."""
    named = read_text(entry, "basis")
    facts: dict[str, Any] = {
        fact: (read_number if fact.endswith("_ratio") else read_size)(entry, name) for fact, name in _HOST
    }
    return HostMemory(basis=next((basis for basis in HostBasis if basis == named), None), **facts)


def drop_unreadable(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry for writing: without unknown values and numbers beyond LARGEST, with unprintable text escaped."""
    known = ((field, value) for field, value in entry.items() if value is not None)
    return {field: _escape_text(value) for field, value in known if not (isinstance(value, float) and value > LARGEST)}


def _escape_text(value: object) -> object:
    is_shown = not isinstance(value, str) or value.isprintable()
    return value if is_shown else str(value).encode("unicode_escape").decode()


HEADER: Final = {"headroom_trace": 1}


def encode_line(record: dict[str, Any]) -> bytes:
    """Return a record as a line."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def build_record(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot's record: the engine's GPUs, the engines and their processes, None for a failed source."""
    gpus, page, processes = snapshot.gpus, snapshot.engines, snapshot.processes
    record: dict[str, Any] = {"t": round(snapshot.time_seconds, 3), "gpus": None, "engines": None, "processes": None}
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
    return record if snapshot.host is None else {**record, "host": build_host_entry(snapshot.host)}
