"""A process's memory by the kinds of its mappings: what grows outside of Python's objects has a name here."""

import re
import time
from pathlib import Path
from typing import Final

_MAPPING: Final = re.compile(rb"[0-9a-f]+-[0-9a-f]+ \S{4} \S+ \S+ \d+ *(.*)\n")
_KINDS: Final = {
    "/memfd:": "memfd",
    **dict.fromkeys(("/dev/shm/", "/SYSV", "/dev/zero"), "shm"),  # noqa: S108 - only a name
    "[stack": "stack",
    "[heap]": "heap",
}
"""The kinds by the start of the path; any other file is its name, and all else is `anonymous mmap`."""

_MOST_KINDS: Final = 1000
"""A vLLM maps some 400 files."""

_SECONDS: Final = 5.0
"""For one process: 40,000 mappings, of 25 lines each, take a second."""


def read_mappings(proc: Path, pid: int) -> dict[str, int] | None:
    """Return the resident bytes of each kind of mapping, and all that is `swapped out`; None where not visible.

    The kinds are `heap`, `anonymous mmap`, `memfd`, `shm`, `stack` and the name of each mapped file: a library's own
    private memory is in its name. The kernel holds the process's mappings only while it writes a page of text.
    """
    found: dict[str, int] = {}
    kind, ends = "", time.monotonic() + _SECONDS
    try:
        with (proc / str(pid) / "smaps").open("rb") as lines:
            for line in lines:
                if line.startswith((b"Rss:", b"Swap:")):
                    name = kind if line[0] == ord("R") else "swapped out"
                    found[name] = found.get(name, 0) + int(line.split()[1]) * 1024
                elif (mapping := _MAPPING.fullmatch(line)) is not None:
                    path = mapping[1].decode(errors="replace")
                    file = (
                        path.removesuffix(" (deleted)").rpartition("/")[2]
                        if path[:1] == "/"
                        else "anonymous mmap"
                    )
                    kind = next(
                        (kind for start, kind in _KINDS.items() if path.startswith(start)), file
                    )
                    kind = kind if kind in found or len(found) < _MOST_KINDS else "other files"
                    if time.monotonic() > ends:
                        return None
    except (OSError, ValueError, IndexError):
        return None
    return found or None


def find_growth(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Return by how much each kind has grown or shrunk, the largest growth first, without those that have not."""
    changes = {kind: after.get(kind, 0) - before.get(kind, 0) for kind in before | after}
    return dict(
        sorted(((kind, size) for kind, size in changes.items() if size), key=lambda each: -each[1])
    )
