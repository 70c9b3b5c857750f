"""A file of state, in a folder that is one daemon's at a time: always the old state or the new one, as a whole."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from vllm_headroom.daemon.state.content import FORMAT, SavedState
from vllm_headroom.derive.life.lives import Lives
from vllm_headroom.expose.history import KeptHistory
from vllm_headroom.trace.writing import make, put


class Lock:
    """A folder that this process has to itself from when it is free until the process ends; `is_ours` tells which.

    It is the folder itself that is locked: that takes no room, and nothing can be put in the place of a file. Where it
    cannot be opened or its file system knows no locks there is none: what is kept is worth more.
    """

    def __init__(self) -> None:
        self.is_ours = False
        self._descriptor: int | None = None

    def take(self, folder: Path) -> bool:
        """Return whether the folder, which is made, is this process's now.

        One that was deleted is locked to no end: the folder that has its name now may be another's.
        """
        if self._descriptor is not None and not _leads_to(folder, self._descriptor):
            os.close(self._descriptor)
            self.is_ours, self._descriptor = False, None
        if not self.is_ours:
            self.is_ours, self._descriptor = _locked(folder)
        return self.is_ours


def _leads_to(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _locked(folder: Path) -> tuple[bool, int | None]:
    """Return whether a folder may be written to, and what locks it."""
    try:
        make(folder)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # stays open: closed, it would be free
    except OSError:
        return True, None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False, None
    except OSError:
        os.close(descriptor)
        return True, None
    return True, descriptor


MOST_BYTES: Final = 64 * 2**20
"""A hundred times the state of eight GPUs: what is larger is not ours and would only fill memory."""

T = TypeVar("T")


class Unusable(Exception):  # noqa: N818 - it says what the file is
    """A file that holds no state for this daemon; its text says why."""


class File(Generic[T]):
    """The file `name` of a folder, which holds a value of `kind`, a struct.

    `number` is that of its format, to be raised when the fields of what is kept, or what they mean, change.
    """

    def __init__(self, name: str, kind: type[T], number: int) -> None:
        self.name = name
        self._kind = kind
        self._format = number

    def encode(self, saved: T) -> bytes:
        """Return the file's content; raises ValueError when a value is not finite."""
        document = {**msgspec.to_builtins(saved, str_keys=True), "format": self._format}
        return _canonical({**document, "checksum": _checksum(document)})

    def decode(self, content: bytes) -> T:
        """Return what `encode` was given; raises Unusable."""
        try:
            document = json.loads(content)
            written = document.pop("format"), document.pop("checksum")
            if written[0] != self._format:
                raise Unusable(f"it is of format {written[0]!r:.20}, this version reads {self._format}")
            if written[1] != _checksum({**document, "format": self._format}):
                raise Unusable("it is damaged: its checksum is another")
            return msgspec.convert(document, self._kind, str_keys=True)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Unusable("it is damaged: it is no complete state") from None

    def read(self, folder: Path) -> T | None:
        """Return the saved state, None where there is none; raises Unusable and OSError.

        A link, a pipe or a device in its place is not followed, opened or waited for: it is no state of ours.
        """
        try:
            with open(folder / self.name, "rb", opener=_unfollowed) as stream:
                status = os.fstat(stream.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise Unusable("it is no file but a pipe or a device")
                if status.st_size > MOST_BYTES:
                    raise Unusable("it is too large to be a state")
                content = stream.read(MOST_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise Unusable("it is no file but a link or a socket") from None
            raise
        return self.decode(content)

    def write(self, folder: Path, saved: T) -> None:
        """Replace the saved state at once, and durably; makes the folder; raises OSError and what `encode` raises."""
        content = self.encode(saved)
        make(folder)
        put(folder / self.name, folder / f"{self.name}.new", (content,))
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def set_aside(self, folder: Path) -> None:
        """Rename the saved state, adding `.bad` to its name, over an older one; raises OSError."""
        (folder / self.name).replace(folder / f"{self.name}.bad")


def _unfollowed(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _canonical(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _checksum(document: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(document)).hexdigest()


STATE: Final = File("state.json", SavedState, FORMAT)
LIVES: Final = File("lives.json", Lives, 2)
"""Apart from what the leak detector learned, which is of one life: this goes on when that is set aside."""

HISTORY: Final = File("history.json", KeptHistory, 3)
"""Apart from the rest: it is of whatever engine was there, and only shown."""
