"""Follow a log file across rotation, truncation and replacement."""

import contextlib
import errno
import glob
import os
import stat
from pathlib import Path
from typing import Final, NamedTuple

from vllm_headroom.model import Failure
from vllm_headroom.scrape.log.batch import LogBatch
from vllm_headroom.scrape.shortage import build_unavailable
from vllm_headroom.vocabulary import Reason, Source
from vllm_headroom.worker import Worker

MOST_BYTES: Final = 2 * 2**20
"""The maximum number of bytes read at a time. Reading them takes 0.07 s of CPU time. No engine
writes this much in one tick.
"""

MOST_BACKLOG_BYTES: Final = 16 * 2**20
"""If more bytes than this are unread, the middle is skipped. The first MOST_BYTES show how the
engine started. The last MOST_BYTES show its current state.
"""

MOST_FILES: Final = 4096
"""The maximum number of files that a pattern may match. A node has one file per container,
which can be a hundred or more.
"""

FINGERPRINT_BYTES: Final = 64
"""This many of the last bytes read are kept and compared with the file. If they differ, the file
was truncated and has grown again.
"""

PACKED_SUFFIXES: Final = (".gz", ".xz", ".zst", ".bz2")
"""The suffixes of compressed rotated files, which are not followed."""


class TooManyFilesError(Exception):
    """The pattern matches more files than MOST_FILES."""


FileId = tuple[int, int]
"""The device and the inode of a file."""

MOST_PLACES: Final = 16
"""The number of files whose last read position is kept. A pattern may match several growing files.
"""


class ReadPosition(NamedTuple):
    """How far a file has been read."""

    offset: int = 0
    fingerprint: bytes = b""
    """The bytes before `offset`."""

    old_end: int = 0
    """The file's size when the daemon began to follow it. Bytes before this position are old."""


class LogFiles:
    """Reads additions to the newest file that matches a path or pattern.

    The files are read on a daemon thread. The operator sets the pattern. The content may be
    arbitrary, so it is returned as bytes.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._descriptor: int | None = None
        """The descriptor of the followed file, or None until a file is opened."""
        self._places: dict[FileId, ReadPosition] = {}
        """How far each file has been read; the most recently read file comes last."""
        self._worker = Worker[LogBatch | Failure]("log files")

    async def fetch(self, timeout_seconds: float) -> LogBatch | Failure:
        """Return up to MOST_BYTES of additions, which may be empty, or a Failure; never raise."""
        try:
            return await self._worker.call(self._read, timeout_seconds)
        except TimeoutError:
            reason = Reason.TIMEOUT
            problem = f"did not answer within {timeout_seconds:g} s: a volume hangs"
        except TooManyFilesError:
            reason = Reason.OUT_OF_BOUNDS
            problem = f"matches more than {MOST_FILES} files: name those of one engine"
        except FileNotFoundError:
            reason = Reason.NOT_FOUND
            problem = "names no file: let the engine's log be written there, and mount it"
        except PermissionError:
            reason = Reason.NO_PERMISSION
            problem = "cannot be read: let the daemon's user read it"
        except OSError as error:
            trouble = f"the engine's log {self._pattern} cannot be read"
            return build_unavailable(Source.LOG, trouble, error, "name a file that can be read")
        message = f"the engine's log {self._pattern} {problem} (HEADROOM_ENGINE_LOG)"
        return Failure(source=Source.LOG, reason=reason, message=message)

    def _read(self) -> LogBatch:
        """Continue reading; runs on the thread.

        Raises OSError if a file cannot be read. Raises TooManyFilesError if the pattern matches too
        many files.
        """
        if self._descriptor is None:
            self._descriptor = _open_regular(self._find_newest())
        # The rest of a rotated file is read first.
        batch = self._read_open(self._descriptor)
        if batch.content:
            return batch
        status = os.fstat(self._descriptor)
        try:
            path = self._find_newest()
            newest_status = path.stat()
        except FileNotFoundError:
            # Between the two steps of a rotation, the file exists only under another name.
            if status.st_nlink:
                return batch
            raise
        if _identify(newest_status) == _identify(status):
            return batch
        descriptor = _open_regular(path)
        os.close(self._descriptor)
        self._descriptor = descriptor
        return self._read_open(descriptor)

    def _find_newest(self) -> Path:
        """Return the newest file that matches the pattern; raise FileNotFoundError if none does."""
        if not glob.has_magic(self._pattern):
            return Path(self._pattern)
        newest_path = None
        newest_nanoseconds = -1
        for count, name in enumerate(
            glob.iglob(self._pattern),  # noqa: PTH207 - the pattern may be absolute
            start=1,
        ):
            if count > MOST_FILES:
                raise TooManyFilesError
            if name.endswith(PACKED_SUFFIXES):
                continue
            with contextlib.suppress(OSError):  # The file may have been removed in the meantime.
                status = os.stat(name)  # noqa: PTH116 - glob's names are texts
                if stat.S_ISREG(status.st_mode) and status.st_mtime_ns > newest_nanoseconds:
                    newest_nanoseconds = status.st_mtime_ns
                    newest_path = Path(name)
        if newest_path is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", self._pattern)
        return newest_path

    def _read_open(self, descriptor: int) -> LogBatch:
        """Return the next bytes of the open file; start over if it was truncated."""
        status = os.fstat(descriptor)
        file = _identify(status)
        # The entry is removed and added again. The most recently read file therefore comes last.
        place = self._places.pop(file, None)
        if place is None:
            # Only the first file can contain lines from before the daemon followed the log.
            place = ReadPosition(old_end=0 if self._places else status.st_size)
        elif _is_truncated(descriptor, place, status.st_size):
            place = ReadPosition()
        offset = place.offset
        is_broken = offset == 0
        # Reading is too far behind. Old lines are skipped, so reading resumes in the middle of a
        # line.
        if status.st_size - offset > MOST_BACKLOG_BYTES and offset > 0:
            offset = status.st_size - MOST_BYTES
            place = place._replace(fingerprint=b"")
            is_broken = True
        content = os.pread(descriptor, MOST_BYTES, offset)
        self._places[file] = ReadPosition(
            offset=offset + len(content),
            fingerprint=(place.fingerprint + content)[-FINGERPRINT_BYTES:],
            old_end=place.old_end,
        )
        # The least recently read file is forgotten.
        while len(self._places) > MOST_PLACES:
            del self._places[next(iter(self._places))]
        return LogBatch(content=content, is_old=offset < place.old_end, is_broken=is_broken)


def _identify(status: os.stat_result) -> FileId:
    return (status.st_dev, status.st_ino)


def _open_regular(path: Path) -> int:
    """Open a file and return its descriptor.

    Raises OSError if it is not a regular file.
    """
    # A pipe without a writer must not block the thread.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file")


def _is_truncated(descriptor: int, place: ReadPosition, size_bytes: int) -> bool:
    """Return whether a file no longer contains what has been read from it."""
    if size_bytes < place.offset:
        return True
    begin = place.offset - len(place.fingerprint)
    return os.pread(descriptor, len(place.fingerprint), begin) != place.fingerprint
