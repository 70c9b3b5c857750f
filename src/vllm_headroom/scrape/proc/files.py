"""Read the files of one /proc, with no state between two reads."""

import os
from functools import cached_property, partial
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.scrape.proc.servers import find_role
from vllm_headroom.scrape.shortage import SHORTAGES
from vllm_headroom.vocabulary import Role

_START_BYTES: Final = 4096
"""Holds a program and its first arguments, where a command line may be megabytes; a stat or a /sys file has less."""

_MAY_BE_VLLM: Final = ("python", "pypy", "vllm", "VLLM::", "ray::")
"""Prefixes of the names of processes whose command line can become or change within vLLM's without a new name."""

KERNEL_THREADS: Final = 2
"""Their parent; they have no command line. Other processes have none only during exec, which sets the name first."""

_FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"
"""The machine's first PID namespace has a fixed inode (Linux include/linux/proc_ns.h: PROC_PID_INIT_INO)."""

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


class ProcEntry(Struct, frozen=True, kw_only=True, dict=True):
    """One process: `command` is its command line or, where it has none, its name cut to 15 characters.

    A process title replaces the command line. pid and `started_seconds` (since boot) together identify the process;
    the kernel reuses pids. `group` is the process group.
    """

    pid: int
    parent_pid: int
    started_seconds: float
    command: tuple[str, ...] = ()
    name: str = ""
    group: int = 0

    @property
    def display_name(self) -> tuple[int, float]:
        """What identifies it among all processes since boot."""
        return self.pid, self.started_seconds

    @property
    def family(self) -> tuple[int, int]:
        """What the roots of one engine share: their parent (init for orphans) and process group."""
        return self.parent_pid, self.group

    @cached_property
    def role(self) -> Role | None:
        """Its role in an engine, by its command line alone; cached, since every process is checked at each change."""
        return find_role(self.command)


def read_content(file: Path | str, most_bytes: int | None = None) -> bytes:
    """Return a kernel file's content or start, without a buffer (a host may have 10,000 processes); raise OSError."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        if most_bytes is not None:
            return os.read(descriptor, most_bytes)
        return b"".join(iter(partial(os.read, descriptor, 2**16), b""))
    finally:
        os.close(descriptor)


def find_number(text: bytes, name: bytes) -> int | None:
    """Return the number after a name (with its separator) at the start of a line; None without one."""
    _, _, rest = (b"\n" + text).partition(b"\n" + name)
    words = rest.split(maxsplit=1)
    return int(words[0]) if words and words[0].isdigit() else None


def list_pids(proc: Path) -> frozenset[int]:
    """Return every visible pid; raise OSError where there is no /proc."""
    return frozenset(int(name) for name in os.listdir(proc) if name.isdecimal())  # noqa: PTH208 - no Path per process


def _read_stat(proc: Path, pid: int) -> tuple[ProcEntry, str, float]:
    """Return the process without command line, its state and all threads' CPU seconds; raise OSError or ValueError."""
    text = read_start(f"{proc}/{pid}/stat").decode(errors="replace")
    name, _, rest = text.partition("(")[2].rpartition(") ")  # the name may hold any byte
    fields = rest.split(
        maxsplit=20
    )  # from field 3 of proc(5), the state, up to field 22, the start time
    parent_pid, group, user, system, started = (
        int(field) for field in (*fields[1:3], *fields[11:13], *fields[19:20])
    )
    started_seconds = started / _TICKS_PER_SECOND
    process = ProcEntry(
        pid=pid, parent_pid=parent_pid, started_seconds=started_seconds, name=name, group=group
    )
    return process, fields[0], (user + system) / _TICKS_PER_SECOND


def read_entry(
    proc: Path, pid: int, known: ProcEntry | None = None, *, is_engine: bool = False
) -> ProcEntry | None:
    """Return the process, or None when it has exited or is a zombie; raise OSError where that is unknown.

    `known`, the last result, is returned again where name, parent, group and start are the same. Only for names that
    can keep their name across a new command line is the command line read again.
    """
    try:
        process, state, _ = _read_stat(proc, pid)
        if state == "Z":
            return None
        if known is not None and (process.name, process.display_name, process.family) == (
            known.name,
            known.display_name,
            known.family,
        ):
            is_bare = known.command == (known.name,) and known.parent_pid != KERNEL_THREADS
            if not (is_bare or known.name.startswith(_MAY_BE_VLLM)):
                return known
        return replace(
            process,
            command=_split_arguments(read_start(f"{proc}/{pid}/cmdline")) or (process.name,),
        )
    except (OSError, ValueError) as error:
        _raise_failure(error, is_engine=is_engine)
        return None


def is_zombie(proc: Path, pid: int) -> bool:
    """Return whether the process has exited and its parent has not reaped it."""
    try:
        return _read_stat(proc, pid)[1] == "Z"
    except (OSError, ValueError):
        return False


def read_command(proc: Path, pid: int) -> tuple[str, ...]:
    """Return the process's whole command line, empty when it has exited."""
    try:
        return _split_arguments(read_content(proc / str(pid) / "cmdline"))
    except OSError:
        return ()


def read_usage(proc: Path, process: ProcEntry) -> tuple[int, float, str] | None:
    """Return the process's resident bytes, CPU seconds and state; None when it has exited or its pid was reused.

    A process that is exiting has no memory left and counts as exited. Raises OSError where that is unknown.
    """
    try:
        pages = int(read_start(f"{proc}/{process.pid}/statm").split()[1])
        now, state, cpu_seconds = _read_stat(
            proc, process.pid
        )  # after statm: if it is the same, it vouches for both
    except (OSError, ValueError, IndexError) as error:
        _raise_failure(error, is_engine=True)
        return None
    is_same = state != "Z" and now.display_name == process.display_name
    return (pages * _PAGE_BYTES, cpu_seconds, state) if is_same and pages else None


def _raise_failure(error: Exception, *, is_engine: bool) -> None:
    """Raise the error if it says nothing about the process: a shortage here or, of the engine, all but absence."""
    is_absent = isinstance(error, FileNotFoundError | ProcessLookupError) or not is_engine
    if isinstance(error, OSError) and (error.errno in SHORTAGES or not is_absent):
        raise error


def read_start(path: str) -> bytes:
    """Return the start of a file; raise OSError."""
    return read_content(path, _START_BYTES)


def _split_arguments(arguments: bytes) -> tuple[str, ...]:
    text = arguments.rstrip(b"\0").decode(errors="replace")
    return tuple(text.split("\0")) if text else ()


def has_host_pids(proc: Path) -> bool:
    """Return whether this process is known to be in the machine's first PID namespace."""
    try:
        return str((proc / "self" / "ns" / "pid").readlink()) == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def has_same_network(proc: Path, pid: int, *, otherwise: bool = True) -> bool:
    """Return whether a process is in this network namespace, by an inode that, unlike ns/net, all can read."""
    try:
        return (proc / str(pid) / "net" / "stat").samefile(proc / "self" / "net" / "stat")
    except OSError:
        return otherwise


def read_own_pid(proc: Path) -> int:
    """Return the pid under which `proc` shows this process; raise OSError where it does not."""
    return int((proc / "self").readlink().name)
