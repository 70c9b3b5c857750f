"""The folder that the engine's processes and the sidecar share: one file for each process, replaced as a whole."""

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
"""Files outlive their processes; a server has at most a few dozen, and a crash loop must not fill the memory."""

OWN = re.compile(r"[0-9]+-[0-9]+(\.record)?\.json|\.[0-9]+-[0-9]+(\.record)?\.json\.tmp")
"""What a probe names its files. The variable may name a folder of models: nothing else there is anybody's to remove."""
MOST_ENTRIES = 4096
"""A look at a folder that somebody has filled must end; hundreds of lives are not as many."""


def read_start() -> tuple[float, float]:
    """Return when this process began, to a hundredth, as others read it in /proc too: since the boot and the epoch.

    The second moves when the clock is set, and is by the clock of now.
    """
    with open("/proc/self/stat", "rb") as file:  # noqa: PTH123 - pathlib is a millisecond of imports
        since_boot = int(file.read().rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    with open("/proc/stat", "rb") as file:  # noqa: PTH123
        booted = next(int(line.split()[1]) for line in file if line.startswith(b"btime "))
    return since_boot, booted + since_boot


def replace(folder: str, name: str, document: Mapping[str, Any], largest_bytes: int = LARGEST_BYTES) -> None:
    """Write the document where a reader sees the last one or this, never a part; raise OSError, or ValueError."""
    content = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    if len(content) > largest_bytes:
        raise ValueError(f"{len(content)} bytes for a file of at most {largest_bytes}")
    unfinished = os.path.join(folder, f".{name}.tmp")  # noqa: PTH118
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)  # noqa: PTH108 - a pipe there would be waited for, a link written through
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(unfinished, flags, 0o644), "wb") as file:  # noqa: PTH123
            os.fchmod(file.fileno(), 0o644)  # the sidecar is another user, and vLLM's umask may hide the file from it
            file.write(content)
        os.replace(unfinished, os.path.join(folder, name))  # noqa: PTH105, PTH118
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)  # noqa: PTH108
        raise


def prune(folder: str, kept: int = KEPT_FILES) -> None:
    """Remove the probe's oldest files beyond those that are kept; others may do the same at the same time."""
    aged = []
    with os.scandir(folder) as entries:
        for entry in islice(entries, MOST_ENTRIES):
            with contextlib.suppress(OSError):
                if OWN.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    aged.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
    for _, path in sorted(aged, reverse=True)[kept:]:
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108
