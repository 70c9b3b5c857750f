"""Read a recorded trace, from a file or standard input, into snapshots."""

import json
import sys
import zlib
from codecs import BOM_UTF8, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from gzip import BadGzipFile, GzipFile
from io import BufferedReader
from os import fstat
from pathlib import Path
from typing import Any, Final, cast, get_type_hints

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
    Pool,
    Snapshot,
)
from vllm_headroom.parse.fields import (
    WrongFieldError,
    read_each,
    read_number,
    read_size,
    read_text,
    read_truth,
    read_within,
    refuse_number,
)
from vllm_headroom.trace.entries import (
    ENGINE_FIELDS,
    HEADER,
    HOST_FIELDS,
    LONGEST_LINE_BYTES,
    PROCESS_FIELDS,
    YEAR_10000,
)
from vllm_headroom.units import format_duration, format_instant
from vllm_headroom.vocabulary import (
    REASONS,
    Attribution,
    HostBasis,
    HostPart,
    MemoryPart,
    Reason,
    Role,
    Source,
)
from vllm_headroom_tools.progress import track_lines


class BadInput(Exception):  # noqa: N818 - it describes the input
    """A trace, or a source of one, that cannot be used; the message is one line for the operator."""


(FORMAT,) = HEADER

STDIN: Final = "standard input"
CLOCKS_SECONDS: Final = 300.0
"""Corrections of a clock are smaller."""

BACK: Final = (
    "a clock was set back, or files were put together in a wrong order: FILE.1 comes before FILE"
)
NO_TRACE: Final = f"no trace of this version, whose first line is {json.dumps(HEADER)}"
UNPACK: Final = "packed by {}: unpack it first, only gzip's is read as it is"
FOREIGN: Final = {
    BOM_UTF16_LE: "UTF-16, as some shells write with >: make UTF-8 of it",
    b"\x28\xb5\x2f\xfd": UNPACK.format("zstd"),
    b"\xfd7zXZ": UNPACK.format("xz"),
}
GZIP: Final = b"\x1f\x8b"
MOST_QUOTED: Final = 60
"""Characters of a file that is no trace, in its error message."""

_LACKS: Final = "the trace has no reading of the {} here"
_GPUS_FAILED: Final = Failure(
    source=Source.NVML, reason=Reason.UNKNOWN, message=_LACKS.format("GPUs")
)
_PROCESSES_FAILED: Final = Failure(
    source=Source.PROCESS, reason=Reason.UNAVAILABLE, message=_LACKS.format("processes")
)


def read_trace(
    trace: str, watched: Callable[[Iterator[bytes], int | None], Iterator[bytes]] = track_lines
) -> Iterator[Snapshot]:
    """Yield the snapshots of a file, or of standard input for "-"; `watched` gets the lines and their size in bytes."""
    if trace == "-":
        lines = read_lines(cast(BufferedReader, sys.stdin.buffer))
        yield from _note_clock_steps(parse_trace(watched(lines, None), STDIN), STDIN)
        return
    try:
        with Path(trace).open("rb") as stream:
            n_bytes = None if _is_packed(stream) else fstat(stream.fileno()).st_size
            yield from _note_clock_steps(
                parse_trace(watched(read_lines(stream), n_bytes), trace), trace
            )
    except (OSError, BadInput) as error:
        wrong = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise BadInput(f"{trace}: {wrong}") from error


def _note_clock_steps(seen: Iterator[Snapshot], name: str) -> Iterator[Snapshot]:
    """Yield the snapshots; the first time that the clock goes back is noted on standard error."""
    newest, is_noted = 0.0, False
    for snapshot in seen:
        back = newest - snapshot.time_seconds
        if back > CLOCKS_SECONDS and not is_noted:
            is_noted = True
            with suppress(OSError):  # a note is no reason to end
                sys.stderr.write(
                    f"{name}: at {format_instant(snapshot.time_seconds)} the time goes back by"
                    f" {format_duration(back)}: {BACK}\n"
                )
        newest = max(newest, snapshot.time_seconds)
        yield snapshot


def read_lines(stream: BufferedReader) -> Iterator[bytes]:
    """Yield the lines, also of a gzip file; raises BadInput where that is damaged."""
    plain = GzipFile(fileobj=stream) if _is_packed(stream) else stream
    try:
        yield from iter(partial(plain.readline, LONGEST_LINE_BYTES), b"")
    except (BadGzipFile, EOFError, zlib.error) as error:
        raise BadInput(
            "what gzip packed is damaged, cut off or followed by something else"
        ) from error


def _is_packed(stream: BufferedReader) -> bool:
    return stream.peek(len(GZIP)).startswith(GZIP)


def parse_trace(lines: Iterable[bytes], name: str = "the trace") -> Iterator[Snapshot]:
    """Yield a snapshot for each sample after the header; raises BadInput at the first line that is wrong.

    Blank lines and further headers are skipped, so that rotated traces can be concatenated. An incomplete last line is
    skipped with a note on standard error: the daemon exited while it wrote it, or is writing it now.
    """
    number, rest = 0, iter(lines)
    for number, line in enumerate(rest, start=1):
        record = _parse_record(line)
        if number == 1 and not _is_header(record):
            known = next((name for mark, name in FOREIGN.items() if line.startswith(mark)), None)
            quoted = line[:MOST_QUOTED].decode(errors="replace").strip()
            raise BadInput(
                f"line 1: {NO_TRACE}; this {f'is {known}' if known else f'begins with {quoted!r}'}"
            )
        if isinstance(record, str):
            if line.endswith(b"\n") or next(rest, None) is not None:
                raise BadInput(f"line {number}: {record}")
            with suppress(OSError):  # a note is no reason to end
                sys.stderr.write(f"{name}: line {number}, the last, is cut off and left out\n")
        elif record is not None and not _is_header(record):
            try:
                snapshot = parse_snapshot(record)
            except BadInput as wrong:
                raise BadInput(f"line {number}: {wrong}") from None
            yield snapshot
    if number == 0:
        raise BadInput(f"line 1: {NO_TRACE}; this is empty")


def _is_header(record: object) -> bool:
    return isinstance(record, dict) and record.get(FORMAT) == HEADER[FORMAT]


_JSON: Final = json.JSONDecoder(parse_constant=refuse_number)


def _parse_record(line: bytes) -> dict[str, Any] | str | None:
    """Return the object on a line, None for a blank line, or the error."""
    try:
        content = str(line.removeprefix(BOM_UTF8), "utf-8").strip()
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


def parse_snapshot(record: Mapping[str, Any]) -> Snapshot:
    """Return one sample as the daemon saw it; raises BadInput.

    Absent and null mean unknown, for a whole source that it failed. `t` is the time of both clocks. A GPU or engine
    without an index or a name is identified by its place in the list.
    """
    if FORMAT in record:
        raise BadInput(NO_TRACE)
    time: Any = record.get("t")  # which every record has
    if type(time) not in (int, float) or not 0 <= time < YEAR_10000:
        raise BadInput(str(WrongFieldError("t", time, "seconds since the epoch")))
    try:
        gpus = read_each(record, "gpus", parse_gpu)
        engines = read_each(record, "engines", parse_engine)
        processes = read_each(record, "processes", parse_process)
        host = read_within(record, "host", parse_host)
        pools = read_each(record, "pools", parse_pool) or ()
        named, has_silent_core = (
            read_text(record, "engines_failure"),
            read_truth(record, "silent_core") or False,
        )
    except WrongFieldError as wrong:
        raise BadInput(str(wrong)) from None
    if gpus is not None and len({gpu.reading.uuid for gpu in gpus}) < len(gpus):
        raise BadInput("gpus: the same GPU twice")
    # without the memory of one, a sum would be wrong
    known = tuple(process for process in processes or () if process is not None)
    reason = next(
        (reason for reason in REASONS[Source.ENGINE] if reason == named), Reason.UNREACHABLE
    )
    return Snapshot(
        time_seconds=float(time),
        monotonic_seconds=float(time),
        engines=Failure(source=Source.ENGINE, reason=reason, message=_LACKS.format("engines"))
        if engines is None
        else EnginePage(profile="vllm", engines=engines, inputs=()),
        gpus=_GPUS_FAILED if gpus is None else gpus,
        processes=_PROCESSES_FAILED if processes is None or len(known) < len(processes) else known,
        host=host,
        has_silent_core=has_silent_core,
        pools=tuple(pool for pool in pools if pool is not None),
    )


_READS: Final[Mapping[object, Any]] = {
    str: read_text,
    int: read_size,
    float: read_number,
    int | None: read_size,
    float | None: read_number,
    str | None: read_text,
    bool | None: read_truth,
}
_KINDS: Final[Mapping[type, Any]] = {
    kind: get_type_hints(kind) for kind in (EngineReading, EngineProcess, HostMemory, Inside)
}
_INSIDE: Final = {
    "granted_bytes": "granted",
    "allocated_bytes": "allocated",
    "reserved_bytes": "reserved_by_torch",
}


def _read_facts(
    entry: Mapping[str, Any], kind: type, names: Iterable[tuple[str, str]]
) -> dict[str, Any]:
    """Return the known facts of a model, by their names in the entry."""
    return {
        fact: value
        for fact, name in names
        if name in entry and (value := _READS[_KINDS[kind][fact]](entry, name)) is not None
    }


NO_PID: Final = 0
"""In a trace, processes are identified by their start only."""


def parse_engine(entry: Mapping[str, Any], place: int) -> EngineReading:
    """Return an engine; without a name it is identified by its place in the list."""
    named = {"model_name": "unknown", "engine": str(place)}
    return EngineReading(**named | _read_facts(entry, EngineReading, ENGINE_FIELDS))


def parse_gpu(entry: Mapping[str, Any], place: int) -> Gpu:
    """Return a GPU of the engine's; held is what is attributed to the engine, else what is used without others'."""
    index = read_size(entry, "gpu")
    index = place if index is None else index
    used, engine, other = (
        read_size(entry, "used"),
        read_size(entry, "engine"),
        read_size(entry, "other"),
    )
    total, reserved, memory = read_size(entry, "total"), read_size(entry, "reserved"), None
    if used is not None and total is not None:
        free = max(0, total - used - (reserved or 0))
        memory = GpuMemory(
            total_bytes=total, used_bytes=used, free_bytes=free, reserved_bytes=reserved
        )
    return Gpu(
        reading=GpuReading(
            index=index,
            uuid=read_text(entry, "uuid") or name_by_index(index),
            name="",
            memory=memory,
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
        read_within(
            entry,
            "parts",
            lambda parts: tuple((part, read_size(parts, part)) for part in MemoryPart),
        )
        or ()
    )
    known = tuple((part, known_bytes) for part, known_bytes in parts if known_bytes is not None)
    found = Inside(parts=known, **_read_facts(entry, Inside, _INSIDE.items()))
    return None if found == Inside() else found


def name_by_index(index: int) -> str:
    """Return the name of a GPU without a UUID; no UUID looks like it."""
    return f"index {index}"


def parse_process(entry: Mapping[str, Any], _place: int) -> EngineProcess | None:
    """Return a process; None where its memory is unknown."""
    name = read_text(entry, "role")
    role = Role.OTHER if name is None else next((role for role in Role if role == name), None)
    if role is None:
        raise WrongFieldError("role", name, ", ".join(Role))
    facts: dict[str, Any] = {
        "started_at_seconds": 0.0,
        **_read_facts(entry, EngineProcess, PROCESS_FIELDS),
    }
    return EngineProcess(pid=NO_PID, role=role, **facts) if "rss_bytes" in facts else None


def parse_pool(entry: Mapping[str, Any], _place: int) -> Pool | None:
    """Return a configured pool; None where this version does not know its part or role."""
    part, role, size_bytes = (
        read_text(entry, "part"),
        read_text(entry, "role"),
        read_size(entry, "bytes"),
    )
    if part not in tuple(HostPart) or role not in (None, *Role) or size_bytes is None:
        return None
    return Pool(
        part=HostPart(part), role=None if role is None else Role(role), size_bytes=size_bytes
    )


def parse_host(entry: Mapping[str, Any]) -> HostMemory:
    """Return the host memory; a basis that this version does not know is none."""
    named = read_text(entry, "basis")
    basis = next((basis for basis in HostBasis if basis == named), None)
    return HostMemory(basis=basis, **_read_facts(entry, HostMemory, HOST_FIELDS))
