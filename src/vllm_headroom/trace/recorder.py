"""The trace file: one line a tick, two files at the most."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import BinaryIO, Final

from vllm_headroom.model import Snapshot
from vllm_headroom.trace.parse import LONGEST_LINE
from vllm_headroom.trace.write import HEADER, line, record_of
from vllm_headroom.trace.writing import WRITE_SECONDS, Writing

FOREIGN: Final = "the file is there and is no trace: move it away, or name another"


class Recorder:
    """Appends snapshots to `file`; at `max_bytes` it becomes `file`.1, over an older one, and a new one begins."""

    def __init__(self, *, file: Path, max_bytes: int, seconds: float = WRITE_SECONDS) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._writing = Writing("trace", file, seconds)

    async def record(self, snapshot: Snapshot) -> None:
        """Write one line."""
        await self._writing.do(lambda: append(self._file, line(record_of(snapshot)), self._max_bytes))


def append(file: Path, written: bytes, max_bytes: int) -> None:
    """Append a line, after a header where the file is new; raises OSError, and ValueError where it is not a trace.

    The file is opened for each line: it may be moved or deleted at any time, and nothing is lost when the daemon ends.
    """
    with file.open("a+b") as stream:
        size = _mended(stream)
        if not size or size + len(written) <= max_bytes:
            stream.write(written if size else line(HEADER) + written)
            return
    file.replace(file.with_name(f"{file.name}.1"))
    append(file, written, max_bytes)


def _mended(stream: BinaryIO) -> int:
    """Return the size of the trace, 0 where it is new, without what a crash or a full disk left of its last line."""
    size = stream.seek(0, os.SEEK_END)
    if not size:
        return 0
    stream.seek(0)
    head = stream.readline(LONGEST_LINE)
    if not begins_one(head):
        raise ValueError(FOREIGN)
    if not head.endswith(b"\n"):
        return stream.truncate(0)
    stream.seek(size - 1)
    if stream.read() == b"\n":
        return size
    begin = stream.seek(max(0, size - LONGEST_LINE))
    return stream.truncate(begin + stream.read().rfind(b"\n") + 1)


def begins_one(head: bytes) -> bool:
    """Tell whether a file that begins so is a trace to go on with: an incident is none, it is whole.

    A part of the header is what a crash left of it.
    """
    try:
        return line(HEADER).startswith(head) or bool(json.loads(head) == HEADER)
    except (ValueError, RecursionError):
        return False
