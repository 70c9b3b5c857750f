"""Read a process's memory by kind of mapping."""

import re
import time
from pathlib import Path
from typing import Final

from vllm_headroom.scrape.proc.files import KIB, read_integer

_MAPPING: Final = re.compile(rb"[0-9a-f]+-[0-9a-f]+ \S{4} \S+ \S+ \d+ *(.*)\n")
"""The first line of a mapping; the group is the mapping's path."""

_KINDS: Final = {
    "/memfd:": "memfd",
    "/dev/shm/nccl-": "shm of NCCL",  # noqa: S108 - only a name
    "/dev/shm/": "shm",  # noqa: S108 - only a name
    "/SYSV": "shm",
    "/dev/zero": "shm",
    "[stack": "stack",
    "[heap]": "heap",
}
"""The kinds of mappings, keyed by the prefix of a mapping's path. The first match is used.
`_find_kind` handles all other paths.
"""

_MAX_KINDS: Final = 1000
"""The maximum number of kinds that are distinguished. A vLLM process maps about 400 files."""

_OTHER_FILES: Final = "other files"
"""The kind of all mapped files beyond _MAX_KINDS."""

KindSizes = dict[str, int]
"""Bytes by the kind of mapping."""

_MAX_SECONDS: Final = 5.0
"""The time limit for reading one process. For comparison, 40,000 mappings of 25 lines each take a
second.
"""


def read_mappings(proc: Path, pid: int) -> KindSizes | None:
    """Return the resident bytes by kind of mapping, with all swapped bytes under `swapped out`.

    The kinds are `heap`, `anonymous mmap`, `memfd`, `shm`, `shm of NCCL`, `stack`, and the name of
    each mapped file. The private memory of a library is counted under the library's name. The
    kernel locks the process's mappings only while it writes a page of text. Returns None in three
    cases:

    - smaps is empty.
    - smaps cannot be read.
    - Reading smaps takes longer than _MAX_SECONDS.
    """
    sizes_bytes: KindSizes = {}
    kind = ""
    deadline = time.monotonic() + _MAX_SECONDS
    try:
        with (proc / str(pid) / "smaps").open("rb") as lines:
            for line in lines:
                if line.startswith((b"Rss:", b"Swap:")):
                    name = kind if line.startswith(b"Rss:") else "swapped out"
                    size_bytes = read_integer(line.split()[1]) * KIB
                    sizes_bytes[name] = sizes_bytes.get(name, 0) + size_bytes
                    continue
                mapping = _MAPPING.fullmatch(line)
                if mapping is None:
                    continue
                kind = _find_kind(mapping[1].decode(errors="replace"))
                # A process may map thousands of files. The sizes of files beyond the limit are
                # added up.
                if kind not in sizes_bytes and len(sizes_bytes) >= _MAX_KINDS:
                    kind = _OTHER_FILES
                if time.monotonic() > deadline:
                    return None
    except (OSError, ValueError, IndexError):
        return None
    return sizes_bytes or None


def _find_kind(path: str) -> str:
    """Return the kind of a mapping from its path.

    The kind is one of _KINDS, the file's name, or anonymous.
    """
    for start, kind in _KINDS.items():
        if path.startswith(start):
            return kind
    if path.startswith("/"):
        return path.removesuffix(" (deleted)").rpartition("/")[2]
    return "anonymous mmap"


def find_growth(earlier: KindSizes, later: KindSizes) -> KindSizes:
    """Return the change of each kind in bytes, with the largest growth first.

    A kind that shrank has a negative change. Kinds with an unchanged size are omitted.
    """
    changes_bytes: KindSizes = {}
    for kind in earlier | later:
        change_bytes = later.get(kind, 0) - earlier.get(kind, 0)
        if change_bytes:
            changes_bytes[kind] = change_bytes
    return dict(sorted(changes_bytes.items(), key=lambda change: -change[1]))
