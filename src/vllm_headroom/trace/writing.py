"""Writing where a volume may hang or be full: that costs what is to be written, and is told when it begins and ends."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import structlog

from vllm_headroom.worker import Worker

log = structlog.get_logger()

WRITE_SECONDS: Final = 1.0
"""A line takes microseconds; a volume that hangs delays one tick by this, and none after it."""

HANGS: Final = "the file system does not answer"


def make(folder: Path) -> None:
    """Make a folder that is the daemon's alone; raises OSError, also where a link is in its place."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "a link is in the place of the folder")
    folder.mkdir(parents=True, exist_ok=True)


def real(folder: Path) -> Path:
    """Return the folder that this path leads to now, itself where that cannot be told."""
    return Path(os.path.realpath(folder))


def put(file: Path, unfinished: Path, content: Iterable[bytes]) -> None:
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


class Writing:
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
        self._problem = problem = await attempted(self._worker, operation, self._seconds)
        if problem is not None and before is None:
            log.warning(self._begins, file=str(self._file), problem=problem)
        elif problem is None and before is not None:
            log.info(self._ends, file=str(self._file))
        return problem is None


async def attempted(worker: Worker[None], operation: Callable[[], None], seconds: float) -> str | None:
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
