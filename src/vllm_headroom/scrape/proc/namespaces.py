"""Which namespaces this process and another are in, and by what pid it is known there."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"
"""The machine's first PID namespace has a fixed inode (Linux include/linux/proc_ns.h: PROC_PID_INIT_INO)."""


def sees_host_pids(proc: Path) -> bool:
    """Tell whether this process is known to be in the machine's first PID namespace."""
    try:
        return str((proc / "self" / "ns" / "pid").readlink()) == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def shares_network(proc: Path, pid: int) -> bool:
    """Tell whether a process is not known to be in another network namespace than this one.

    Each namespace has a tree of its own below /proc/PID/net, whose inode shows to everybody; ns/net does not.
    """
    try:
        return (proc / str(pid) / "net" / "stat").samefile(proc / "self" / "net" / "stat")
    except OSError:
        return True


def own_pid(proc: Path) -> int:
    """Return the pid under which `proc` shows this process; raise OSError where it does not."""
    return int((proc / "self").readlink().name)
