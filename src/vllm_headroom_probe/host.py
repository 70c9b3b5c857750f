"""Read the container's host memory, which only a process inside it can."""

from __future__ import annotations

import os
from typing import Any

V1 = {
    "used": "memory.usage_in_bytes",
    "limit": "memory.limit_in_bytes",
    "events": "memory.oom_control",
}
V2 = {"used": "memory.current", "limit": "memory.max", "events": "memory.events"}
NO_LIMIT = 1 << 60
"""Without a limit, cgroup v1 shows a page less than 2^63."""


def read_host(root: str = "/") -> dict[str, Any]:
    """Return the memory of this process's cgroup and of /dev/shm; None where unreadable."""
    return {"cgroup": _read_cgroup(root), "shm": _read_shm(os.path.join(root, "dev/shm"))}  # noqa: PTH118


def _read_shm(path: str) -> dict[str, int] | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    return {"used": used, "limit": found.f_blocks * found.f_frsize}


def _read_cgroup(root: str) -> dict[str, int | None] | None:
    """Return the memory that counts against the limit, and `file`, the reclaimable page cache in it."""
    place = _find_cgroup(root)
    if place is None:
        return None
    folder, names = place
    limit = _parse_number(_read_text(folder, names["limit"]))
    stat = _parse_fields(_read_text(folder, "memory.stat"))
    prefix = "" if names is V2 else "total_"
    cache, shared = stat.get("file" if names is V2 else "total_cache"), stat.get(f"{prefix}shmem")
    return {
        "used": _parse_number(_read_text(folder, names["used"])),
        "limit": None if limit is None or limit >= NO_LIMIT else limit,
        "file": None
        if cache is None or shared is None
        else cache - shared,  # shared memory is no cache
        "oom_kills": _parse_fields(_read_text(folder, names["events"])).get("oom_kill"),
    }


def _find_cgroup(root: str) -> tuple[str, dict[str, str]] | None:
    """Return the folder of this process's memory cgroup, in a container the root of the mount."""
    for line in _read_text(root, "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in {"", "memory"}:
            continue
        names, mount = (V1, "sys/fs/cgroup/memory") if controllers else (V2, "sys/fs/cgroup")
        for folder in (os.path.join(root, mount + path), os.path.join(root, mount)):  # noqa: PTH118
            if _read_text(folder, names["used"]):
                return folder, names
    return None


def _read_text(folder: str, name: str) -> str:
    try:
        with open(os.path.join(folder, name)) as file:  # noqa: PTH118, PTH123
            return file.read()
    except OSError:
        return ""


def _parse_number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _parse_fields(text: str) -> dict[str, int]:
    words = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}  # noqa: PLR2004
