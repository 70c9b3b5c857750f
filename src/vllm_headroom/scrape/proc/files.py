"""What the files of one /proc say, read without holding anything between two reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Final

from msgspec import Struct

from vllm_headroom.scrape.proc.servers import find_role
from vllm_headroom.scrape.shortage import SHORTAGES
from vllm_headroom.vocabulary import Role

_START_BYTES: Final = 4096
"""Holds a program and its first arguments, where a command line may be megabytes; a stat or a /sys file has less."""

_MAY_BE_VLLM: Final = ("python", "pypy", "vllm", "VLLM::", "ray::")
"""How the names of processes begin that can get a command line of vLLM's, or another of them, and keep their name."""

KERNEL_THREADS: Final = 2
"""Their parent: they have no command line. Any other process without one may be in exec, which sets the name first."""

_FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"
"""The machine's first PID namespace has a fixed inode (Linux include/linux/proc_ns.h: PROC_PID_INIT_INO)."""

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


class ProcEntry(Struct, frozen=True, kw_only=True, dict=True):
    """One process: `command` is its command line or, where it has none, its name cut to 15 characters.

    A process title takes the place of the command line. pid and `started_seconds` (since boot) together name the
    process; a pid alone is given to another one later. `group` is its process group's.
    """

    pid: int
    parent_pid: int
    started_seconds: float
    command: tuple[str, ...]
    name: str = ""
    group: int = 0

    @cached_property
    def role(self) -> Role | None:
        """What it is of an engine's, by itself; asked of every process whenever one comes or goes."""
        return find_role(self.command)


def read_content(file: Path) -> bytes:
    """Return what a file of the kernel's holds; raise OSError.

    A file is opened, read and closed, without what Path.read_text asks of it besides: half of its cost.
    """
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(descriptor, 2**16), b""))
    finally:
        os.close(descriptor)


def find_number(told: bytes, name: bytes) -> int | None:
    """Return the number behind a name that begins a line, the separator included in the name; None without one."""
    _, _, rest = (b"\n" + told).partition(b"\n" + name)
    words = rest.split(maxsplit=1)
    return int(words[0]) if words and words[0].isdigit() else None


def list_pids(proc: Path) -> frozenset[int]:
    """Return the pid of every process that shows; raise OSError where there is no /proc."""
    return frozenset(int(name) for name in os.listdir(proc) if name.isdecimal())  # noqa: PTH208 - no Path per process


def read_entry(proc: Path, pid: int, known: ProcEntry | None = None) -> ProcEntry | None:
    """Return the process, or None when it has gone or is a zombie; raise OSError where that cannot be told.

    `known` is what was returned before: it is returned again where name, parent, group and start are the same, and the
    command line is read anew only if a program of this name may have another one by now. Every other program that takes
    the place of one, and every title, brings its name.
    """
    try:
        name, fields = _read_stat(proc, pid)
        if fields[0] == "Z":
            return None
        if known is not None and _is_unchanged(known, name, fields):
            return known
        command = _split_arguments(read_start(f"{proc}/{pid}/cmdline")) or (name,)
    except (OSError, ValueError) as error:
        _raise_shortage(error)
        return None
    parent, group = map(int, fields[1:3])
    started = _parse_start(fields)
    return ProcEntry(pid=pid, parent_pid=parent, started_seconds=started, command=command, name=name, group=group)


def is_zombie(proc: Path, pid: int) -> bool:
    """Tell whether the process has ended and nobody, or not all of it, has been taken away."""
    try:
        return _read_stat(proc, pid)[1][0] == "Z"
    except (OSError, ValueError):
        return False


def _is_unchanged(known: ProcEntry, name: str, fields: list[str]) -> bool:
    if name.startswith(_MAY_BE_VLLM) or (known.command == (name,) and known.parent_pid != KERNEL_THREADS):
        return False
    was = (known.name, known.parent_pid, known.group, known.started_seconds)
    return was == (name, int(fields[1]), int(fields[2]), _parse_start(fields))


def has_kernel_threads(entries: Mapping[int, ProcEntry]) -> bool:
    """Tell whether the children of pid 2 never become anything else: in a container it is a process like any other."""
    parent = entries.get(KERNEL_THREADS)
    return parent is not None and parent.name == "kthreadd" and parent.command == ("kthreadd",)


def read_command(proc: Path, pid: int) -> tuple[str, ...]:
    """Return the process's whole command line, empty when it has gone."""
    try:
        return _split_arguments(read_content(proc / str(pid) / "cmdline"))
    except OSError:
        return ()


def read_usage(proc: Path, process: ProcEntry) -> tuple[int, float] | None:
    """Return the process's resident bytes and CPU seconds, or None when it has gone or another has got its pid.

    A process that is exiting has no memory left and counts as gone. Raises OSError where that cannot be told.
    """
    try:
        pages = int(read_start(f"{proc}/{process.pid}/statm").split()[1])
        _, fields = _read_stat(proc, process.pid)  # after statm: the same process still being there vouches for both
    except (OSError, ValueError, IndexError) as error:
        _raise_shortage(error)
        return None
    same = fields[0] != "Z" and _parse_start(fields) == process.started_seconds
    ticks = int(fields[11]) + int(fields[12])  # in user mode and in the kernel, of all threads
    return (pages * _PAGE_BYTES, ticks / _TICKS_PER_SECOND) if same and pages else None


def _raise_shortage(error: Exception) -> None:
    """Raise the error if it is no answer to what was asked of a process."""
    if isinstance(error, OSError) and error.errno in SHORTAGES:
        raise error


def _read_stat(proc: Path, pid: int) -> tuple[str, list[str]]:
    """Return the name and the fields after it, of which proc(5) calls the first one 3; a name may hold any byte."""
    text = read_start(f"{proc}/{pid}/stat").decode(errors="replace")
    name, _, rest = text.partition("(")[2].rpartition(") ")
    fields = rest.split(maxsplit=20)
    if len(fields) < 20:  # noqa: PLR2004 - up to field 22, the start time
        raise ValueError(f"the stat of process {pid} is cut short")
    return name, fields


def read_start(path: str) -> bytes:
    """Read without Path or buffer, or raise OSError: a host may have 10,000 processes, each three calls so."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, _START_BYTES)
    finally:
        os.close(descriptor)


def _split_arguments(arguments: bytes) -> tuple[str, ...]:
    told = arguments.rstrip(b"\0").decode(errors="replace")
    return tuple(told.split("\0")) if told else ()


def _parse_start(fields: list[str]) -> float:
    return int(fields[19]) / _TICKS_PER_SECOND


def has_host_pids(proc: Path) -> bool:
    """Tell whether this process is known to be in the machine's first PID namespace."""
    try:
        return str((proc / "self" / "ns" / "pid").readlink()) == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def has_same_network(proc: Path, pid: int) -> bool:
    """Tell whether a process is not known to be in another network namespace than this one.

    Each namespace has a tree of its own below /proc/PID/net, whose inode shows to everybody; ns/net does not.
    """
    try:
        return (proc / str(pid) / "net" / "stat").samefile(proc / "self" / "net" / "stat")
    except OSError:
        return True


def read_own_pid(proc: Path) -> int:
    """Return the pid under which `proc` shows this process; raise OSError where it does not."""
    return int((proc / "self").readlink().name)
