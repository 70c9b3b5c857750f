"""The memory of a process's cgroup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from msgspec import Struct

from vllm_headroom.model import Cgroup
from vllm_headroom.scrape.proc.files import content, number


class _Version(Struct, frozen=True, kw_only=True):
    """What a version calls its files, and what of memory.stat is taken back before anything is killed.

    Files on the active list count as well: what vLLM maps of its weights is there. Shared memory is on neither list.
    """

    limit: str
    used: str
    kills: str
    cache: tuple[bytes, ...]


_V2: Final = _Version(
    limit="memory.max",
    used="memory.current",
    kills="memory.events",
    cache=(b"active_file ", b"inactive_file ", b"slab_reclaimable "),
)
_V1: Final = _Version(
    limit="memory.limit_in_bytes",
    used="memory.usage_in_bytes",
    kills="memory.oom_control",
    cache=(b"total_active_file ", b"total_inactive_file "),
)


def cgroup_of(proc: Path, pid: int, *, machine_bytes: int) -> Cgroup | None:
    """Return the memory of the process's cgroup, at the level above it whose limit is the lowest.

    None where the tree cannot be seen, as in a container beside it: a folder is believed only where the process is
    listed in it. A limit above what the machine has is none.
    """
    try:
        mounts, places = tuple(_mounts(proc)), tuple(_places(proc, pid))
    except (OSError, ValueError):
        return None
    for version, path in places:
        for mounted, root, top in mounts:
            if mounted is not version or not path.is_relative_to(root):
                continue
            folder = top / path.relative_to(root)
            if _lists(folder, pid) and (folder / version.used).exists():
                return _read(version, folder, top, machine_bytes)
    return None


def _places(proc: Path, pid: int) -> Iterator[tuple[_Version, PurePosixPath]]:
    """Yield where each version has the process; on a machine with both the memory is in one of them."""
    for line in content(proc / str(pid) / "cgroup").decode(errors="replace").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield _V1, PurePosixPath(path)
        elif hierarchy == "0" and not controllers:
            yield _V2, PurePosixPath(path)


def _mounts(proc: Path) -> Iterator[tuple[_Version, PurePosixPath, Path]]:
    """Yield each tree of cgroups that is mounted: its version, the cgroup at its top, and where that is."""
    for line in content(proc / "self" / "mountinfo").decode(errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2) if after.count(" ") > 1 else ("", "", "")
        root, top = before.split(" ")[3:5]
        if kind == "cgroup2":
            yield _V2, PurePosixPath(root), Path(top)
        elif kind == "cgroup" and "memory" in options.split(","):
            yield _V1, PurePosixPath(root), Path(top)


def _lists(folder: Path, pid: int) -> bool:
    try:
        return str(pid).encode() in content(folder / "cgroup.procs").split()
    except OSError:
        return False


def _read(version: _Version, folder: Path, top: Path, machine_bytes: int) -> Cgroup | None:
    levels = [folder, *(above for above in folder.parents if above.is_relative_to(top))]
    limits = [(limit, level) for level in levels if (limit := _limit(version, level)) is not None]
    limit_bytes, wall = min(limits, key=lambda each: each[0], default=(machine_bytes, folder))
    try:
        told = content(wall / "memory.stat")
        return Cgroup(
            identity=f"{folder}:{folder.stat().st_ino}",
            used_bytes=int(content(wall / version.used)),
            cache_bytes=sum(number(told, name) or 0 for name in version.cache),
            limit_bytes=limit_bytes if limit_bytes < machine_bytes else None,
            oom_kills=number(content(folder / version.kills), b"oom_kill "),
        )
    except (OSError, ValueError):
        return None


def _limit(version: _Version, level: Path) -> int | None:
    try:
        return number(content(level / version.limit), b"")
    except OSError:
        return None
