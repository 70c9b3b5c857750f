"""Read the files in /proc, without keeping state between reads."""

import os
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.scrape.proc.servers import CommandLine, find_role
from vllm_headroom.scrape.shortage import SHORTAGES
from vllm_headroom.vocabulary import Role

_START_BYTES: Final = 4096
"""The maximum number of bytes that `read_start` reads. A command line may be megabytes long. This
maximum is enough for a program and its first arguments, and for any stat or /sys file.
"""

KIB: Final = 1024
"""The unit of sizes in /proc, in bytes."""

_CHUNK_BYTES: Final = 2**16

_TITLED_PREFIXES: Final = ("python", "pypy", "vllm", "VLLM::", "ray::")
"""The name prefixes of processes that may set a title. A title changes the command line, but not
always the name.
"""

KTHREADD_PID: Final = 2
"""The parent of all kernel threads, which have no command line. Any other process has a command
line, except for a moment during exec.
"""

_FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"
"""The inode of the machine's initial PID namespace (Linux include/linux/proc_ns.h:
PROC_PID_INIT_INO).
"""

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")

ZOMBIE_STATE: Final = "Z"

_MOST_DIGITS: Final = 20
"""The number of digits of the largest 64-bit number. Python refuses to convert more than 4,300
digits.
"""

_STAT_FIELDS: Final = 20
"""The number of fields in stat between the name and the start time (inclusive)."""

ProcIdentity = tuple[int, float]
"""A process's pid and its start time in seconds since boot. The start time is needed because the
kernel reuses pids.
"""


class ProcEntry(Struct, frozen=True, kw_only=True, dict=True):
    """A process in /proc."""

    pid: int
    parent_pid: int
    started_seconds: float
    """When the process started, in seconds since boot."""
    command: CommandLine = ()
    """The process's command line or the title that replaces it. Without a command line, the name.
    """
    name: str = ""
    """The process's name, which the kernel truncates to 15 characters."""
    group: int = 0
    """The process group."""

    @property
    def identity(self) -> ProcIdentity:
        """Return the identity of the process among all processes since boot."""
        return self.pid, self.started_seconds

    @property
    def family(self) -> tuple[int, int]:
        """Return the parent and the process group, which all roots of an engine share.

        The parent of an orphan is init.
        """
        return self.parent_pid, self.group

    @cached_property
    def role(self) -> Role | None:
        """Return the process's role in an engine, or None if it has none.

        The result is cached, because every process is checked whenever any process changes.
        """
        return find_role(self.command)


ProcEntries = Mapping[int, ProcEntry]
"""Processes by pid."""


class ProcStat(Struct, frozen=True, kw_only=True):
    """The content of a process's stat file."""

    process: ProcEntry
    """The process, without its command line."""
    state: str
    """The kernel's letter for the state: R, S, D, Z and others."""
    cpu_seconds: float
    """The user and system time of all the process's threads."""


class ProcUsage(Struct, frozen=True, kw_only=True):
    """The CPU time and memory that a process uses."""

    rss_bytes: int
    cpu_seconds: float
    state: str


def read_content(file: Path | str, max_bytes: int | None = None) -> bytes:
    """Return a file's content, or its first `max_bytes`.

    Python's buffers are not used, because they cost time. A host may have 10,000 processes. Raises
    OSError if the file cannot be read.
    """
    descriptor = os.open(file, os.O_RDONLY)
    try:
        if max_bytes is not None:
            return os.read(descriptor, max_bytes)
        return b"".join(iter(partial(os.read, descriptor, _CHUNK_BYTES), b""))
    finally:
        os.close(descriptor)


def split_kernel_lines(text: str) -> list[str]:
    """Return the lines of a file written by the kernel, without the trailing line feeds.

    `str.splitlines` is not used, because it also splits at characters such as U+2028 or a vertical
    tab. A mount point's name may contain these characters.
    """
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return lines


def read_start(path: str) -> bytes:
    """Return the first 4 KiB of a file; raise OSError if it cannot be read."""
    return read_content(path, _START_BYTES)


def find_number(text: bytes, name: bytes) -> int | None:
    """Return the number in the first line that begins with `name`.

    `name` includes the separator. Returns None if no line begins with `name` or no number follows.
    """
    _, _, following = (b"\n" + text).partition(b"\n" + name)
    words = following.split(maxsplit=1)
    return parse_digits(words[0]) if words else None


def parse_digits(text: str | bytes) -> int | None:
    """Return the number represented by a string of digits, or None for any other text.

    Also returns None if there are more digits than the kernel writes.
    """
    is_number = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return int(text) if is_number else None


def read_integer(text: str | bytes) -> int:
    """Return an integer that the kernel may have written; raise ValueError for any other text.

    Numbers with more digits are refused, because converting them to a float would raise
    OverflowError.
    """
    # A minus sign may precede the digits.
    if len(text.strip()) > _MOST_DIGITS + 1:
        raise ValueError("the number has too many digits")
    return int(text)


def list_pids(proc: Path) -> frozenset[int]:
    """Return every visible pid; raise OSError if there is no /proc."""
    names = os.listdir(proc)  # noqa: PTH208 - no Path per process
    return frozenset(int(name) for name in names if name.isdecimal())


def read_own_pid(proc: Path) -> int:
    """Return this process's pid in `proc`; raise OSError if `proc` does not show it."""
    return int((proc / "self").readlink().name)


def read_entry(
    proc: Path, pid: int, previous: ProcEntry | None = None, *, is_engine: bool = False
) -> ProcEntry | None:
    """Return the process, or None if it has exited or is a zombie.

    `previous` is the last result for this pid. The previous result is returned again if neither the
    process nor its command line can have changed. Also returns None if the process cannot be read
    for another reason. However, a failed reading raises OSError if the daemon lacks a resource. For
    a process of the engine (`is_engine`), any failed reading raises OSError. After an OSError, the
    process may still be running.
    """
    try:
        stat = _read_stat(proc, pid)
        if stat.state == ZOMBIE_STATE:
            return None
        # Returning `previous` is the fast path. The command line is read again only if it may have
        # changed.
        if previous is not None and _is_unchanged(stat.process, previous):
            return previous
        arguments = _split_arguments(read_start(f"{proc}/{pid}/cmdline"))
        return replace(stat.process, command=arguments or (stat.process.name,))
    except (OSError, ValueError) as error:
        _raise_if_unknown(error, is_engine=is_engine)
        return None


def _is_unchanged(process: ProcEntry, previous: ProcEntry) -> bool:
    """Return whether this is certainly the same process with the same command line."""
    if process.name != previous.name or process.identity != previous.identity:
        return False
    if process.family != previous.family:
        return False
    # A process without a command line is a kernel thread or was in exec.
    was_in_exec = previous.command == (previous.name,) and previous.parent_pid != KTHREADD_PID
    return not was_in_exec and not previous.name.startswith(_TITLED_PREFIXES)


def read_state(proc: Path, pid: int) -> str | None:
    """Return the letter of the process's state (see proc(5)).

    The result is empty if the stat file cannot be read for another reason. Returns None if the
    process no longer exists.
    """
    try:
        return _read_stat(proc, pid).state
    except (FileNotFoundError, ProcessLookupError):
        return None
    except (OSError, ValueError):
        return ""


def read_command(proc: Path, pid: int) -> CommandLine:
    """Return the process's entire command line.

    Returns () if it cannot be read, as after an exit.
    """
    try:
        return _split_arguments(read_content(f"{proc}/{pid}/cmdline"))
    except OSError:
        return ()


def read_usage(proc: Path, process: ProcEntry) -> ProcUsage | None:
    """Return the resources that a process uses.

    Returns None if the process has exited or its pid was reused. Raises OSError if it is unknown
    whether the process still exists.
    """
    try:
        memory_pages = read_start(f"{proc}/{process.pid}/statm").split()
        resident_pages = read_integer(memory_pages[1])
        # stat is read after statm. If stat belongs to the same process, so does statm.
        stat = _read_stat(proc, process.pid)
    except (OSError, ValueError, IndexError) as error:
        _raise_if_unknown(error, is_engine=True)
        return None
    if stat.process.identity != process.identity:
        return None
    return ProcUsage(
        rss_bytes=resident_pages * _PAGE_BYTES, cpu_seconds=stat.cpu_seconds, state=stat.state
    )


def _read_stat(proc: Path, pid: int) -> ProcStat:
    """Read a process's stat file (see proc(5)).

    Raises OSError if the file cannot be read. Raises ValueError if the file is incomplete or has an
    unexpected number.
    """
    text = read_start(f"{proc}/{pid}/stat").decode(errors="replace")
    # The name is enclosed in parentheses and may contain any byte, even parentheses.
    _, _, name_and_fields = text.partition("(")
    name, _, following = name_and_fields.rpartition(") ")
    # proc(5) numbers the fields from 1. The first field after the name is field 3, the state.
    fields = following.split(maxsplit=20)
    if len(fields) < _STAT_FIELDS:
        raise ValueError(f"the stat file of process {pid} is incomplete")
    user_ticks = read_integer(fields[11])
    system_ticks = read_integer(fields[12])
    process = ProcEntry(
        pid=pid,
        parent_pid=read_integer(fields[1]),
        started_seconds=read_integer(fields[19]) / _TICKS_PER_SECOND,
        name=name,
        group=read_integer(fields[2]),
    )
    return ProcStat(
        process=process,
        state=fields[0],
        cpu_seconds=(user_ticks + system_ticks) / _TICKS_PER_SECOND,
    )


def _raise_if_unknown(error: Exception, *, is_engine: bool) -> None:
    """Raise `error` if it leaves open whether the process has exited; otherwise do nothing.

    The question stays open if the daemon itself has run out of a resource. For a process of the
    engine, it also stays open after every OSError, except after one for a process that no longer
    exists.
    """
    if not isinstance(error, OSError):
        return
    is_absent = isinstance(error, FileNotFoundError | ProcessLookupError)
    if error.errno in SHORTAGES or (is_engine and not is_absent):
        raise error


def _split_arguments(arguments: bytes) -> CommandLine:
    """Return the arguments in a cmdline file's content, or () if it is empty."""
    text = arguments.rstrip(b"\0").decode(errors="replace")
    return tuple(text.split("\0")) if text else ()


def has_host_pids(proc: Path) -> bool:
    """Return whether this process is known to be in the machine's initial PID namespace."""
    try:
        namespace = (proc / "self" / "ns" / "pid").readlink()
    except OSError:
        return False
    return str(namespace) == _FIRST_PID_NAMESPACE


def has_same_network(proc: Path, pid: int, *, default: bool = True) -> bool:
    """Return whether a process is in this process's network namespace.

    The inodes of net/stat are compared, because all users can read them, unlike ns/net. Returns
    `default` if the inodes are unknown.
    """
    try:
        return os.path.samefile(f"{proc}/{pid}/net/stat", f"{proc}/self/net/stat")  # noqa: PTH121
    except OSError:
        return default
