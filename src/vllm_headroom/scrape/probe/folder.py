"""The files of a folder that another container may write anything into."""

from __future__ import annotations

import os
import re
import stat
from heapq import nlargest
from pathlib import Path
from typing import Final

NAME: Final = re.compile(r"[0-9]{1,10}-[0-9]{1,12}\.json", re.ASCII)
"""A process by pid and start; what the probe writes beside these is not the daemon's to read."""

MOST_ENTRIES: Final = 4096
"""What a folder may hold at all. An engine leaves a file per process and life; hundreds of lives are not as many."""

MOST_FILES: Final = 128
"""The newest that are read: four times the processes of an engine on eight GPUs."""

MOST_BYTES: Final = 16 * 1024

Stamp = tuple[int, int, int]
"""When a file was changed, its inode and its size: each writing replaces it by a new one."""


class TooManyError(Exception):
    """There are more entries than any probe makes."""


def newest(folder: Path) -> dict[str, Stamp]:
    """Return the newest files that a probe can have written; raises OSError and TooManyError.

    Links are not followed, and what is no file is not looked at.
    """
    found: list[tuple[Stamp, str]] = []
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries, start=1):
            if count > MOST_ENTRIES:
                raise TooManyError
            if NAME.fullmatch(entry.name) and (stamp := _stamp(entry)) is not None:
                found.append((stamp, entry.name))
    return {name: stamp for stamp, name in nlargest(MOST_FILES, found)}


def _stamp(entry: os.DirEntry[str]) -> Stamp | None:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_ino, status.st_size) if stat.S_ISREG(status.st_mode) else None


def content(folder: Path, name: str, most_bytes: int = MOST_BYTES) -> bytes | None:
    """Return a file's content; None where it has gone, is no file, cannot be read or is too large.

    It may have become a link or a pipe since it was listed: neither is followed or waited for.
    """
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        read = os.read(descriptor, most_bytes + 1)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return read if len(read) <= most_bytes else None
