"""Write the trace: one line per tick, in at most two files."""

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
"""The time limit for a write. Writing a line takes microseconds. If the volume hangs, one tick is
delayed by this time. Later ticks are not delayed.
"""


def make_folder(folder: Path) -> None:
    """Create a folder if it is missing.

    Raises OSError if that fails or if the path is a link.
    """
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "a link is in the place of the folder")
    folder.mkdir(parents=True, exist_ok=True)


def replace_file(file: Path, unfinished: Path, content: Iterable[bytes]) -> None:
    """Replace a file atomically; raise OSError if that fails.

    The content is written to `unfinished`, which is flushed to disk and then renamed. After a
    machine crash, either the complete old content or the complete new content remains.
    """
    # A killed process may have left this file behind. The file may also be a link, which must not
    # be followed.
    unfinished.unlink(missing_ok=True)
    try:
        with unfinished.open("xb") as stream:
            stream.writelines(content)
            # The file is flushed before it is renamed. Without the flush, a machine crash could
            # leave an empty file.
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


class FileWriter:
    """Runs file operations on a thread, each for at most `seconds`.

    `name` and `file` identify the file in the log.
    """

    def __init__(self, name: str, file: Path, seconds: float = WRITE_SECONDS) -> None:
        self._failure_text = f"{name} not written"
        self._recovery_text = f"{name} written again"
        self._file = file
        self._worker = Worker[None](name)
        self._seconds = seconds
        self._problem: str | None = None
        """Why the last operation failed, or None if it succeeded."""

    async def do(self, operation: Callable[[], None]) -> bool:
        """Run the operation; return whether it succeeded, and log when failures begin or end.

        OSError, ValueError and a timeout count as failures. Any other error is raised.
        """
        previous_problem = self._problem
        # The operation runs on a thread, because a write to a hung volume never returns.
        _, self._problem = await self._worker.attempt(operation, self._seconds)
        if self._problem is not None and previous_problem is None:
            log.warning(self._failure_text, file=str(self._file), problem=self._problem)
        elif self._problem is None and previous_problem is not None:
            log.info(self._recovery_text, file=str(self._file))
        return self._problem is None


NOT_A_TRACE: Final = "the file is there and is no trace: move it away, or name another"
"""The message for an existing file that cannot be continued as a trace."""


class Recorder:
    """Appends snapshots to `file`. A file that reaches `max_bytes` gets the suffix `.1`."""

    def __init__(self, *, file: Path, max_bytes: int, seconds: float = WRITE_SECONDS) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._writer = FileWriter("trace", file, seconds)

    async def record(self, snapshot: Snapshot) -> None:
        """Append one line for the snapshot; never raise, but log any failure."""
        await self._writer.do(
            lambda: append(self._file, encode_line(build_record(snapshot)), self._max_bytes)
        )


def append(file: Path, line: bytes, max_bytes: int) -> None:
    """Append a line to a trace; if the file is new, write the header first.

    If the file would exceed `max_bytes`, it is first renamed with the suffix `.1`. The file is
    opened for each line. The file may be moved or deleted at any time. Raises OSError if writing
    fails, and ValueError if the file is not a trace.
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
    """Cut off an incomplete last line, and return the trace's size.

    The size is 0 for a new trace. A crash may have interrupted a write. Raises ValueError if the
    file is not a trace.
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
    # The last line is incomplete. The part read below is at least as long as the longest line.
    tail_start = stream.seek(max(0, size_bytes - LONGEST_LINE_BYTES))
    end = tail_start + stream.read().rfind(b"\n") + 1
    return stream.truncate(end)


def is_trace_start(first_line: bytes) -> bool:
    """Return whether a file with this first line is a trace that may be continued.

    Also returns True for an incomplete header, because its write may have been interrupted. Returns
    False for an incident, whose header has additional fields.
    """
    if encode_line(HEADER).startswith(first_line):
        return True
    try:
        return bool(json.loads(first_line) == HEADER)
    except (ValueError, RecursionError):
        return False
