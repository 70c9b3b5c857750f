"""The lock that reserves a folder for one daemon at a time."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from vllm_headroom.trace.recorder import make_folder


class FolderLock:
    """Locks a folder for this process, as soon as no other process holds the lock.

    The folder itself is locked. A lock file could be replaced and would need space. If the folder
    cannot be opened, this process counts as its owner. This process also counts as the owner if the
    file system does not support locks. Saving the state is more important than the lock.
    """

    def __init__(self) -> None:
        self.is_ours = False
        """Whether this process has locked the folder or counts as its owner."""
        self._descriptor: int | None = None
        """The open descriptor of the locked folder, or None if no lock is held."""

    def take(self, folder: Path) -> bool:
        """Lock the folder, creating it if needed; return whether this process owns it.

        Returns False only while another process holds the lock. Repeated calls are cheap. If the
        folder was deleted and recreated in the meantime, the new folder is locked.
        """
        if self._descriptor is not None and not _is_same_folder(folder, self._descriptor):
            os.close(self._descriptor)
            self._descriptor = None
            self.is_ours = False
        if not self.is_ours:
            self._lock(folder)
        return self.is_ours

    def release(self) -> None:
        """Unlock the folder for another owner."""
        self.is_ours = False
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self, folder: Path) -> None:
        """Try to lock the folder, and set `is_ours`; keep the descriptor of a locked folder."""
        self.is_ours = True
        with suppress(OSError):
            make_folder(folder)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                # BlockingIOError means that another process holds the lock. Any other error means
                # that the file system does not support locks.
                self.is_ours = not isinstance(error, BlockingIOError)
            else:
                # The descriptor stays open, because closing it would unlock the folder.
                self._descriptor = descriptor


def _is_same_folder(folder: Path, descriptor: int) -> bool:
    """Return whether the path still leads to the folder that was opened.

    Returns False if the path does not exist, and True if it cannot be examined.
    """
    try:
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
    except OSError:
        return True
