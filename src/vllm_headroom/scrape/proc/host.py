"""The memory of the machine, of the engine's processes and of its /dev/shm."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from vllm_headroom.model import Cgroup, HostReading, MachineMemory, Shm
from vllm_headroom.scrape.proc.files import find_number, read_content


class _Version(NamedTuple):
    """The file names of a cgroup version, and the entries of memory.stat that the kernel reclaims before it kills.

    Active files count too: mapped weights are among them. Shared memory is on neither list.
    """

    limit: str
    used: str
    kills: str
    cache: str


_V2: Final = _Version(
    "memory.max", "memory.current", "memory.events", "active_file inactive_file slab_reclaimable"
)
_V1: Final = _Version(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.oom_control",
    "total_active_file total_inactive_file",
)


def _read(path: Path) -> bytes:
    """Return a file's content, nothing where it cannot be read."""
    try:
        return read_content(path)
    except OSError:
        return b""


def read_cgroup(proc: Path, pid: int, *, machine_bytes: int) -> Cgroup | None:
    """Return the memory of the process's cgroup, at the level with the lowest limit; None where it is not visible.

    Its folder must list the process. A limit above the machine's memory is no limit.
    """
    try:
        for version, folder, top in _list_folders(proc, pid):
            if (
                str(pid).encode() in _read(folder / "cgroup.procs").split()
                and (folder / version.used).exists()
            ):
                return _read_memory(version, folder, top, machine_bytes)
    except (OSError, ValueError):
        return None
    return None


def _list_folders(proc: Path, pid: int) -> Iterator[tuple[_Version, Path, Path]]:
    """Yield where the process's cgroup may be: its version, its folder, and the mount point of the cgroup tree."""
    mounts: list[tuple[_Version, str, str]] = []
    for line in read_content(proc / "self" / "mountinfo").decode(errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2) if after.count(" ") > 1 else ("", "", "")
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            root, top = before.split(" ")[3:5]
            mounts.append((_V2 if kind == "cgroup2" else _V1, root, top))
    for line in read_content(proc / str(pid) / "cgroup").decode(errors="replace").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        version = (
            _V1
            if "memory" in controllers.split(",")
            else _V2
            if (hierarchy, controllers) == ("0", "")
            else None
        )
        for mounted, root, top in mounts:
            if mounted is version and PurePosixPath(path).is_relative_to(root):
                yield mounted, Path(top) / PurePosixPath(path).relative_to(root), Path(top)


def _read_memory(version: _Version, folder: Path, top: Path, machine_bytes: int) -> Cgroup | None:
    limits: list[tuple[int, Path]] = []
    try:
        for level in (folder, *(above for above in folder.parents if above.is_relative_to(top))):
            with contextlib.suppress(
                FileNotFoundError, PermissionError
            ):  # any other failure is not "no limit"
                if (limit := find_number(read_content(level / version.limit), b"")) is not None:
                    limits.append((limit, level))
        limit_bytes, wall = min(limits, key=lambda each: each[0], default=(machine_bytes, folder))
        stat = read_content(wall / "memory.stat")
        swap = _read(wall / "memory.swap.current")  # version 1 has it in memory.stat
        return Cgroup(
            identity=f"{folder}:{folder.stat().st_ino}",
            used_bytes=int(read_content(wall / version.used)),
            cache_bytes=sum(
                find_number(stat, f"{name} ".encode()) or 0 for name in version.cache.split()
            ),
            limit_bytes=limit_bytes if limit_bytes < machine_bytes else None,
            oom_kills=find_number(read_content(folder / version.kills), b"oom_kill "),
            swap_bytes=find_number(swap, b"") if swap else find_number(stat, b"total_swap "),
            pressure_ratio=_read_pressure(wall / "memory.pressure", b"avg10="),
        )
    except (OSError, ValueError):
        return None


SHM: Final = "dev/shm"
_KIB: Final = 1024


def read_host(proc: Path, pid: int | None) -> HostReading:
    """Return the visible host memory; the container is that of a process, of the engine its server."""
    machine = read_machine(proc)
    if pid is None:
        return HostReading(machine=machine)
    cgroup = read_cgroup(proc, pid, machine_bytes=2**63 if machine is None else machine.total_bytes)
    return HostReading(cgroup=cgroup, machine=machine, shm=_read_process_shm(proc, pid))


def read_machine(proc: Path) -> MachineMemory | None:
    """Return the machine's memory, None where /proc does not have it."""
    meminfo = _read(proc / "meminfo")
    total_kib, available_kib = (
        find_number(meminfo, b"MemTotal:"),
        find_number(meminfo, b"MemAvailable:"),
    )
    if total_kib is None or available_kib is None:
        return None
    return MachineMemory(
        total_bytes=total_kib * _KIB,
        available_bytes=available_kib * _KIB,
        swap_bytes=(find_number(meminfo, b"SwapTotal:") or 0) * _KIB,
        swap_free_bytes=(find_number(meminfo, b"SwapFree:") or 0) * _KIB,
        oom_kills=find_number(_read(proc / "vmstat"), b"oom_kill "),
        pressure_ratio=_read_pressure(proc / "pressure" / "memory", b"avg10="),
    )


BLOCK_BYTES: Final = 2 * 2**20
"""What a driver maps at a time: smaller free blocks do not help a GPU that uses the machine's memory."""


def read_free_blocks(proc: Path) -> int | None:
    """Return the free memory of the machine in blocks of 2 MiB and more; None where /proc/buddyinfo has none."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    # a line per zone counts its free blocks of one page, two pages, four pages and so on
    zones = [
        line.partition(b"zone")[2].split()[1:] for line in _read(proc / "buddyinfo").splitlines()
    ]
    try:
        sizes = [
            (int(count), page_bytes << order) for zone in zones for order, count in enumerate(zone)
        ]
    except ValueError:
        return None
    return sum(count * size for count, size in sizes if size >= BLOCK_BYTES) if sizes else None


def read_cpu_pressure(proc: Path) -> float | None:
    """Return the share of the last minute in which a task of the machine waited for a CPU; None with `psi=0`."""
    return _read_pressure(proc / "pressure" / "cpu", b"avg60=")


def _read_pressure(path: Path, window: bytes) -> float | None:
    """Return the share of the window in which some task waited; the kernel's first line is that of some."""
    try:
        ratio = float(_read(path).partition(window)[2].split()[0]) / 100
    except (ValueError, IndexError):
        return None
    return round(ratio, 4) if 0 <= ratio <= 1 else None


def read_boot_time(proc: Path) -> float:
    """Return when the machine booted, in seconds since the epoch; raise OSError where /proc/stat does not have it."""
    seconds = find_number(read_content(proc / "stat"), b"btime ")
    if seconds is None:
        raise OSError(f"{proc / 'stat'} has no line btime")
    return float(seconds)


def read_parts(proc: Path, pid: int) -> dict[str, int]:
    """Return a process's anonymous, file-mapped, shared and swapped-out bytes, without what the kernel does not count.

    Not from smaps_rollup, which walks the page tables under the lock that the engine's own mappings need, for seconds
    where weights are mapped.
    """
    status = _read(proc / str(pid) / "status")
    names = {
        "anonymous": b"RssAnon:",
        "file": b"RssFile:",
        "shared": b"RssShmem:",
        "swap": b"VmSwap:",
    }
    found = {f"{name}_bytes": find_number(status, field) for name, field in names.items()}
    return {name: kib * _KIB for name, kib in found.items() if kib is not None}


def read_shm(path: Path) -> Shm | None:
    """Return the size of the file system at `path`, None where there is none."""
    try:
        volume = os.statvfs(path)
    except OSError:
        return None
    return Shm(
        total_bytes=volume.f_blocks * volume.f_frsize, free_bytes=volume.f_bavail * volume.f_frsize
    )


def _read_process_shm(proc: Path, pid: int) -> Shm | None:
    """Return the process's /dev/shm: through its root where permitted, else this process's if it is the same."""
    seen = read_shm(proc / str(pid) / "root" / SHM)
    if seen is not None:
        return seen
    here = Path("/", SHM)
    lines = (
        line.split(" ")
        for line in _read(proc / str(pid) / "mountinfo").decode(errors="replace").splitlines()
    )
    mounted = [words[2] for words in lines if words[4] == str(here)]
    try:
        device = here.stat().st_dev
    except OSError:
        return None
    return read_shm(here) if mounted[-1:] == [f"{os.major(device)}:{os.minor(device)}"] else None
