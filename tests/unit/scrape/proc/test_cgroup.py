"""The limit on the engine's memory, by real cgroups where the machine has them and by a tree of files elsewhere."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.fakes.cgroups import V2Tree, limited
from tests.fakes.proc_tree import ProcTree
from tests.fakes.taker import Taker, taking
from vllm_headroom.model import Cgroup
from vllm_headroom.scrape.proc.host import read_cgroup, read_machine

PROC = Path("/proc")
MIB = 2**20
GIB = 2**30
LIMIT = 96 * MIB
CHARGED_AHEAD = 64 * os.sysconf("SC_PAGE_SIZE") * (os.cpu_count() or 1)
"""What the kernel may charge a cgroup before it is used, 64 pages on each CPU, and takes back when others are busy."""

MACHINE = 512 * GIB


def cgroup(taker: Taker) -> Cgroup:
    machine = read_machine(PROC)
    assert machine is not None
    read_group = read_cgroup(PROC, taker.pid, machine_bytes=machine.total_bytes)
    assert read_group is not None
    return read_group


def own(read_group: Cgroup) -> int:
    """Return what cannot be taken back."""
    return read_group.used_bytes - read_group.cache_bytes


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    return tmp_path / "vllm"


def test_a_process_in_a_real_cgroup_is_seen_against_its_limit(vllm: Path) -> None:
    with limited(LIMIT) as folder, taking(folder, vllm) as taker:
        earlier_cgroup = cgroup(taker)
        taker.asked("hold", 40)
        later_cgroup = cgroup(taker)

    assert earlier_cgroup.limit_bytes == later_cgroup.limit_bytes == LIMIT
    assert 40 * MIB - CHARGED_AHEAD <= own(later_cgroup) - own(earlier_cgroup) < 48 * MIB
    assert earlier_cgroup.identity == later_cgroup.identity
    assert later_cgroup.oom_kills == 0


def test_files_of_a_real_process_fill_the_cgroup_and_are_no_pressure(tmp_path: Path, vllm: Path) -> None:
    file = tmp_path / "weights"
    file.touch()
    if subprocess.check_output(["stat", "-f", "-c", "%T", file], text=True).strip() == "tmpfs":
        pytest.skip("files here lie in memory, which no kernel can take back")
    with limited(LIMIT) as folder, taking(folder, vllm, file=file) as taker:
        earlier_cgroup = cgroup(taker)
        taker.asked("fill", 64)  # less than the limit: beyond it the kernel takes back as it likes
        later_cgroup = cgroup(taker)

    assert later_cgroup.used_bytes - earlier_cgroup.used_bytes > 32 * MIB
    assert own(later_cgroup) < own(earlier_cgroup) + 8 * MIB


def test_the_kernel_really_kills_and_its_count_is_read(vllm: Path) -> None:
    with limited(LIMIT) as folder, taking(folder, vllm) as other_taker, taking(folder, vllm) as taker:
        answers = list(iter(lambda: taker.asked("hold", 20), ""))
        taker.process.wait(30)

        assert 1 <= len(answers) <= 4
        assert taker.process.returncode == -9
        assert cgroup(other_taker).oom_kills == 1


@pytest.fixture
def proc(tmp_path: Path) -> ProcTree:
    folder = tmp_path / "proc"
    folder.mkdir()
    tree = ProcTree(folder)
    tree.add(20, 1, "vllm", "serve")
    return tree


@pytest.fixture
def cgroups(tmp_path: Path, proc: ProcTree) -> V2Tree:
    return V2Tree(tmp_path / "cgroup", proc.path)


def read_cgroup_of_engine(proc: ProcTree) -> Cgroup | None:
    return read_cgroup(proc.path, 20, machine_bytes=MACHINE)


def test_version_2_tells_limit_use_and_kills(proc: ProcTree, cgroups: V2Tree) -> None:
    folder = cgroups.add("system.slice/vllm.service", pids=(20,), limit=64 * GIB, used=50 * GIB, file=45 * GIB, kills=2)

    assert read_cgroup_of_engine(proc) == Cgroup(
        identity=f"{folder}:{folder.stat().st_ino}",
        used_bytes=50 * GIB,
        cache_bytes=45 * GIB,
        limit_bytes=64 * GIB,
        oom_kills=2,
    )


def test_shared_memory_counts_and_what_the_kernel_keeps_of_files_does_not(proc: ProcTree, cgroups: V2Tree) -> None:
    cgroups.add("vllm", pids=(20,), limit=64 * GIB, used=60 * GIB, file=20 * GIB, shmem=30 * GIB, slab=4 * GIB)

    engine_group = read_cgroup_of_engine(proc)

    assert engine_group is not None
    assert engine_group.cache_bytes == 24 * GIB


def test_the_lowest_limit_above_a_process_is_the_one_that_counts(proc: ProcTree, cgroups: V2Tree) -> None:
    cgroups.add("pods", limit=200 * GIB, used=90 * GIB)
    cgroups.add("pods/pod7", limit=60 * GIB, used=41 * GIB)
    cgroups.add("pods/pod7/vllm", pids=(20,), used=40 * GIB, kills=1)

    engine_group = read_cgroup_of_engine(proc)

    assert engine_group is not None
    assert (engine_group.limit_bytes, engine_group.used_bytes, engine_group.oom_kills) == (60 * GIB, 41 * GIB, 1)


@pytest.mark.parametrize("limit", [None, MACHINE, 2 * MACHINE])
def test_a_limit_that_the_machine_cannot_reach_is_none(proc: ProcTree, cgroups: V2Tree, limit: int | None) -> None:
    cgroups.add("vllm", pids=(20,), limit=limit, used=40 * GIB)

    engine_group = read_cgroup_of_engine(proc)

    assert engine_group is not None
    assert (engine_group.limit_bytes, engine_group.used_bytes) == (None, 40 * GIB)


def test_what_is_swapped_out_is_read_in_both_versions_and_else_unknown(proc: ProcTree, cgroups: V2Tree) -> None:
    def swapped() -> int | None:
        engine_group = read_cgroup_of_engine(proc)
        assert engine_group is not None
        return engine_group.swap_bytes

    folder = cgroups.add("vllm", pids=(20,), used=3 * GIB)

    assert swapped() is None
    (folder / "memory.stat").write_text("total_swap 4096\n")
    assert swapped() == 4096
    (folder / "memory.swap.current").write_text("8192\n")
    assert swapped() == 8192
    (folder / "memory.swap.current").write_text("a lie\n")
    assert swapped() is None


def test_a_limit_that_fails_to_be_read_is_not_the_absence_of_one(proc: ProcTree, cgroups: V2Tree) -> None:
    folder = cgroups.add("vllm", pids=(20,), limit=64 * GIB, used=3 * GIB)
    (folder / "memory.max").unlink()
    assert (engine_group := read_cgroup_of_engine(proc)) is not None
    assert engine_group.limit_bytes is None
    (folder / "memory.max").mkdir()  # reading it fails, as any file may for lack of descriptors

    assert read_cgroup_of_engine(proc) is None


def test_a_new_container_under_an_old_name_is_another(proc: ProcTree, cgroups: V2Tree, tmp_path: Path) -> None:
    cgroups.add("vllm", pids=(20,)).rename(tmp_path / "gone")
    cgroups.add("vllm", pids=(20,))
    new = read_cgroup_of_engine(proc)
    (cgroups.path / "vllm").rename(tmp_path / "newer")
    (tmp_path / "gone").rename(cgroups.path / "vllm")
    old = read_cgroup_of_engine(proc)

    assert old is not None
    assert new is not None
    assert old.identity != new.identity


def test_a_cgroup_that_another_container_has_is_not_taken_for_a_folder_of_ones_own(
    proc: ProcTree, cgroups: V2Tree
) -> None:
    proc.add(99, 1, "sidecar")
    cgroups.add("vllm", pids=(99,), limit=GIB)  # of the same name, in the tree of this container
    (proc.path / "20" / "cgroup").write_text("0::/vllm\n")
    assert read_cgroup_of_engine(proc) is None

    (proc.path / "20" / "cgroup").write_text("0::/../cri-containerd-7.scope\n")
    assert read_cgroup_of_engine(proc) is None


@pytest.mark.parametrize(
    ("namespaced", "folder"),
    [
        ("/../../../kubepods-burstable.slice/pod7.slice/vllm.scope", "kubepods.slice/kubepods-burstable.slice"),
        ("/../../pod7.slice/vllm.scope", "kubepods.slice/kubepods-besteffort.slice"),
        ("/../../../../other.slice/pod7.slice/vllm.scope", "other.slice"),
        ("/pod7.slice/vllm.scope", "kubepods.slice/kubepods-besteffort.slice/own-pod.slice/own.scope"),
    ],
)
def test_the_cgroup_of_another_pod_is_read_in_the_tree_of_the_node(
    proc: ProcTree, tmp_path: Path, namespaced: str, folder: str
) -> None:
    # The daemon has hostPID, a separate cgroup namespace, and the /sys/fs/cgroup of the node.
    tree = V2Tree(tmp_path / "node", proc.path, root="/../../../..")
    own_folder = "kubepods.slice/kubepods-besteffort.slice/own-pod.slice/own.scope"
    tree.add("system.slice/containerd.service")
    tree.add(own_folder, pids=(9999,))
    engine_folder = tree.add(f"{folder}/pod7.slice/vllm.scope", pids=(20,), used=30 * GIB, kills=1)
    tree.add(f"{folder}/pod7.slice", limit=40 * GIB, used=31 * GIB)
    (proc.path / "20" / "cgroup").write_text(f"0::{namespaced}\n")

    cgroup = read_cgroup_of_engine(proc)

    assert cgroup is not None
    assert cgroup.identity.startswith(str(engine_folder))
    assert (cgroup.used_bytes, cgroup.limit_bytes, cgroup.oom_kills) == (31 * GIB, 40 * GIB, 1)


def test_a_tree_that_does_not_show_the_daemon_names_no_other_pod(proc: ProcTree, tmp_path: Path) -> None:
    tree = V2Tree(tmp_path / "node", proc.path, root="/../..")
    tree.add("pods/pod7/vllm", pids=(20,), used=30 * GIB)
    (proc.path / "20" / "cgroup").write_text("0::/../pod7/vllm\n")
    assert read_cgroup_of_engine(proc) is None

    # Above the mounted tree.
    (proc.path / "20" / "cgroup").write_text("0::/../../../pods/pod7/vllm\n")
    assert read_cgroup_of_engine(proc) is None


def test_nothing_is_said_without_the_tree(proc: ProcTree) -> None:
    assert read_cgroup_of_engine(proc) is None
    (proc.path / "20" / "cgroup").write_text("0::/vllm\n")
    assert read_cgroup_of_engine(proc) is None
    (proc.path / "self" / "mountinfo").write_text("22 1 259:2 / / rw - ext4 /dev/root rw\nno mount\n")
    assert read_cgroup_of_engine(proc) is None


def test_the_mounts_are_not_read_again_for_a_process_because_another_one_is_hidden(
    proc: ProcTree, cgroups: V2Tree
) -> None:
    cgroups.add("system.slice/vllm.service", pids=(20,), used=50 * GIB)
    proc.add(30, 1, "vllm", "serve")
    (proc.path / "30" / "cgroup").write_text("0::/../hidden\n")
    assert read_cgroup_of_engine(proc) is not None
    assert read_cgroup(proc.path, 30, machine_bytes=MACHINE) is None
    (proc.path / "self" / "mountinfo").unlink()

    assert read_cgroup_of_engine(proc) is not None
