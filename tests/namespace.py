"""A PID namespace for the tests, in which no process shows but theirs: a real vLLM beside them changes nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Final, NoReturn

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
MS_NOSUID_NODEV_NOEXEC: Final = 2 | 4 | 8
MS_REC_PRIVATE: Final = 0x4000 | 0x40000
PR_SET_PDEATHSIG: Final = 1
CAPABILITY_VERSION_3: Final = 0x20080522

LIBC: Final = ctypes.CDLL(None, use_errno=True)


def enter() -> str:
    """Go on in a child in a PID namespace, as root or in a user namespace; return why not, where there is none.

    Three processes wait for the child: this one, the one that left the namespaces, and the first in the new one, which
    reaps orphans as init does. When one of them dies, all processes of the tests are killed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reads, writes = os.pipe()
    if outer := os.fork():
        os.close(writes)
        with os.fdopen(reads) as pipe:
            why = pipe.read()
        return why or _end_with(outer)
    try:
        _unshare()
        if child_pid := os.fork():
            os.close(writes)
            _end_with(child_pid)
        _call(LIBC.prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
        _call(LIBC.mount, b"none", b"/", None, MS_REC_PRIVATE, None)
        _call(LIBC.mount, b"proc", b"/proc", b"proc", MS_NOSUID_NODEV_NOEXEC, None)
        if tests := os.fork():
            os.close(writes)
            _end_with(tests)
        if os.geteuid():
            _call(LIBC.capset, (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())
    except OSError as error:
        os.write(writes, str(error).encode())
        os._exit(1)
    os.close(writes)
    return ""


def _unshare() -> None:
    uid, gid = os.geteuid(), os.getegid()
    _call(LIBC.prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
    _call(LIBC.unshare, CLONE_NEWPID | CLONE_NEWNS | (CLONE_NEWUSER if uid else 0))
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _call(function: ctypes._NamedFuncPointer, *arguments: object) -> None:
    if function(*arguments):
        raise OSError(ctypes.get_errno(), f"{function.__name__}: {os.strerror(ctypes.get_errno())}")


def _end_with(child: int) -> NoReturn:
    """Reap whatever ends until this child does, and end as it did; Ctrl-C is the tests' to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while (ended_child := os.wait())[0] != child:
        pass
    status = os.waitstatus_to_exitcode(ended_child[1])
    os._exit(status if status >= 0 else 128 - status)
