"""Write the folder that the engine's processes and the sidecar share: one file per process, replaced atomically."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

LARGEST_BYTES = 16 * 1024
KEPT_FILES = 64
"""Files outlast their processes; a server has a few dozen, and a crash loop must not fill the volume."""

OWN = re.compile(r"[0-9]+-[0-9]+(\.record)?\.json|\.[0-9]+-[0-9]+(\.record)?\.json\.tmp")
"""The names of the probe's files; no other file is removed: the variable may name a folder of models."""
MOST_ENTRIES = 4096
"""Entries that are read of a folder that was filled; hundreds of runs have fewer."""


def read_start() -> tuple[float, float]:
    """Return when this process started by /proc: since the boot, and since the epoch by the current clock."""
    with open("/proc/self/stat", "rb") as file:  # noqa: PTH123 - pathlib is a millisecond of imports
        since_boot = int(file.read().rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    with open("/proc/stat", "rb") as file:  # noqa: PTH123
        booted = next(int(line.split()[1]) for line in file if line.startswith(b"btime "))
    return since_boot, booted + since_boot


def replace(
    folder: str, name: str, document: Mapping[str, Any], largest_bytes: int = LARGEST_BYTES
) -> None:
    """Write the document atomically; raise OSError, or ValueError where it is too large."""
    content = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    if len(content) > largest_bytes:
        raise ValueError(f"{len(content)} bytes for a file of at most {largest_bytes}")
    unfinished = os.path.join(folder, f".{name}.tmp")  # noqa: PTH118
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)  # noqa: PTH108 - a pipe would block, a link would be followed
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(unfinished, flags, 0o644), "wb") as file:  # noqa: PTH123
            os.fchmod(file.fileno(), 0o644)  # for the sidecar's user, whatever vLLM's umask is
            file.write(content)
        os.replace(unfinished, os.path.join(folder, name))  # noqa: PTH105, PTH118
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)  # noqa: PTH108
        raise


def prune(folder: str, kept: int = KEPT_FILES) -> None:
    """Remove the probe's oldest files beyond `kept`; other processes may do so at the same time."""
    aged = []
    with os.scandir(folder) as entries:
        for entry in islice(entries, MOST_ENTRIES):
            with contextlib.suppress(OSError):
                if OWN.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    aged.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
    for _, path in sorted(aged, reverse=True)[kept:]:
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108
