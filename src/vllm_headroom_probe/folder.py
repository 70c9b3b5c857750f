"""Write to the folder that vLLM's processes and the sidecar share.

Each process has one file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

MAX_DOCUMENT_BYTES = 16 * 1024
"""The maximum size of a process's file; the sidecar does not read larger ones."""

MAX_KEPT_FILES = 64
"""The number of files kept; the oldest are removed first. A file remains when its process exits.
Without a limit, a crash loop would fill up the volume. A server has a few dozen files.
"""

FILE_NAME = re.compile(r"[0-9]+-[0-9]+(\.record)?\.json|\.[0-9]+-[0-9]+(\.record)?\.json\.tmp")
"""The names of the probe's files. No other file is ever removed, because HEADROOM_PROBE_DIR may
name a folder with models."""

MAX_ENTRIES = 4096
"""The maximum number of folder entries that are read. Even hundreds of runs leave fewer entries."""

START_TICKS_FIELD = 19
"""The index of the start time in /proc/self/stat (see proc(5)). It counts the fields after the
process's name.
"""


def read_start() -> tuple[float, float]:
    """Return when this process started, since boot and since the epoch.

    Both times are in seconds. The second value changes when the clock is set. Raises OSError or
    ValueError if /proc cannot be read.
    """
    with open("/proc/self/stat", "rb") as file:  # noqa: PTH123 - pathlib is a millisecond of imports
        _, _, fields = file.read().rpartition(b")")
    started_seconds = int(fields.split()[START_TICKS_FIELD]) / os.sysconf("SC_CLK_TCK")
    return started_seconds, _read_boot_time() + started_seconds


def _read_boot_time() -> int:
    """Return when the machine booted, in seconds since the epoch.

    Raises OSError or ValueError if /proc cannot be read.
    """
    with open("/proc/stat", "rb") as file:  # noqa: PTH123
        for line in file:
            if line.startswith(b"btime "):
                return int(line.split()[1])
    raise ValueError("/proc/stat has no line btime")


def write_document(
    folder: str, name: str, document: Mapping[str, Any], max_bytes: int = MAX_DOCUMENT_BYTES
) -> None:
    """Write the document as a file, atomically.

    Raises OSError if writing fails. Raises ValueError if the document is too large or has a
    non-finite number.
    """
    content = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    if len(content) > max_bytes:
        raise ValueError(f"{len(content)} bytes for a file of at most {max_bytes}")
    unfinished = os.path.join(folder, f".{name}.tmp")  # noqa: PTH118
    try:
        # Any old file is removed first. A pipe in its place would block, and a link would be
        # followed.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)  # noqa: PTH108
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(unfinished, flags, 0o644), "wb") as file:  # noqa: PTH123
            # The mode allows the sidecar's user to read the file, regardless of vLLM's umask.
            os.fchmod(file.fileno(), 0o644)
            file.write(content)
        os.replace(unfinished, os.path.join(folder, name))  # noqa: PTH105, PTH118
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)  # noqa: PTH108
        raise


def prune(folder: str, max_files: int = MAX_KEPT_FILES) -> None:
    """Remove the probe's oldest files until `max_files` are left.

    Other processes may remove files at the same time. Raises OSError if the folder cannot be read.
    """
    files = []
    with os.scandir(folder) as entries:
        for entry in islice(entries, MAX_ENTRIES):
            with contextlib.suppress(OSError):
                if FILE_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    files.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
    files.sort(reverse=True)
    for _, path in files[max_files:]:
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108
