"""The trace file: one line a tick, two files at the most."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

import structlog

from vllm_headroom.model import Snapshot
from vllm_headroom.trace.write import HEADER, line, record_of

log = structlog.get_logger()

LONGEST_LINE: Final = 2**20
FOREIGN: Final = "the file is there and is no trace: move it away, or name another"
HANGS: Final = "the file system does not answer"


class Recorder:
    """Appends snapshots to `file`; at `max_bytes` it becomes `file`.1, over an older one, and a new one begins.

    `call` runs a function where it may hang, for so many seconds at most, and raises TimeoutError beyond them.
    """

    def __init__(
        self,
        *,
        file: Path,
        max_bytes: int,
        call: Callable[[Callable[[], None], float], Awaitable[None]],
        timeout_seconds: float,
    ) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._call = call
        self._timeout_seconds = timeout_seconds
        self._problem: str | None = None

    async def record(self, snapshot: Snapshot) -> None:
        """Write one line; what goes wrong is logged when it begins and when it ends, and costs the line only."""
        try:
            written = line(record_of(snapshot))
            await self._call(partial(append, self._file, written, self._max_bytes), self._timeout_seconds)
        except TimeoutError:
            self._report(HANGS)
        except OSError as error:
            self._report(error.strerror or str(error))
        except ValueError as error:
            self._report(str(error))
        else:
            self._report(None)

    def _report(self, problem: str | None) -> None:
        before, self._problem = self._problem, problem
        if problem is not None and before is None:
            log.error("trace not written", file=str(self._file), problem=problem)
        elif problem is None and before is not None:
            log.info("trace written again", file=str(self._file))


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
    if line(HEADER).startswith(head) and not head.endswith(b"\n"):
        return stream.truncate(0)
    if not _is_header(head):
        raise ValueError(FOREIGN)
    stream.seek(size - 1)
    if stream.read() == b"\n":
        return size
    begin = stream.seek(max(0, size - LONGEST_LINE))
    return stream.truncate(begin + stream.read().rfind(b"\n") + 1)


def _is_header(head: bytes) -> bool:
    try:
        return bool(json.loads(head) == HEADER)
    except ValueError:
        return False
