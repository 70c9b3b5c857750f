"""Which of several daemons keeps its state in a folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from vllm_headroom.trace.writing import make


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
