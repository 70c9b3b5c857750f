"""Read a snapshot of torch's allocator without torch.

The file is a pickle of plain data. The file may have been forged, so all of its content is checked
and bounded.
"""

import io
import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from vllm_headroom.model import LineHolding
from vllm_headroom.parse.fields import LARGEST
from vllm_headroom.trace.entries import YEAR_10000
from vllm_headroom_tools.bad_input import BadInput

MAX_FILE_BYTES: Final = 64 << 20
"""The maximum file size. The probe never writes larger files (vllm_headroom_probe.snapshot)."""

MAX_FILE_BLOCKS: Final = 500_000
"""The maximum number of blocks, and the maximum number of events. A vLLM process has thousands of
each. A forged file may repeat a list endlessly.
"""

MAX_LARGEST: Final = 10
"""The number of lines of code in the report. These are the lines that hold the most memory."""

TORCH_CODE: Final = re.compile(r"(site|dist)-packages/torch/|/torchinductor_|/torch_compile_cache/")
"""Matches paths in torch itself and in code that torch generates. Such paths are skipped. The line
that calls torch shows better who holds the memory.
"""

MAX_OPERATIONS: Final = 10_000_000
"""The maximum number of operations in a pickle. A vLLM snapshot with a full history has a million.
Each operation takes up to 100 bytes of memory, and 10 million take 10 s.
"""

PLAIN_OPERATIONS: Final = (
    "PROTO FRAME STOP MARK POP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT"
    " SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES EMPTY_LIST APPEND APPENDS"
    " EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT SETITEM SETITEMS BINPUT LONG_BINPUT MEMOIZE"
    " BINGET LONG_BINGET"
)
"""The operations that build numbers, strings, lists, tuples and dictionaries. All other operations,
such as imports and calls, are rejected.
"""


class PlainUnpickler(pickle._Unpickler):  # noqa: SLF001
    """An unpickler that accepts only plain data.

    The class is based on the Python implementation. With a forged file, the C unpickler may
    allocate any amount of memory.
    """

    n_operations = 0


def _build_counted(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return an operation that counts how often it runs, and raises ValueError above the limit."""

    def count_and_load(unpickler: Any) -> None:  # noqa: ANN401 - a PlainUnpickler
        """Run one pickle operation; raise ValueError after MAX_OPERATIONS."""
        unpickler.n_operations += 1
        if unpickler.n_operations > MAX_OPERATIONS:
            raise ValueError("too many operations")
        load(unpickler)

    return count_and_load


def _list_plain_operations() -> Iterator[tuple[int, Callable[[Any], None]]]:
    """Yield the opcode and the function of each accepted operation."""
    for name in PLAIN_OPERATIONS.split():
        (code,) = getattr(pickle, name)
        yield code, _build_counted(pickle._Unpickler.dispatch[code])  # noqa: SLF001


PlainUnpickler.dispatch = dict(_list_plain_operations())


class ReadSnapshot(Struct, frozen=True, kw_only=True):
    """The facts about torch's memory in a process, from a snapshot."""

    active_bytes: int
    """The memory in use by tensors."""
    reserved_bytes: int
    """The memory that torch has allocated from the driver."""
    n_blocks: int
    """The number of blocks in the active memory."""
    history_from_seconds: float | None
    """The time of the oldest event in the history, in seconds since the epoch. The value is None if
    there are no events.
    """
    largest: tuple[LineHolding, ...]
    """The lines of code that hold the most memory, largest first."""


CodePlace = tuple[str | None, int | None]
"""The path and number of a line of code. A block without a stack has None."""


def read_snapshot_file(path: Path) -> ReadSnapshot:
    """Read a snapshot.

    Raises BadInput if the file cannot be read or is not a snapshot.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise BadInput(f"{path}: has more than {MAX_FILE_BYTES >> 20} MiB, which no snapshot has")
    return parse_torch_snapshot(content, str(path))


def parse_torch_snapshot(content: bytes, name: str) -> ReadSnapshot:
    """Parse the pickle of a snapshot.

    Raises BadInput with the file's name if the pickle is not a snapshot.
    """
    try:
        snapshot = PlainUnpickler(io.BytesIO(content)).load()
        return _summarise(snapshot)
    # A forged pickle may raise any Python error, such as KeyError for an unknown operation.
    except Exception as error:
        problem = f"no snapshot of torch's memory ({type(error).__name__})"
        raise BadInput(f"{name}: {problem}") from error


def _summarise(snapshot: Any) -> ReadSnapshot:  # noqa: ANN401 - anything that a pickle holds
    """Summarise a snapshot; an unexpected structure may raise any Python error."""
    times_seconds = _list_allocation_times(snapshot["device_traces"])
    # Stacks are cached by identity. A forged file may repeat a long stack in every block.
    places: dict[int, CodePlace] = {}
    sizes_bytes: defaultdict[CodePlace, int] = defaultdict(int)
    counts: defaultdict[CodePlace, int] = defaultdict(int)
    since_seconds: defaultdict[CodePlace, list[float | None]] = defaultdict(list)
    reserved_bytes = 0
    n_read = 0
    for segment in snapshot["segments"]:
        reserved_bytes += _check_size(segment["total_size"])
        for block in segment["blocks"]:
            n_read += 1
            if n_read > MAX_FILE_BLOCKS:
                raise ValueError("too many blocks")
            if block["state"].startswith("active"):
                frames = block.get("frames") or ()
                if id(frames) not in places:
                    places[id(frames)] = _find_place(frames)
                place = places[id(frames)]
                sizes_bytes[place] += _check_size(block["size"])
                counts[place] += 1
                since_seconds[place].append(times_seconds.get(block.get("address")))
    largest_places = sorted(sizes_bytes, key=lambda place: -sizes_bytes[place])[:MAX_LARGEST]
    return ReadSnapshot(
        active_bytes=sum(sizes_bytes.values()),
        reserved_bytes=reserved_bytes,
        n_blocks=sum(counts.values()),
        history_from_seconds=min(times_seconds.values(), default=None),
        largest=tuple(
            LineHolding(
                file=place[0],
                line=place[1],
                size_bytes=sizes_bytes[place],
                n_blocks=counts[place],
                since_seconds=_find_oldest(since_seconds[place]),
            )
            for place in largest_places
        ),
    )


def _list_allocation_times(traces: Iterable[Any]) -> dict[int | None, float]:
    """Return when each address was last allocated, in seconds since the epoch.

    Raises ValueError for too many events or for an impossible time.
    """
    times_seconds: dict[int | None, float] = {}
    n_read = 0
    for trace in traces:
        for event in trace:
            n_read += 1
            if n_read > MAX_FILE_BLOCKS:
                raise ValueError("too many events")
            if event["action"] == "alloc" and "time_us" in event:
                seconds = event["time_us"] / 1e6
                if not 0 <= seconds < YEAR_10000:
                    raise ValueError("a time that no clock has")
                times_seconds[event["addr"]] = seconds
    return times_seconds


def _find_oldest(times_seconds: list[float | None]) -> float | None:
    """Return the earliest time, or None if any of them is unknown."""
    known_seconds = [seconds for seconds in times_seconds if seconds is not None]
    if len(known_seconds) < len(times_seconds):
        return None
    return min(known_seconds)


def _check_size(n_bytes: Any) -> int:  # noqa: ANN401 - anything that a pickle holds
    """Return a size in bytes; raise ValueError if it is impossible."""
    if type(n_bytes) is not int or not 0 <= n_bytes <= LARGEST:
        raise ValueError("a size that no memory has")
    return n_bytes


def _find_place(frames: Any) -> CodePlace:  # noqa: ANN401 - anything that a pickle holds
    """Return the innermost line of code outside torch, or else the innermost line.

    Returns (None, None) without frames. Raises ValueError if a line number is not a number.
    """
    if not frames:
        return None, None
    own_frames = (frame for frame in frames if not TORCH_CODE.search(frame["filename"]))
    frame = next(own_frames, frames[0])
    # Paths from the file are printed, and control characters must not reach the terminal.
    path = "".join(letter if letter.isprintable() else "?" for letter in frame["filename"])
    return path[-200:], _check_size(frame["line"])
