"""The memory of the machine, of the engine's processes and of its /dev/shm."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from vllm_headroom.model import EngineProcess, HostReading, MachineMemory, Shm
from vllm_headroom.scrape.proc.cgroup import cgroup_of
from vllm_headroom.scrape.proc.files import content, number

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
