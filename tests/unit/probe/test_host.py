"""The container's memory, by the files of both versions of cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_headroom_probe.host import read_host


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


V2 = {
    "memory.current": "5000\n",
    "memory.max": "9000\n",
    "memory.stat": "anon 2000\nfile 1500\nkernel 10\nshmem 400\n",
    "memory.events": "low 0\nhigh 0\nmax 12\noom 2\noom_kill 1\noom_group_kill 0\n",
}
V1 = {
    "memory.usage_in_bytes": "5000\n",
    "memory.limit_in_bytes": "9000\n",
    "memory.stat": "cache 1\nshmem 1\ntotal_cache 1500\ntotal_shmem 400\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
}


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/", "sys/fs/cgroup/", V2),
        ("0::/system.slice/vllm.service", "sys/fs/cgroup/system.slice/vllm.service/", V2),
        ("3:cpu:/x\n2:memory:/docker/1\n0::/", "sys/fs/cgroup/memory/docker/1/", V1),
        ("2:memory:/kubepods/pod1/2", "sys/fs/cgroup/memory/", V1),
    ],
    ids=["v2 in a container", "v2 on a machine", "v1 on a machine", "v1 in a container"],
)
def test_what_counts_and_what_the_kernel_takes_back(
    tmp_path: Path, line: str, folder: str, files: dict[str, str]
) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": line + "\n", **{folder + name: text for name, text in files.items()}})

    assert read_host(root)["cgroup"] == {"used": 5000, "limit": 9000, "file": 1100, "oom_kills": 1}


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/", "sys/fs/cgroup/", V2 | {"memory.max": "max\n"}),
        ("2:memory:/", "sys/fs/cgroup/memory/", V1 | {"memory.limit_in_bytes": "9223372036854771712\n"}),
    ],
)
def test_no_limit_is_no_number(tmp_path: Path, line: str, folder: str, files: dict[str, str]) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": line + "\n", **{folder + name: text for name, text in files.items()}})

    assert read_host(root)["cgroup"]["limit"] is None


def test_the_root_cgroup_has_no_memory_of_its_own(tmp_path: Path) -> None:
    assert read_host(tree(tmp_path, {"proc/self/cgroup": "0::/\n"})) == {"cgroup": None, "shm": None}


def test_files_that_are_missing_are_unknown(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.current": "5\n"})

    assert read_host(root)["cgroup"] == {"used": 5, "limit": None, "file": None, "oom_kills": None}


def test_shared_memory_is_what_statvfs_says() -> None:
    reported, file_system = read_host()["shm"], os.statvfs("/dev/shm")  # noqa: S108

    assert reported["limit"] == file_system.f_blocks * file_system.f_frsize
    assert 0 <= reported["used"] <= reported["limit"]
