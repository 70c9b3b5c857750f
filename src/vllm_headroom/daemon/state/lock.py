"""The lock of a folder that belongs to one daemon at a time."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from vllm_headroom.trace.recorder import make_folder


class FolderLock:
    """Locks a folder, once it is free, until the process exits.

    The folder itself is locked: that takes no space, and no file can be replaced. Where it cannot
    be opened or its file system has no locks, it counts as locked: keeping the state matters more.
    """

    def __init__(self) -> None:
        self.is_ours = False
        """Whether this process has locked the folder."""
        self._descriptor: int | None = None

    def take(self, folder: Path) -> bool:
        """Create the folder and return whether it is this process's.

        A folder that was deleted is locked again.
        """
        if self._descriptor is not None and not _is_same_folder(folder, self._descriptor):
            os.close(self._descriptor)
            self._descriptor = None
            self.is_ours = False
        if not self.is_ours:
            self._lock(folder)
        return self.is_ours

    def _lock(self, folder: Path) -> None:
        self.is_ours = True
        with suppress(OSError):
            make_folder(folder)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                self.is_ours = not isinstance(error, BlockingIOError)
            else:
                self._descriptor = descriptor  # stays open: closing it would unlock


def _is_same_folder(folder: Path, descriptor: int) -> bool:
    """Return whether the folder is still the one that was opened; yes where that is not known."""
    try:
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
    except OSError:
        return True
