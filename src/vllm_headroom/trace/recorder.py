"""The trace file: one line a tick, two files at the most."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, Final

from vllm_headroom.log import Log
from vllm_headroom.model import Snapshot
from vllm_headroom.trace.entries import HEADER, build_record, encode_line
from vllm_headroom.trace.parse import LONGEST_LINE
from vllm_headroom.worker import Worker

log = Log(__name__)

WRITE_SECONDS: Final = 1.0
"""A line takes microseconds; a volume that hangs delays one tick by this, and none after it."""

HANGS: Final = "the file system does not answer"


def make_folder(folder: Path) -> None:
    """Make a folder that is the daemon's alone; raises OSError, also where a link is in its place."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "a link is in the place of the folder")
    folder.mkdir(parents=True, exist_ok=True)


def resolve_folder(folder: Path) -> Path:
    """Return the folder that this path leads to now, itself where that cannot be told."""
    return Path(os.path.realpath(folder))


def replace_file(file: Path, unfinished: Path, content: Iterable[bytes]) -> None:
    """Put a file in the place of an older one: it is there as a whole, and durably, or not at all; raises OSError."""
    unfinished.unlink(missing_ok=True)  # left by a process that was killed, or a link: made anew, never followed
    try:
        with unfinished.open("xb") as stream:
            stream.writelines(content)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


class FileWriter:
    """Makes file operations on a thread, `seconds` long at most; in the log `what` is written, to `file`."""

    def __init__(self, what: str, file: Path, seconds: float = WRITE_SECONDS) -> None:
        self._begins = f"{what} not written"
        self._ends = f"{what} written again"
        self._file = file
        self._worker = Worker[None](what)
        self._seconds = seconds
        self._problem: str | None = None

    async def do(self, operation: Callable[[], None]) -> bool:
        """Return whether the operation worked, and tell when that changes."""
        before = self._problem
        self._problem = problem = await try_write(self._worker, operation, self._seconds)
        if problem is not None and before is None:
            log.warning(self._begins, file=str(self._file), problem=problem)
        elif problem is None and before is not None:
            log.info(self._ends, file=str(self._file))
        return problem is None


async def try_write(worker: Worker[None], operation: Callable[[], None], seconds: float) -> str | None:
    """Return what went wrong with an operation that may raise OSError, or ValueError with a text for the operator."""
    try:
        await worker.call(operation, seconds)
    except TimeoutError:
        return HANGS
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return str(error)
    return None


FOREIGN: Final = "the file is there and is no trace: move it away, or name another"


class Recorder:
    """Appends snapshots to `file`; at `max_bytes` it becomes `file`.1, over an older one, and a new one begins."""

    def __init__(self, *, file: Path, max_bytes: int, seconds: float = WRITE_SECONDS) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._writing = FileWriter("trace", file, seconds)

    async def record(self, snapshot: Snapshot) -> None:
        """Write one line."""
        await self._writing.do(lambda: append(self._file, encode_line(build_record(snapshot)), self._max_bytes))


def append(file: Path, written: bytes, max_bytes: int) -> None:
    """Append a line, after a header where the file is new; raises OSError, and ValueError where it is not a trace.

    The file is opened for each line: it may be moved or deleted at any time, and nothing is lost when the daemon ends.
    """
    with file.open("a+b") as stream:
        size = _mend(stream)
        if not size or size + len(written) <= max_bytes:
            stream.write(written if size else encode_line(HEADER) + written)
            return
    file.replace(file.with_name(f"{file.name}.1"))
    append(file, written, max_bytes)


def _mend(stream: BinaryIO) -> int:
    """Return the size of the trace, 0 where it is new, without what a crash or a full disk left of its last line."""
    size = stream.seek(0, os.SEEK_END)
    if not size:
        return 0
    stream.seek(0)
    head = stream.readline(LONGEST_LINE)
    if not is_trace_start(head):
        raise ValueError(FOREIGN)
    if not head.endswith(b"\n"):
        return stream.truncate(0)
    stream.seek(size - 1)
    if stream.read() == b"\n":
        return size
    begin = stream.seek(max(0, size - LONGEST_LINE))
    return stream.truncate(begin + stream.read().rfind(b"\n") + 1)


def is_trace_start(head: bytes) -> bool:
    """Tell whether a file that begins so is a trace to go on with: an incident is none, it is whole.

    A part of the header is what a crash left of it.
    """
    try:
        return encode_line(HEADER).startswith(head) or bool(json.loads(head) == HEADER)
    except (ValueError, RecursionError):
        return False
