"""Read a recorded trace from a file or standard input into snapshots."""

import json
import sys
import zlib
from codecs import BOM_UTF8, BOM_UTF16_LE
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from enum import StrEnum
from functools import partial
from gzip import BadGzipFile, GzipFile
from io import BufferedReader
from os import fstat
from pathlib import Path
from typing import Any, Final, TypeVar, cast, get_type_hints

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
    ServerReply,
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
    ServerAnswer,
    Source,
)
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.progress import track_lines

(FORMAT,) = HEADER

STDIN: Final = "standard input"

MAX_CLOCK_STEP_SECONDS: Final = 300.0
"""If the clock is set back by more than this, the step is reported. Routine clock corrections are
smaller.
"""

CLOCK_WENT_BACK: Final = (
    "a clock was set back, or files were put together in a wrong order: FILE.1 comes before FILE"
)
NO_TRACE: Final = f"no trace of this version, whose first line is {json.dumps(HEADER)}"
UNPACK: Final = "packed by {}: unpack it first, only gzip's is read as it is"
OTHER_FORMATS: Final = {
    BOM_UTF16_LE: "UTF-16, as some shells write with >: make UTF-8 of it",
    b"\x28\xb5\x2f\xfd": UNPACK.format("zstd"),
    b"\xfd7zXZ": UNPACK.format("xz"),
}
"""Descriptions of other file formats, keyed by the first bytes of such a file."""

GZIP_MAGIC: Final = b"\x1f\x8b"

MAX_QUOTED_BYTES: Final = 60
"""The number of bytes that an error message quotes. The file quoted is not a trace."""

_NO_READING: Final = "the trace has no reading of the {} here"
_GPUS_FAILED: Final = Failure(
    source=Source.NVML, reason=Reason.UNKNOWN, message=_NO_READING.format("GPUs")
)
_PROCESSES_FAILED: Final = Failure(
    source=Source.PROCESS, reason=Reason.UNAVAILABLE, message=_NO_READING.format("processes")
)


def read_trace(trace: str) -> Iterator[Snapshot]:
    """Yield the snapshots in a file, or on standard input for "-".

    Raises BadInput if it cannot be read or is not a trace. Shows the progress on a terminal.
    """
    with open_lines(trace) as lines:
        yield from read_snapshots(lines, trace)


def read_snapshots(lines: Iterable[bytes], trace: str) -> Iterator[Snapshot]:
    """Yield the snapshots in a trace's lines.

    A large backward step of the trace's clock is reported. Raises BadInput if the lines are not a
    trace.
    """
    name = STDIN if trace == "-" else trace
    yield from _note_clock_steps(parse_trace(lines, name), name)


@contextmanager
def open_lines(name: str) -> Iterator[Iterator[bytes]]:
    """Open the lines of a file, as `read_lines` returns them.

    The name "-" means standard input. Raises BadInput if the file cannot be read. Adds the file's
    name to the message of any BadInput raised in the `with` block. Shows the progress on a
    terminal.
    """
    # The generator is closed here to erase the progress bar before an error is reported. Python
    # 3.13 does not close a generator at exit if a traceback refers to it.
    if name == "-":
        lines = track_lines(read_lines(cast(BufferedReader, sys.stdin.buffer)), None)
        with closing(lines):
            yield lines
        return
    try:
        with Path(name).open("rb") as stream:
            # The size of a compressed file does not reveal the total size of its lines.
            total_bytes = None if _is_packed(stream) else fstat(stream.fileno()).st_size
            with closing(track_lines(read_lines(stream), total_bytes)) as lines:
                yield lines
    except OSError as error:
        raise BadInput(f"{name}: cannot be read: {error.strerror}") from error
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from error


def _note_clock_steps(snapshots: Iterator[Snapshot], name: str) -> Iterator[Snapshot]:
    """Yield the snapshots; report the first large backward step of the clock on standard error."""
    newest_seconds = 0.0
    is_noted = False
    for snapshot in snapshots:
        step_seconds = newest_seconds - snapshot.time_seconds
        if step_seconds > MAX_CLOCK_STEP_SECONDS and not is_noted:
            is_noted = True
            _write_note(
                f"{name}: at {format_instant(snapshot.time_seconds)} the time goes back by"
                f" {format_duration(step_seconds)}: {CLOCK_WENT_BACK}"
            )
        # Keep the highest time so far, because a backward step is measured from this time.
        newest_seconds = max(newest_seconds, snapshot.time_seconds)
        yield snapshot


def _write_note(line: str) -> None:
    with suppress(OSError):  # If a note cannot be written, the command continues.
        sys.stderr.write(f"{line}\n")


def read_lines(stream: BufferedReader) -> Iterator[bytes]:
    """Yield the lines of a file, decompressing gzip; raise BadInput if the file is damaged.

    A line that is longer than the daemon's maximum is split into several lines.
    """
    plain = GzipFile(fileobj=stream) if _is_packed(stream) else stream
    try:
        yield from iter(partial(plain.readline, LONGEST_LINE_BYTES), b"")
    except (BadGzipFile, EOFError, zlib.error) as error:
        raise BadInput(
            "what gzip packed is damaged, cut off or followed by something else"
        ) from error


def _is_packed(stream: BufferedReader) -> bool:
    return stream.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC)


def parse_trace(lines: Iterable[bytes], name: str = "the trace") -> Iterator[Snapshot]:
    """Yield a snapshot for each sample after the header.

    Raises BadInput at the first invalid line. Blank lines and further headers are skipped, so that
    rotated traces can be concatenated. An incomplete last line is skipped with a note on standard
    error. The daemon may still be writing it, or may have exited while writing it.
    """
    number = 0
    remaining_lines = iter(lines)
    for number, line in enumerate(remaining_lines, start=1):
        record = _parse_record(line)
        if number == 1 and not _is_header(record):
            raise BadInput(f"line 1: {NO_TRACE}; this {_describe_content(line)}")
        if isinstance(record, str):
            # Only the last line may be incomplete. Earlier in the file, an incomplete line is
            # damage.
            is_incomplete = not line.endswith(b"\n") and next(remaining_lines, None) is None
            if not is_incomplete:
                raise BadInput(f"line {number}: {record}")
            _write_note(f"{name}: line {number}, the last, is cut off and left out")
        # A header in the middle of a file means that several traces were concatenated.
        elif record is not None and not _is_header(record):
            try:
                snapshot = parse_snapshot(record)
            except BadInput as error:
                raise BadInput(f"line {number}: {error}") from None
            yield snapshot
    if number == 0:
        raise BadInput(f"line 1: {NO_TRACE}; this is empty")


def _describe_content(line: bytes) -> str:
    """Describe a file that is not a trace, as the end of a sentence.

    The description depends on the file's first line.
    """
    description = find_other_format(line)
    if description is not None:
        return f"is {description}"
    # Imported here because only errors need it, and `plan --help` imports this module.
    from vllm_headroom.parse.log.reader import read_log  # noqa: PLC0415

    if read_log((line,)).starts:
        return "is a log of an engine, which vllm-headroom advise reads"
    quoted = line[:MAX_QUOTED_BYTES].decode(errors="replace").strip()
    return f"begins with {quoted!r}"


def find_other_format(line: bytes) -> str | None:
    """Return a file's format with advice, judging by its first line.

    Returns None if the format is unknown.
    """
    for beginning, description in OTHER_FORMATS.items():
        if line.startswith(beginning):
            return description
    return None


def begins_trace(line: bytes) -> bool:
    """Return whether this first line is the header of a trace."""
    return _is_header(_parse_record(line))


def _is_header(record: object) -> bool:
    return isinstance(record, dict) and record.get(FORMAT) == HEADER[FORMAT]


_JSON: Final = json.JSONDecoder(parse_constant=refuse_number)


def _parse_record(line: bytes) -> dict[str, Any] | str | None:
    """Return the object on a line, or a message describing the problem.

    Returns None for a blank line.
    """
    try:
        # Editors on other operating systems may add a byte order mark.
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
    """Return a sample as the daemon saw it.

    Raises BadInput if a field has an invalid value. A field that is absent or null is unknown. A
    source that is absent or null is treated as failed. `t` is used as the time of both clocks. A
    GPU without an index, or an engine without a name, is identified by its position in the list.
    """
    if FORMAT in record:
        raise BadInput(NO_TRACE)
    time: Any = record.get("t")
    # type() is used, because isinstance(True, int) is true.
    if type(time) not in (int, float) or not 0 <= time < YEAR_10000:
        raise BadInput(str(WrongFieldError("t", time, "seconds since the epoch")))
    try:
        gpus = read_each(record, "gpus", parse_gpu)
        engines = read_each(record, "engines", parse_engine)
        processes = read_each(record, "processes", parse_process)
        host = read_within(record, "host", parse_host)
        pools = read_each(record, "pools", parse_pool) or ()
        engines_failure = read_text(record, "engines_failure")
        engines_status = read_size(record, "engines_status")
        server = read_within(record, "server", parse_server)
        has_silent_core = read_truth(record, "silent_core") or False
    except WrongFieldError as error:
        raise BadInput(str(error)) from None
    if gpus is not None and len({gpu.reading.uuid for gpu in gpus}) < len(gpus):
        raise BadInput("gpus: the same GPU twice")
    return Snapshot(
        time_seconds=float(time),
        monotonic_seconds=float(time),
        engines=_build_page(engines, engines_failure, engines_status),
        gpus=_GPUS_FAILED if gpus is None else gpus,
        processes=_join_processes(processes),
        host=host,
        server=server,
        has_silent_core=has_silent_core,
        pools=tuple(pool for pool in pools if pool is not None),
    )


def _build_page(
    engines: tuple[EngineReading, ...] | None, reason_name: str | None, http_status: int | None
) -> EnginePage | Failure:
    """Return the engines as a page, or a failure if `engines` is None.

    A reason that is missing or unknown to this version becomes "unreachable".
    """
    if engines is not None:
        return EnginePage(profile="vllm", engines=engines, inputs=())
    reason = Reason.UNREACHABLE
    # Only the reasons that this source can have are accepted.
    for known_reason in REASONS[Source.ENGINE]:
        if known_reason == reason_name:
            reason = known_reason
    return Failure(
        source=Source.ENGINE,
        reason=reason,
        message=_NO_READING.format("engines"),
        http_status=http_status,
    )


def _join_processes(
    processes: tuple[EngineProcess | None, ...] | None,
) -> tuple[EngineProcess, ...] | Failure:
    """Return the processes, or a Failure if they are absent.

    Also returns a Failure if the memory of any process is unknown. Sums would be too low without
    it.
    """
    readings = tuple(process for process in processes or () if process is not None)
    if processes is None or len(readings) < len(processes):
        return _PROCESSES_FAILED
    return readings


_FIELD_READERS: Final[Mapping[object, Any]] = {
    str: read_text,
    int: read_size,
    float: read_number,
    int | None: read_size,
    float | None: read_number,
    str | None: read_text,
    bool | None: read_truth,
}
"""The functions that read a field of a trace, by the field's type."""

_FIELD_TYPES: Final[Mapping[type, Any]] = {
    kind: get_type_hints(kind) for kind in (EngineReading, EngineProcess, HostMemory, Inside)
}
"""The types of each model's fields, by model and field."""

_INSIDE_FIELDS: Final = {
    "granted_bytes": "granted",
    "allocated_bytes": "allocated",
    "reserved_bytes": "reserved_by_torch",
}
"""The names that the fields of Inside have in a trace."""


def _read_fields(
    entry: Mapping[str, Any], kind: type, names: Iterable[tuple[str, str]]
) -> dict[str, Any]:
    """Return the values of a model's fields as keyword arguments for the model.

    `names` pairs each field with its name in the entry. A field that is absent or null is omitted.
    Raises WrongFieldError if a value has the wrong type.
    """
    values = {}
    for field, name in names:
        if name not in entry:
            continue
        read = _FIELD_READERS[_FIELD_TYPES[kind][field]]
        value = read(entry, name)
        if value is not None:
            values[field] = value
    return values


_Member = TypeVar("_Member", bound=StrEnum)


def _find_member(kind: type[_Member], value: str | None) -> _Member | None:
    """Return the member with this value, or None if this version does not have it."""
    return next((member for member in kind if member == value), None)


NO_PID: Final = 0
"""The pid that every process in a trace gets. A trace identifies processes only by their start
time.
"""


def parse_engine(entry: Mapping[str, Any], place: int) -> EngineReading:
    """Return an engine; without a name, it is identified by its position in the list."""
    defaults = {"model_name": "unknown", "engine": str(place)}
    return EngineReading(**defaults | _read_fields(entry, EngineReading, ENGINE_FIELDS))


def parse_gpu(entry: Mapping[str, Any], place: int) -> Gpu:
    """Return a GPU of the engine.

    Without an index, the GPU is identified by its position in the list. The held bytes are those
    attributed to the engine. If the attributed bytes are unknown, the held bytes are the used bytes
    minus those of other processes. The held bytes are None if the used bytes are also unknown.
    Raises WrongFieldError if a field has an invalid value.
    """
    index = read_size(entry, "gpu")
    if index is None:
        index = place
    used_bytes = read_size(entry, "used")
    engine_bytes = read_size(entry, "engine")
    other_bytes = read_size(entry, "other")
    memory = _parse_gpu_memory(entry, used_bytes)
    held_bytes = engine_bytes
    # Without the engine's own figure, count all bytes except those of other processes.
    if engine_bytes is None and used_bytes is not None:
        held_bytes = max(0, used_bytes - (other_bytes or 0))
    return Gpu(
        reading=GpuReading(
            index=index,
            uuid=read_text(entry, "uuid") or name_by_index(index),
            name="",
            memory=memory,
            used_peak_bytes=read_size(entry, "used_peak"),
            utilization_ratio=read_number(entry, "utilization"),
        ),
        attribution=Attribution.UUID if engine_bytes is None else Attribution.PROCESS,
        engine_bytes=engine_bytes,
        other_bytes=other_bytes,
        held_bytes=held_bytes,
        process_count=read_size(entry, "processes"),
        leftovers=read_each(entry, "leftovers", _parse_leftover) or (),
        inside=_parse_inside(entry),
    )


def _parse_gpu_memory(entry: Mapping[str, Any], used_bytes: int | None) -> GpuMemory | None:
    """Return a GPU's memory, or None if the used or total bytes are unknown."""
    total_bytes = read_size(entry, "total")
    reserved_bytes = read_size(entry, "reserved")
    if used_bytes is None or total_bytes is None:
        return None
    return GpuMemory(
        total_bytes=total_bytes,
        used_bytes=used_bytes,
        free_bytes=max(0, total_bytes - used_bytes - (reserved_bytes or 0)),
        reserved_bytes=reserved_bytes,
    )


def _parse_leftover(entry: Mapping[str, Any], _place: int) -> Leftover:
    """Return a process that outlived its engine; raise WrongFieldError for an unknown fate."""
    name = read_text(entry, "fate")
    fate = _find_member(Fate, name)
    if fate is None:
        raise WrongFieldError("fate", name, ", ".join(Fate))
    return Leftover(pid=NO_PID, fate=fate, used_bytes=read_size(entry, "used"))


def _parse_inside(entry: Mapping[str, Any]) -> Inside | None:
    """Return the probe's facts about a GPU.

    Returns None if the trace contains no facts from the probe. Parts that this version does not
    know are omitted.
    """
    sizes = read_within(entry, "parts", _parse_parts) or ()
    inside = Inside(parts=sizes, **_read_fields(entry, Inside, _INSIDE_FIELDS.items()))
    return None if inside == Inside() else inside


def _parse_parts(entry: Mapping[str, Any]) -> tuple[tuple[MemoryPart, int], ...]:
    """Return the parts of the engine's memory in an entry, in bytes."""
    parts = []
    for part in MemoryPart:
        size_bytes = read_size(entry, part)
        if size_bytes is not None:
            parts.append((part, size_bytes))
    return tuple(parts)


def name_by_index(index: int) -> str:
    """Return a name for a GPU without a UUID.

    The name cannot be mistaken for a UUID.
    """
    return f"index {index}"


def parse_process(entry: Mapping[str, Any], _place: int) -> EngineProcess | None:
    """Return a process, or None if its memory is unknown.

    Raises WrongFieldError if this version does not know the role. Sums over processes would be
    wrong.
    """
    name = read_text(entry, "role")
    role = Role.OTHER if name is None else _find_member(Role, name)
    if role is None:
        raise WrongFieldError("role", name, ", ".join(Role))
    values = _read_fields(entry, EngineProcess, PROCESS_FIELDS)
    if "rss_bytes" not in values:
        return None
    return EngineProcess(pid=NO_PID, role=role, **{"started_at_seconds": 0.0, **values})


def parse_pool(entry: Mapping[str, Any], _place: int) -> Pool | None:
    """Return a configured pool, or None if its size is unknown.

    Also returns None if this version does not know the pool's part or role. Raises WrongFieldError
    if a field has an invalid value.
    """
    part = _find_member(HostPart, read_text(entry, "part"))
    role_name = read_text(entry, "role")
    size_bytes = read_size(entry, "bytes")
    if part is None or size_bytes is None:
        return None
    role = _find_member(Role, role_name)
    if role_name is not None and role is None:
        return None
    return Pool(part=part, role=role, size_bytes=size_bytes)


def parse_server(entry: Mapping[str, Any]) -> ServerReply | None:
    """Return the server's reply.

    Returns None if this version does not know this kind of reply. Raises WrongFieldError for a
    field with a wrong value.
    """
    answer = _find_member(ServerAnswer, read_text(entry, "answer"))
    requests = read_number(entry, "requests")
    return None if answer is None else ServerReply(answer=answer, requests=requests)


def parse_host(entry: Mapping[str, Any]) -> HostMemory:
    """Return the host memory; a basis unknown to this version becomes None.

    Raises WrongFieldError for a field with a wrong value.
    """
    basis = _find_member(HostBasis, read_text(entry, "basis"))
    return HostMemory(basis=basis, **_read_fields(entry, HostMemory, HOST_FIELDS))
