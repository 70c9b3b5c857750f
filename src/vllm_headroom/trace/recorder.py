"""Write the trace file: one line a tick, at most two files."""

import errno
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, Final

from vllm_headroom.log import Log
from vllm_headroom.model import Snapshot
from vllm_headroom.trace.entries import HEADER, LONGEST_LINE_BYTES, build_record, encode_line
from vllm_headroom.worker import Worker

log = Log(__name__)

WRITE_SECONDS: Final = 1.0
"""A line takes microseconds; a volume that hangs delays one tick by this, and no later one."""


def make_folder(folder: Path) -> None:
    """Create a folder of the daemon; raises OSError, also where a link is in its place."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "a link is in the place of the folder")
    folder.mkdir(parents=True, exist_ok=True)


def replace_file(file: Path, unfinished: Path, content: Iterable[bytes]) -> None:
    """Replace a file atomically and durably; raises OSError."""
    unfinished.unlink(missing_ok=True)  # a killed process left it, or it is a link: never followed
    try:
        with unfinished.open("xb") as stream:
            stream.writelines(content)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


class FileWriter:
    """Runs file operations on a thread, each for at most `seconds`; `what` and `file` are their names in the log."""

    def __init__(self, what: str, file: Path, seconds: float = WRITE_SECONDS) -> None:
        self._begins, self._ends = f"{what} not written", f"{what} written again"
        self._file = file
        self._worker = Worker[None](what)
        self._seconds = seconds
        self._problem: str | None = None

    async def do(self, operation: Callable[[], None]) -> bool:
        """Return whether the operation worked, and log when that changes."""
        before = self._problem
        _, self._problem = await self._worker.attempt(operation, self._seconds)
        if self._problem is not None and before is None:
            log.warning(self._begins, file=str(self._file), problem=self._problem)
        elif self._problem is None and before is not None:
            log.info(self._ends, file=str(self._file))
        return self._problem is None


NOT_A_TRACE: Final = "the file is there and is no trace: move it away, or name another"


class Recorder:
    """Appends snapshots to `file`; at `max_bytes` it is renamed to `file`.1, and a new one begins."""

    def __init__(self, *, file: Path, max_bytes: int, seconds: float = WRITE_SECONDS) -> None:
        self._file, self._max_bytes = file, max_bytes
        self._writing = FileWriter("trace", file, seconds)

    async def record(self, snapshot: Snapshot) -> None:
        """Write one line."""
        await self._writing.do(
            lambda: append(self._file, encode_line(build_record(snapshot)), self._max_bytes)
        )


def append(file: Path, written: bytes, max_bytes: int) -> None:
    """Append a line, after a header where the file is new; raises OSError, and ValueError where it is not a trace.

    It opens the file for each line: the file may be moved or deleted at any time.
    """
    with file.open("a+b") as stream:
        size = _mend(stream)
        if not size or size + len(written) <= max_bytes:
            stream.write(written if size else encode_line(HEADER) + written)
            return
    file.replace(file.with_name(f"{file.name}.1"))
    append(file, written, max_bytes)


def _mend(stream: BinaryIO) -> int:
    """Return the size of the trace, 0 for a new one, after cutting an incomplete last line."""
    size = stream.seek(0, os.SEEK_END)
    if not size:
        return 0
    stream.seek(0)
    head = stream.readline(LONGEST_LINE_BYTES)
    if not is_trace_start(head):
        raise ValueError(NOT_A_TRACE)
    if not head.endswith(b"\n"):
        return stream.truncate(0)
    stream.seek(size - 1)
    if stream.read() == b"\n":
        return size
    begin = stream.seek(max(0, size - LONGEST_LINE_BYTES))
    return stream.truncate(begin + stream.read().rfind(b"\n") + 1)


def is_trace_start(head: bytes) -> bool:
    """Return whether a trace with this first line may be continued: not an incident; a part of the header may."""
    try:
        return encode_line(HEADER).startswith(head) or bool(json.loads(head) == HEADER)
    except (ValueError, RecursionError):
        return False
