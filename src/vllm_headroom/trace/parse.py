"""A recorded trace, line by line, to snapshots."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NoReturn

from vllm_headroom.model import EnginePage, EngineProcess, EngineReading, Failure, Gpu, GpuMemory, GpuReading, Snapshot
from vllm_headroom.trace.fields import WrongFieldError, each, number, size, text, time_of, truth
from vllm_headroom.vocabulary import Attribution, Reason, Role, Source

FORMAT: Final = "headroom_trace"
VERSION: Final = 1
NO_TRACE: Final = f'no trace of this version, whose first line is {{"{FORMAT}": {VERSION}}}'
NO_PID: Final = 0
"""A trace tells processes apart by their start alone."""

_GPUS_FAILED: Final = Failure(
    source=Source.NVML, reason=Reason.UNKNOWN, message="the trace has no reading of the GPUs here"
)
_ENGINES_FAILED: Final = Failure(
    source=Source.ENGINE, reason=Reason.UNREACHABLE, message="the trace has no reading of the engines here"
)
_PROCESSES_FAILED: Final = Failure(
    source=Source.PROCESS, reason=Reason.UNAVAILABLE, message="the trace has no reading of the processes here"
)


def snapshots(lines: Iterable[bytes]) -> Iterator[Snapshot | str]:
    """Yield a snapshot for each sample after the header; at the first line that is wrong, yield why and end.

    Blank lines and further headers are passed over, so that rotated traces can be put together.
    """
    number = 0
    for number, line in enumerate(lines, start=1):
        found = _sample(line, first=number == 1)
        if isinstance(found, Snapshot):
            yield found
        elif found is not None:
            yield f"line {number}: {found}"
            return
    if number == 0:
        yield f"line 1: {NO_TRACE}"


def _sample(line: bytes, *, first: bool) -> Snapshot | str | None:
    """Return the sample on a line, what is wrong with it, or None where it is right and has none."""
    record = _record(line)
    if isinstance(record, dict) and record.get(FORMAT) == VERSION:
        return None
    if first or (isinstance(record, dict) and FORMAT in record):
        return NO_TRACE
    return snapshot_of(record) if isinstance(record, dict) else record


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_JSON: Final = json.JSONDecoder(parse_constant=_no_number)


def _record(line: bytes) -> dict[str, Any] | str | None:
    """Return the object on a line, None for a blank line, or what is wrong with it."""
    try:
        content = str(line, "utf-8").strip()
        if not content:
            return None
        record = _JSON.decode(content)
    except UnicodeDecodeError:
        return "not UTF-8"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}"
    except RecursionError:
        return "not JSON of a trace: nested too deep"
    except ValueError as error:
        return f"not JSON: {error}"
    return record if isinstance(record, dict) else "not a JSON object"


def snapshot_of(record: Mapping[str, Any]) -> Snapshot | str:
    """Return one sample as the daemon saw it, or what is wrong with it.

    What is absent or null is unknown; a side that is absent or null counts as failed. `t` serves as both clocks. A GPU
    or engine without an index or a name is known by its place in the list.
    """
    try:
        time = time_of(record)
        gpus = each(record, "gpus", _gpu)
        engines = each(record, "engines", _engine)
        processes = each(record, "processes", _process)
    except WrongFieldError as wrong:
        return str(wrong)
    if gpus is not None and len({gpu.reading.uuid for gpu in gpus}) < len(gpus):
        return "gpus: the same GPU twice"
    return Snapshot(
        time_seconds=time,
        monotonic_seconds=time,
        engines=_ENGINES_FAILED if engines is None else EnginePage(profile="vllm", engines=engines, inputs=()),
        gpus=_GPUS_FAILED if gpus is None else gpus,
        processes=_known(processes),
    )


def unnamed(index: int) -> str:
    """Return what a GPU without a UUID is known by; no UUID looks like it."""
    return f"index {index}"


def _known(processes: tuple[EngineProcess | None, ...] | None) -> tuple[EngineProcess, ...] | Failure:
    """Return the processes, or a failure where the memory of one is unknown: a sum without it would be a lie."""
    known = tuple(process for process in processes or () if process is not None)
    return _PROCESSES_FAILED if processes is None or len(known) < len(processes) else known


def _gpu(entry: dict[str, Any], place: int) -> Gpu:
    """Return a GPU of the engine's, which holds what is attributed to it, else what is used and not others'."""
    index = size(entry, "gpu")
    index = place if index is None else index
    used, total, reserved = size(entry, "used"), size(entry, "total"), size(entry, "reserved")
    engine, other = size(entry, "engine"), size(entry, "other")
    memory, held = None, engine
    if used is not None:
        held = max(0, used - (other or 0)) if engine is None else engine
        if total is not None:
            free = max(0, total - used - (reserved or 0))
            memory = GpuMemory(total_bytes=total, used_bytes=used, free_bytes=free, reserved_bytes=reserved)
    return Gpu(
        reading=GpuReading(index=index, uuid=text(entry, "uuid") or unnamed(index), name="", memory=memory),
        attribution=Attribution.UUID if engine is None else Attribution.PROCESS,
        engine_bytes=engine,
        other_bytes=other,
        held_bytes=held,
        process_count=size(entry, "processes"),
    )


def _engine(entry: dict[str, Any], place: int) -> EngineReading:
    model_name, engine = text(entry, "model_name"), text(entry, "engine")
    return EngineReading(
        model_name="unknown" if model_name is None else model_name,
        engine=str(place) if engine is None else engine,
        running=number(entry, "running"),
        waiting=number(entry, "waiting"),
        finished_total=number(entry, "finished_total"),
        preemptions_total=number(entry, "preemptions_total"),
        kv_used_ratio=number(entry, "kv_used_ratio"),
        kv_capacity_tokens=number(entry, "kv_capacity_tokens"),
        prefix_queries_total=number(entry, "prefix_queries_total"),
        prefix_hits_total=number(entry, "prefix_hits_total"),
        awake=truth(entry, "awake"),
        started_at_seconds=number(entry, "started_at"),
    )


def _process(entry: dict[str, Any], _place: int) -> EngineProcess | None:
    name = text(entry, "role")
    role = Role.OTHER if name is None else next((role for role in Role if role == name), None)
    if role is None:
        raise WrongFieldError("role", name, ", ".join(Role))
    rss, started = size(entry, "rss"), number(entry, "started_at")
    if rss is None:
        return None
    return EngineProcess(pid=NO_PID, role=role, rss_bytes=rss, started_at_seconds=started or 0.0)
