"""A /proc of one's own making, in a folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

BOOT_SECONDS: Final = 1_700_000_000
HOST: Final = "pid:[4026531836]"
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
TICKS: Final = os.sysconf("SC_CLK_TCK")


class ProcTree:
    """Starts with pid 1 and, as `self`, with `own_pid`."""

    def __init__(self, path: Path, *, own_pid: int = 9999, namespace: str = HOST) -> None:
        self.path = path
        (path / "stat").write_text(f"cpu  1 2 3\nintr 9 0 0\nctxt 5\nbtime {BOOT_SECONDS}\nprocesses 7\n")
        self.add(1, 0, "/sbin/init")
        self.add(own_pid, 1, "python", "/usr/bin/vllm-headroom", "run")
        (path / "self").symlink_to(str(own_pid))
        (path / "self" / "ns").mkdir()
        (path / "self" / "ns" / "pid").symlink_to(namespace)

    def add(
        self,
        pid: int,
        parent_pid: int,
        *command: str,
        name: str | None = None,
        state: str = "S",
        started_ticks: int = 5000,
        rss_pages: int = 10,
        cpu_ticks: tuple[int, int] = (603, 287),
        group: int = 1,
    ) -> None:
        """Write the files of a process, in place of those of an earlier one with this pid."""
        folder = self.path / str(pid)
        folder.mkdir(exist_ok=True)
        comm = (name if name is not None else Path(command[0]).name)[:15]
        user, kernel = cpu_ticks
        leading_fields = (
            f"{parent_pid} {group} {group} 0 -1 4194560 183191 125266 260 20 {user} {kernel} 560 178 20 0 9 0"
        )
        (folder / "stat").write_text(
            f"{pid} ({comm}) {state} {leading_fields} {started_ticks} 1998102528 157408 1844\n"
        )
        (folder / "statm").write_text(f"487818 {rss_pages} 49311 1 0 184404 0\n")
        (folder / "cmdline").write_bytes(b"".join(argument.encode() + b"\0" for argument in command))

    def remove(self, pid: int) -> None:
        """Take a process away."""
        shutil.rmtree(self.path / str(pid))
