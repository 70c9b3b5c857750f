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
    """Runs file operations on a thread, each for at most `seconds`.

    `name` and `file` are what the log calls the file.
    """

    def __init__(self, name: str, file: Path, seconds: float = WRITE_SECONDS) -> None:
        self._failure_text = f"{name} not written"
        self._recovery_text = f"{name} written again"
        self._file = file
        self._worker = Worker[None](name)
        self._seconds = seconds
        self._problem: str | None = None

    async def do(self, operation: Callable[[], None]) -> bool:
        """Return whether the operation worked, and log when that changes."""
        previous_problem = self._problem
        _, self._problem = await self._worker.attempt(operation, self._seconds)
        if self._problem is not None and previous_problem is None:
            log.warning(self._failure_text, file=str(self._file), problem=self._problem)
        elif self._problem is None and previous_problem is not None:
            log.info(self._recovery_text, file=str(self._file))
        return self._problem is None


NOT_A_TRACE: Final = "the file is there and is no trace: move it away, or name another"
"""What people read where a file cannot be continued."""


class Recorder:
    """Appends snapshots to `file`, which at `max_bytes` becomes `file`.1, and a new one begins."""

    def __init__(self, *, file: Path, max_bytes: int, seconds: float = WRITE_SECONDS) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._writer = FileWriter("trace", file, seconds)

    async def record(self, snapshot: Snapshot) -> None:
        """Write one line."""
        await self._writer.do(
            lambda: append(self._file, encode_line(build_record(snapshot)), self._max_bytes)
        )


def append(file: Path, line: bytes, max_bytes: int) -> None:
    """Append a line, after a header where the file is new.

    It opens the file for each line: the file may be moved or deleted at any time. Raises OSError,
    and ValueError where the file is not a trace.
    """
    with file.open("a+b") as stream:
        size_bytes = _cut_incomplete_line(stream)
        if size_bytes == 0:
            stream.write(encode_line(HEADER) + line)
            return
        if size_bytes + len(line) <= max_bytes:
            stream.write(line)
            return
    file.replace(file.with_name(f"{file.name}.1"))
    append(file, line, max_bytes)


def _cut_incomplete_line(stream: BinaryIO) -> int:
    """Cut off the last line if it has no end, and return the size of the trace, 0 for a new one.

    Raises ValueError where it is not a trace.
    """
    size_bytes = stream.seek(0, os.SEEK_END)
    if size_bytes == 0:
        return 0
    stream.seek(0)
    first_line = stream.readline(LONGEST_LINE_BYTES)
    if not is_trace_start(first_line):
        raise ValueError(NOT_A_TRACE)
    if not first_line.endswith(b"\n"):
        return stream.truncate(0)
    stream.seek(size_bytes - 1)
    if stream.read() == b"\n":
        return size_bytes
    # a crash of the machine has cut the last line: no line is longer than what is read here
    tail_start = stream.seek(max(0, size_bytes - LONGEST_LINE_BYTES))
    end = tail_start + stream.read().rfind(b"\n") + 1
    return stream.truncate(end)


def is_trace_start(first_line: bytes) -> bool:
    """Return whether a trace with this first line may be continued.

    An incident may not. A part of the header may: its writing was interrupted.
    """
    if encode_line(HEADER).startswith(first_line):
        return True
    try:
        return bool(json.loads(first_line) == HEADER)
    except (ValueError, RecursionError):
        return False
