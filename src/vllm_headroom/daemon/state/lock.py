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

    def take(self, folder: Path) -> bool:
        """Return whether the folder, which is made, is this process's now."""
        self.is_ours = self.is_ours or _locked(folder)
        return self.is_ours


def _locked(folder: Path) -> bool:
    try:
        make(folder)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # stays open: closed, it would be free
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    except OSError:
        os.close(descriptor)
    return True
