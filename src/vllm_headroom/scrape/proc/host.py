"""The memory of the machine, of the engine's processes and of its /dev/shm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from msgspec import Struct

from vllm_headroom.model import Cgroup, EngineProcess, HostReading, MachineMemory, Shm
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


SHM: Final = "dev/shm"
_KIB: Final = 1024


def host_of(proc: Path, engine: tuple[EngineProcess, ...]) -> HostReading:
    """Return what is seen of the host's memory; the container is that of the engine's first process, its server."""
    return reading_of(proc, engine[0].pid) if engine else HostReading(machine=machine_of(proc))


def reading_of(proc: Path, pid: int) -> HostReading:
    """Return what is seen of the host's memory around one process."""
    machine = machine_of(proc)
    most_bytes = 2**63 if machine is None else machine.total_bytes
    return HostReading(
        cgroup=cgroup_of(proc, pid, machine_bytes=most_bytes), machine=machine, shm=_shm_of_process(proc, pid)
    )


def machine_of(proc: Path) -> MachineMemory | None:
    """Return the machine's memory, None where /proc does not tell it."""
    try:
        told = content(proc / "meminfo")
    except OSError:
        return None
    total_kib, available_kib = number(told, b"MemTotal:"), number(told, b"MemAvailable:")
    if total_kib is None or available_kib is None:
        return None
    return MachineMemory(
        total_bytes=total_kib * _KIB,
        available_bytes=available_kib * _KIB,
        swap_bytes=(number(told, b"SwapTotal:") or 0) * _KIB,
        swap_free_bytes=(number(told, b"SwapFree:") or 0) * _KIB,
        oom_kills=_kills(proc),
    )


def boot_time_seconds(proc: Path) -> float:
    """Return when the machine started, in seconds since the epoch; raise OSError where /proc/stat does not say."""
    seconds = number(content(proc / "stat"), b"btime ")
    if seconds is None:
        raise OSError(f"{proc / 'stat'} has no line btime")
    return float(seconds)


def resident_parts(proc: Path, pid: int) -> tuple[int | None, int | None]:
    """Return what of a process's resident memory is its own, and what maps files; None where the kernel says nothing.

    Counted by the kernel as it goes: smaps_rollup would walk the page tables under the lock that the engine's own
    mappings need, for seconds where weights are mapped.
    """
    try:
        told = content(proc / str(pid) / "status")
    except OSError:
        return None, None
    anonymous, file = number(told, b"RssAnon:"), number(told, b"RssFile:")
    if anonymous is None or file is None:
        return None, None
    return anonymous * _KIB, file * _KIB


def shm_of(path: Path) -> Shm | None:
    """Return the size of the file system at `path`, None where there is none."""
    try:
        told = os.statvfs(path)
    except OSError:
        return None
    return Shm(total_bytes=told.f_blocks * told.f_frsize, free_bytes=told.f_bavail * told.f_frsize)


def _shm_of_process(proc: Path, pid: int) -> Shm | None:
    """Return the process's /dev/shm: through its root where that is allowed, else this one's if it is the same."""
    seen = shm_of(proc / str(pid) / "root" / SHM)
    if seen is not None:
        return seen
    here = Path("/", SHM)
    try:
        device = here.stat().st_dev
        lines = content(proc / str(pid) / "mountinfo").decode(errors="replace").splitlines()
    except OSError:
        return None
    mounted = [words[2] for words in (line.split(" ") for line in lines) if words[4] == str(here)]
    same = mounted[-1:] == [f"{os.major(device)}:{os.minor(device)}"]
    return shm_of(here) if same else None


def _kills(proc: Path) -> int | None:
    try:
        return number(content(proc / "vmstat"), b"oom_kill ")
    except OSError:
        return None
