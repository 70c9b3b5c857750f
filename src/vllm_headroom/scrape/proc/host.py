"""Read the memory of the machine, the engine's processes and its /dev/shm."""

import contextlib
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final

from msgspec import Struct

from vllm_headroom.model import Cgroup, HostReading, MachineMemory, Shm
from vllm_headroom.scrape.proc.files import (
    KIB,
    find_number,
    read_content,
    read_integer,
    read_own_pid,
    split_kernel_lines,
)
from vllm_headroom.units import MIB


class CgroupVersion(Struct, frozen=True, kw_only=True):
    """The file names that a cgroup version uses."""

    limit: str
    used: str
    events: str
    """The file in which the kernel counts OOM kills."""
    cache: tuple[str, ...]
    """The memory.stat entries for memory that the kernel reclaims before it kills a process. Active
    files are included, because they contain mapped weights. Shared memory is not included.
    """


_V2: Final = CgroupVersion(
    limit="memory.max",
    used="memory.current",
    events="memory.events",
    cache=("active_file", "inactive_file", "slab_reclaimable"),
)
_V1: Final = CgroupVersion(
    limit="memory.limit_in_bytes",
    used="memory.usage_in_bytes",
    events="memory.oom_control",
    cache=("total_active_file", "total_inactive_file"),
)


class CgroupMount(Struct, frozen=True, kw_only=True):
    """A mount of a memory cgroup tree."""

    version: CgroupVersion
    root: str
    """The mounted cgroup, as seen from the reader's cgroup namespace. `/` is the namespace's own
    cgroup, and `/..` is its parent. In a container, the mounted cgroup is not always the root of
    the tree.
    """
    path: Path
    """The mount point."""


class CgroupFolder(Struct, frozen=True, kw_only=True):
    """A folder that may be a process's cgroup."""

    mount: CgroupMount
    path: Path
    levels: tuple[Path, ...]
    """The folder and its ancestors in the mounted tree. Each may set a limit."""


def _read(path: Path) -> bytes:
    """Return a file's content, or an empty result if it cannot be read."""
    try:
        return read_content(path)
    except OSError:
        return b""


def _read_lines(path: Path) -> list[str]:
    """Return a file's lines; raise OSError if it cannot be read."""
    return split_kernel_lines(read_content(path).decode(errors="replace"))


def read_cgroup(proc: Path, pid: int, *, machine_bytes: int) -> Cgroup | None:
    """Return the memory of a process's cgroup.

    The values are those of the cgroup with the lowest limit. The cgroup with the lowest limit may
    be the process's own cgroup or an ancestor. A limit that is not below the machine's memory is
    ignored. Returns None in three cases:

    - The cgroup is not visible.
    - The cgroup does not list the process.
    - The cgroup cannot be read.
    """
    try:
        membership = read_content(proc / str(pid) / "cgroup").decode(errors="replace")
        cgroup = _find_listing_folder(_list_folders(proc, membership), pid)
        if cgroup is None:
            # The mounts may have changed since they were read. Only this call bypasses the cache. A
            # process with a hidden cgroup gets here on each tick. Such a process must not clear the
            # mounts cached for other processes.
            cgroup = _find_listing_folder(_list_folders.__wrapped__(proc, membership), pid)
        return None if cgroup is None else _read_memory(cgroup, machine_bytes)
    except (OSError, ValueError):
        return None


def _find_listing_folder(folders: Iterable[CgroupFolder], pid: int) -> CgroupFolder | None:
    """Return the first of the folders that has memory files and lists the process.

    In a sidecar, another cgroup may have the same path. The path alone therefore proves nothing.
    Returns None if no folder lists the process.
    """
    for cgroup in folders:
        pids = _read(cgroup.path / "cgroup.procs").split()
        has_memory = (cgroup.path / cgroup.mount.version.used).exists()
        if str(pid).encode() in pids and has_memory:
            return cgroup
    return None


@lru_cache(maxsize=64)
def _list_folders(proc: Path, membership: str) -> tuple[CgroupFolder, ...]:
    """Return the folders that may be a process's memory cgroup.

    `membership` is the content of the process's cgroup file. The result is cached, because a
    machine may have hundreds of mounts. Raises OSError or ValueError if /proc cannot be read or
    parsed.
    """
    mounts = []
    for line in _read_lines(proc / "self" / "mountinfo"):
        mount = _parse_mount(line)
        if mount is not None:
            mounts.append(mount)
    folders = []
    for line in split_kernel_lines(membership):
        hierarchy, controllers, path = line.split(":", 2)
        # See cgroups(7): version 1 names its controllers. Version 2 has the number 0 and no names.
        if "memory" in controllers.split(","):
            version = _V1
        elif (hierarchy, controllers) == ("0", ""):
            version = _V2
        else:
            continue
        for mount in mounts:
            if mount.version is not version:
                continue
            folder = _find_folder(proc, mount, path)
            if folder is None:
                continue
            levels = tuple(
                level for level in (folder, *folder.parents) if level.is_relative_to(mount.path)
            )
            folders.append(CgroupFolder(mount=mount, path=folder, levels=levels))
    return tuple(folders)


def _find_folder(proc: Path, mount: CgroupMount, cgroup: str) -> Path | None:
    """Return a cgroup's folder in a mounted tree, or None if it is elsewhere.

    The names of cgroups above the reader's namespace are hidden: `/../b` may be `/a/b`. If the
    mounted root is above the namespace, the hidden names are derived from the folder of the
    daemon's own cgroup.
    """
    names_above, names = _split_cgroup(cgroup)
    root_names_above, root_names = _split_cgroup(mount.root)
    if names_above == root_names_above:
        # Both paths start at the same cgroup, so only the names below it matter.
        if names[: len(root_names)] != root_names:
            return None
        return mount.path.joinpath(*names[len(root_names) :])
    if names_above > root_names_above:
        return None
    own_folder = _find_own_folder(proc, mount.path, root_names_above)
    if own_folder is None:
        return None
    # The path goes up one parent for each `..`. `parents[0]` is directly above the folder.
    shared_folder = own_folder if names_above == 0 else own_folder.parents[names_above - 1]
    return shared_folder.joinpath(*names)


def _split_cgroup(path: str) -> tuple[int, tuple[str, ...]]:
    """Return how many `..` a cgroup's path starts with, and the names that follow them."""
    parts = [part for part in path.split("/") if part]
    names_above = 0
    while names_above < len(parts) and parts[names_above] == "..":
        names_above += 1
    return names_above, tuple(parts[names_above:])


@lru_cache(maxsize=4)
def _find_own_folder(proc: Path, mount_path: Path, levels: int) -> Path | None:
    """Return the folder of the reader's cgroup namespace, `levels` levels below a mount point.

    The folder is searched for only once. A namespace never moves, and a node has hundreds of
    cgroups. Returns None if no folder lists the daemon's process. The daemon's pid may belong to
    another PID namespace.
    """
    own_pid = str(read_own_pid(proc)).encode()
    for folder in mount_path.glob("/".join(["*"] * levels)):
        if own_pid in _read(folder / "cgroup.procs").split():
            return folder
    return None


def _parse_mount(line: str) -> CgroupMount | None:
    """Return the mount described by a line of mountinfo (see proc(5)).

    Returns None for file systems other than memory cgroups.
    """
    fields, _, file_system = line.partition(" - ")
    kind, _, source_and_options = file_system.partition(" ")
    options = source_and_options.partition(" ")[2].split(",")
    if kind == "cgroup2":
        version = _V2
    elif kind == "cgroup" and "memory" in options:
        version = _V1
    else:
        return None
    # The fourth field is the root within the file system. The fifth is the mount point.
    root, path = fields.split(" ")[3:5]
    return CgroupMount(version=version, root=root, path=Path(path))


def _read_memory(cgroup: CgroupFolder, machine_bytes: int) -> Cgroup | None:
    """Return the memory of a cgroup (see `read_cgroup`), or None if it cannot be read."""
    version = cgroup.mount.version
    try:
        # An ancestor, such as the pod's cgroup, may have the lowest limit.
        limit_bytes, level = _find_lowest_limit(cgroup) or (machine_bytes, cgroup.path)
        stat = read_content(level / "memory.stat")
        cache_bytes = 0
        for name in version.cache:
            cache_bytes += find_number(stat, f"{name} ".encode()) or 0
        swap = _read(level / "memory.swap.current")
        # Version 1 does not have this file but reports swapped bytes in memory.stat.
        swap_bytes = find_number(swap, b"") if swap else find_number(stat, b"total_swap ")
        return Cgroup(
            identity=f"{cgroup.path}:{cgroup.path.stat().st_ino}",
            used_bytes=read_integer(read_content(level / version.used)),
            cache_bytes=cache_bytes,
            limit_bytes=limit_bytes if limit_bytes < machine_bytes else None,
            oom_kills=find_number(read_content(cgroup.path / version.events), b"oom_kill "),
            swap_bytes=swap_bytes,
            pressure_ratio=_read_pressure(level / "memory.pressure", b"avg10="),
        )
    except (OSError, ValueError):
        return None


def _find_lowest_limit(cgroup: CgroupFolder) -> tuple[int, Path] | None:
    """Return the lowest limit (bytes) of a cgroup and its ancestors, with its folder.

    Returns None if no cgroup has a limit. A limit is ignored if its file is missing or access to it
    is denied. Raises OSError if a limit cannot be read for any other reason.
    """
    limits: list[tuple[int, Path]] = []
    for level in cgroup.levels:
        # With any other error, a limit may exist, so the error is raised.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            limit_bytes = find_number(read_content(level / cgroup.mount.version.limit), b"")
            if limit_bytes is not None:
                limits.append((limit_bytes, level))
    return min(limits, key=lambda limit: limit[0], default=None)


SHM_FOLDER: Final = "dev/shm"

UNLIMITED_BYTES: Final = 2**63
"""This value is used if the machine's memory is unknown. The value is higher than any limit."""


def read_host(proc: Path, pid: int | None) -> HostReading:
    """Return the host memory; a part that is not visible is None.

    The cgroup and /dev/shm are those of the process `pid`. If `pid` is None, both are None.
    """
    return read_host_on(read_machine(proc), proc, pid)


def read_host_on(machine: MachineMemory | None, proc: Path, pid: int | None) -> HostReading:
    """Return the host memory like `read_host`, but with the given reading of the machine."""
    if pid is None:
        return HostReading(machine=machine)
    machine_bytes = UNLIMITED_BYTES if machine is None else machine.total_bytes
    cgroup = read_cgroup(proc, pid, machine_bytes=machine_bytes)
    return HostReading(cgroup=cgroup, machine=machine, shm=_read_process_shm(proc, pid))


def read_machine(proc: Path) -> MachineMemory | None:
    """Return the machine's memory, or None if /proc does not show it."""
    meminfo = _read(proc / "meminfo")
    total_kib = find_number(meminfo, b"MemTotal:")
    available_kib = find_number(meminfo, b"MemAvailable:")
    if total_kib is None or available_kib is None:
        return None
    return MachineMemory(
        total_bytes=total_kib * KIB,
        available_bytes=available_kib * KIB,
        swap_bytes=(find_number(meminfo, b"SwapTotal:") or 0) * KIB,
        swap_free_bytes=(find_number(meminfo, b"SwapFree:") or 0) * KIB,
        # Older kernels do not have this counter.
        oom_kills=find_number(_read(proc / "vmstat"), b"oom_kill "),
        pressure_ratio=_read_pressure(proc / "pressure" / "memory", b"avg10="),
    )


DRIVER_BLOCK_BYTES: Final = 2 * MIB
"""The block size in which a driver maps memory. A GPU that uses the machine's memory cannot use
smaller free blocks.
"""


def read_free_blocks(proc: Path) -> int | None:
    """Return the machine's free memory in blocks of 2 MiB or more, in bytes.

    Returns None if /proc/buddyinfo cannot be read or parsed.
    """
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    has_counts = False
    free_bytes = 0
    for line in _read(proc / "buddyinfo").splitlines():
        # Each line counts a zone's free blocks of 1, 2, 4 (and so on) pages.
        counts = line.partition(b"zone")[2].split()[1:]
        for order, count in enumerate(counts):
            try:
                blocks = read_integer(count)
            except ValueError:
                return None
            has_counts = True
            block_bytes = page_bytes << order
            if block_bytes >= DRIVER_BLOCK_BYTES:
                free_bytes += blocks * block_bytes
    return free_bytes if has_counts else None


class MachineReading(Struct, frozen=True, kw_only=True):
    """The state of the machine, which is the same for every engine on it."""

    memory: MachineMemory | None = None
    """The machine's memory, or None if unknown."""
    cpu_pressure_ratio: float | None = None
    """See `read_cpu_pressure`."""


def read_machine_state(proc: Path) -> MachineReading:
    """Return the memory and the CPU pressure of the machine."""
    return MachineReading(memory=read_machine(proc), cpu_pressure_ratio=read_cpu_pressure(proc))


def read_cpu_pressure(proc: Path) -> float | None:
    """Return the share of the last minute in which a task waited for a CPU.

    Returns None if the kernel does not measure pressure (boot option `psi=0`).
    """
    return _read_pressure(proc / "pressure" / "cpu", b"avg60=")


def _read_pressure(path: Path, window: bytes) -> float | None:
    """Return the share of a window in which a task waited, or None if unknown.

    `window` is the name of the field: `avg10=` or `avg60=`. The two windows cover the last ten
    seconds and the last minute.
    """
    # The first line is for "some" tasks, and the second for all tasks. The first match is in the
    # first line.
    _, _, following = _read(path).partition(window)
    try:
        percent = float(following.split()[0])
    except (ValueError, IndexError):
        return None
    ratio = percent / 100
    return round(ratio, 4) if 0 <= ratio <= 1 else None


def read_boot_time(proc: Path) -> float:
    """Return when the machine booted, in seconds since the epoch.

    Raises OSError if /proc/stat does not contain the boot time.
    """
    seconds = find_number(read_content(proc / "stat"), b"btime ")
    if seconds is None:
        raise OSError(f"{proc / 'stat'} has no line btime")
    return float(seconds)


_STATUS_FIELDS: Final = {
    "anonymous_bytes": b"RssAnon:",
    "file_bytes": b"RssFile:",
    "shared_bytes": b"RssShmem:",
    "swap_bytes": b"VmSwap:",
}


def read_process_parts(proc: Path, pid: int) -> dict[str, int]:
    """Return the parts of a process's memory, keyed by the field names of EngineProcess.

    Parts that the kernel does not count are omitted.
    """
    # smaps_rollup is not read. To write it, the kernel walks the page tables under a lock. The
    # engine needs this lock to map memory. If weights are mapped, this takes seconds.
    status = _read(proc / str(pid) / "status")
    parts_bytes = {}
    for name, field in _STATUS_FIELDS.items():
        part_kib = find_number(status, field)
        if part_kib is not None:
            parts_bytes[name] = part_kib * KIB
    return parts_bytes


def read_shm(path: Path) -> Shm | None:
    """Return the size and free space of the file system at `path`.

    Returns None if the file system cannot be read or `path` does not exist.
    """
    try:
        volume = os.statvfs(path)
    except OSError:
        return None
    return Shm(
        total_bytes=volume.f_blocks * volume.f_frsize, free_bytes=volume.f_bavail * volume.f_frsize
    )


def _read_process_shm(proc: Path, pid: int) -> Shm | None:
    """Return the size and free space of the process's /dev/shm, or None if unknown.

    The file system is read through the process's root. If access to the root is denied, the
    daemon's own /dev/shm is read instead. The daemon's /dev/shm must be on the same device as that
    of the process.
    """
    shm = read_shm(proc / str(pid) / "root" / SHM_FOLDER)
    if shm is not None:
        return shm
    own_path = Path("/", SHM_FOLDER)
    mountinfo = _read(proc / str(pid) / "mountinfo")
    mounts = [line.split(" ") for line in split_kernel_lines(mountinfo.decode(errors="replace"))]
    # Fields 3 and 5 are the device and the path. The last mount at a path hides the earlier ones.
    devices = [fields[2] for fields in mounts if fields[4:5] == [str(own_path)]]
    try:
        own_device = own_path.stat().st_dev
    except OSError:
        return None
    own_name = f"{os.major(own_device)}:{os.minor(own_device)}"
    if not devices or devices[-1] != own_name:
        return None
    return read_shm(own_path)
