"""Cgroups with a limit on memory: real ones where this machine gives them out, and a tree of files elsewhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from uuid import uuid4

import pytest

V1: Final = Path("/sys/fs/cgroup/memory")
V2: Final = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited(limit_bytes: int, name: str = "") -> Iterator[Path]:
    """Make a cgroup with this limit for as long as the block runs; skip the test where that is not allowed.

    What is in it at the end is killed. `name` distinguishes several of one test.
    """
    top, limit = (V1, "memory.limit_in_bytes") if (V1 / "memory.limit_in_bytes").exists() else (V2, "memory.max")
    folder = top / f"headroom-test-{uuid4()}{name}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"this machine gives out no cgroup with a limit on memory: {error.strerror}")
    try:
        yield folder
    finally:
        remove(folder)


def leave(folder: Path, room_bytes: int) -> None:
    """Let a cgroup of version 1 take so much more than it holds now and the kernel cannot take back."""
    counted = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    held_bytes = int((folder / "memory.usage_in_bytes").read_text())
    held_bytes -= int(counted["total_active_file"]) + int(counted["total_inactive_file"])
    (folder / "memory.limit_in_bytes").write_text(str(held_bytes + room_bytes))


def remove(folder: Path) -> None:
    """End what is in a cgroup and take it away; the kernel takes a moment to let go of a process."""
    while folder.exists():
        with contextlib.suppress(OSError, ProcessLookupError):
            for pid in (folder / "cgroup.procs").read_text().split():
                os.kill(int(pid), 9)
        with contextlib.suppress(OSError):
            folder.rmdir()


class V2Tree:
    """The files of cgroup version 2 in a folder, mounted there as the mountinfo of a /proc of one's own says."""

    def __init__(self, path: Path, proc: Path, *, root: str = "/") -> None:
        self.path = path
        path.mkdir()
        line = f"30 24 0:26 {root} {path} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
        root_mount = "22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/root rw\n"
        (proc / "self" / "mountinfo").write_text(root_mount + line)
        self._proc = proc

    def add(
        self,
        name: str,
        *,
        pids: tuple[int, ...] = (),
        limit: int | None = None,
        used: int = 0,
        file: int = 0,
        shmem: int = 0,
        slab: int = 0,
        kills: int = 0,
    ) -> Path:
        """Write the files of a cgroup, and let its processes say that they are in it; `file` is what files take."""
        folder = self.path / name
        folder.mkdir(parents=True, exist_ok=True)
        anonymous = used - file - shmem - slab
        (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
        (folder / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.events").write_text(f"low 0\nhigh 0\nmax 9\noom 1\noom_kill {kills}\noom_group_kill 0\n")
        (folder / "memory.stat").write_text(
            f"anon {anonymous}\nfile {file + shmem}\nkernel {slab}\nshmem {shmem}\ninactive_anon {anonymous + shmem}\n"
            f"active_anon 0\ninactive_file {file // 4}\nactive_file {file - file // 4}\nunevictable 0\n"
            f"slab_reclaimable {slab}\nslab_unreclaimable 0\n"
        )
        for pid in pids:
            (self._proc / str(pid) / "cgroup").write_text(f"0::/{name}\n")
        return folder
