"""Read the container's host memory, which only a process inside the container can do."""

from __future__ import annotations

import os
from typing import Any, NamedTuple


class CgroupFiles(NamedTuple):
    """The file names in one cgroup version, and the names of two entries in memory.stat."""

    used: str
    limit: str
    events: str
    cache_entry: str
    shared_entry: str


V1 = CgroupFiles(
    used="memory.usage_in_bytes",
    limit="memory.limit_in_bytes",
    events="memory.oom_control",
    cache_entry="total_cache",
    shared_entry="total_shmem",
)
V2 = CgroupFiles(
    used="memory.current",
    limit="memory.max",
    events="memory.events",
    cache_entry="file",
    shared_entry="shmem",
)

NO_LIMIT_BYTES = 1 << 60
"""A limit of this size or more counts as no limit. Without a limit, cgroup v1 shows 2^63 minus one
page.
"""


def read_host(root: str = "/") -> dict[str, Any]:
    """Return the memory of this process's cgroup and of /dev/shm; unreadable values are None.

    `root` is the root of the file system; tests use another folder.
    """
    return {"cgroup": _read_cgroup(root), "shm": _read_shm(os.path.join(root, "dev/shm"))}  # noqa: PTH118


def _read_shm(path: str) -> dict[str, int] | None:
    """Return a file system's used bytes and size, or None if it cannot be read."""
    try:
        volume = os.statvfs(path)
    except OSError:
        return None
    used_blocks = volume.f_blocks - volume.f_bfree
    return {"used": used_blocks * volume.f_frsize, "limit": volume.f_blocks * volume.f_frsize}


def _read_cgroup(root: str) -> dict[str, int | None] | None:
    """Return the memory that counts against the limit.

    `file` is the part in the page cache. Values that cannot be read are None. Returns None if the
    cgroup is not visible.
    """
    cgroup = _find_cgroup(root)
    if cgroup is None:
        return None
    folder, files = cgroup
    limit_bytes = _parse_number(_read_text(folder, files.limit))
    if limit_bytes is not None and limit_bytes >= NO_LIMIT_BYTES:
        limit_bytes = None
    stat = _parse_fields(_read_text(folder, "memory.stat"))
    cache_bytes = stat.get(files.cache_entry)
    shared_bytes = stat.get(files.shared_entry)
    file_bytes = None
    if cache_bytes is not None and shared_bytes is not None:
        # The kernel counts shared memory as cache but cannot reclaim it.
        file_bytes = cache_bytes - shared_bytes
    return {
        "used": _parse_number(_read_text(folder, files.used)),
        "limit": limit_bytes,
        "file": file_bytes,
        "oom_kills": _parse_fields(_read_text(folder, files.events)).get("oom_kill"),
    }


def _find_cgroup(root: str) -> tuple[str, CgroupFiles] | None:
    """Return the folder of this process's memory cgroup and the names of its files.

    Returns None if the cgroup is not visible.
    """
    for line in _read_text(root, "proc/self/cgroup").split("\n"):
        if not line:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            files = V1
            mount = os.path.join(root, "sys/fs/cgroup/memory")  # noqa: PTH118
        elif not controllers:
            files = V2
            mount = os.path.join(root, "sys/fs/cgroup")  # noqa: PTH118
        else:
            continue
        # In a container, the cgroup mount point is the container's own cgroup.
        for folder in (mount + path, mount):
            if _read_text(folder, files.used):
                return folder, files
    return None


def _read_text(folder: str, name: str) -> str:
    """Return a file's text, or "" if it cannot be read."""
    try:
        path = os.path.join(folder, name)  # noqa: PTH118
        # A cgroup's name may be invalid UTF-8 and may contain a carriage return.
        with open(path, errors="replace", newline="\n") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return ""


def _parse_number(text: str) -> int | None:
    """Return a non-negative integer, or None for any other text."""
    return int(text) if text.strip().isdecimal() else None


def _parse_fields(text: str) -> dict[str, int]:
    """Return the numbers in lines such as `oom_kill 1`, by name."""
    fields: dict[str, int] = {}
    for line in text.split("\n"):
        name, _, number = line.partition(" ")
        if number.isdecimal():
            fields[name] = int(number)
    return fields
