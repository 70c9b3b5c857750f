"""What /proc shows of the machine, and a real /dev/shm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from tests.fakes.proc_tree import ProcTree
from vllm_headroom.model import MachineMemory
from vllm_headroom.scrape.proc.host import (
    read_cpu_pressure,
    read_free_blocks,
    read_host,
    read_machine,
    read_process_parts,
    read_shm,
)

PROC = Path("/proc")
SHM = Path("/dev/shm")  # noqa: S108 - the real one
MIB = 2**20
MEMINFO = """\
MemTotal:       125000000 kB
MemFree:          1000000 kB
MemAvailable:    70000000 kB
Buffers:            38336 kB
SwapTotal:       16000000 kB
SwapFree:        15000000 kB
HugePages_Total:       0
"""


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    tree = ProcTree(tmp_path)
    tree.add(20, 1, "vllm", "serve")
    return tree


def test_the_machine_tells_what_is_available_its_swap_and_its_kills(tree: ProcTree) -> None:
    (tree.path / "meminfo").write_text(MEMINFO)
    (tree.path / "vmstat").write_text("nr_free_pages 244\noom_kill 3\n")

    assert read_machine(tree.path) == MachineMemory(
        total_bytes=125_000_000 * 1024,
        available_bytes=70_000_000 * 1024,
        swap_bytes=16_000_000 * 1024,
        swap_free_bytes=15_000_000 * 1024,
        oom_kills=3,
    )


@pytest.mark.parametrize("text", ["", "MemTotal: 5 kB\n", "MemTotal: 5 kB\nMemAvailable: much kB\n"])
def test_a_machine_that_does_not_tell_is_unknown(tree: ProcTree, text: str) -> None:
    assert read_machine(tree.path) is None
    (tree.path / "meminfo").write_text(text)
    assert read_machine(tree.path) is None


def test_kills_that_the_kernel_does_not_count_are_unknown(tree: ProcTree) -> None:
    (tree.path / "meminfo").write_text(MEMINFO)

    machine = read_machine(tree.path)

    assert machine is not None
    assert machine.oom_kills is None


@pytest.mark.parametrize(
    ("text", "pressure"),
    [
        (
            "some avg10=2.04 avg60=75.00 avg300=1.40 total=157656722\nfull avg10=0.00 avg60=9.00 avg300=0.00 total=0\n",
            0.75,
        ),
        ("some avg10=0.00\n", None),
        ("some avg60=?\n", None),
        (None, None),
    ],
)
def test_the_share_of_a_minute_in_which_a_task_waited_for_a_cpu(
    tree: ProcTree, text: str | None, pressure: float | None
) -> None:
    (tree.path / "pressure").mkdir()
    if text is not None:
        (tree.path / "pressure" / "cpu").write_text(text)

    assert read_cpu_pressure(tree.path) == pressure


def test_free_memory_in_blocks_of_2_mib_is_that_of_the_higher_orders(tree: ProcTree) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    below, above = (2 * MIB // page).bit_length() - 2, (2 * MIB // page).bit_length() - 1
    counts = [9] * (below + 1) + [3, 2]
    line = "Node 0, zone   Normal " + " ".join(map(str, counts))
    (tree.path / "buddyinfo").write_text(f"Node 0, zone      DMA {' '.join(['0'] * len(counts))}\n{line}\n")

    assert read_free_blocks(tree.path) == 3 * (page << above) + 2 * (page << (above + 1)) == 14 * MIB


@pytest.mark.parametrize("text", [None, "", "Node 0, zone Normal many\n"])
def test_without_free_lists_the_free_blocks_are_unknown(tree: ProcTree, text: str | None) -> None:
    if text is not None:
        (tree.path / "buddyinfo").write_text(text)

    assert read_free_blocks(tree.path) is None


@pytest.mark.parametrize(
    ("text", "ratio"), [("some avg10=12.50 avg60=1.00\nfull avg10=3.00", 0.125), ("some avg10=nan", None)]
)
def test_the_pressure_on_memory_is_that_of_the_last_ten_seconds(tree: ProcTree, text: str, ratio: float | None) -> None:
    (tree.path / "meminfo").write_text(MEMINFO)
    (tree.path / "pressure").mkdir()
    (tree.path / "pressure" / "memory").write_text(text)

    machine = read_machine(tree.path)

    assert machine is not None
    assert machine.pressure_ratio == ratio


def test_this_machine_is_read() -> None:
    machine = read_machine(PROC)

    assert machine is not None
    assert 0 < machine.available_bytes < machine.total_bytes
    assert machine.oom_kills is not None


def test_the_real_shared_memory_of_a_process_is_seen_to_fill() -> None:
    file = SHM / f"headroom-test-{uuid4()}"
    shm_before = read_host(PROC, os.getpid()).shm
    try:
        file.write_bytes(b"x" * (8 * MIB))
        shm_after = read_host(PROC, os.getpid()).shm
    finally:
        file.unlink()

    assert shm_before is not None
    assert shm_after is not None
    assert shm_after.total_bytes == shm_before.total_bytes
    assert shm_after.used_bytes >= 8 * MIB


def test_a_shared_memory_of_its_own_is_read_through_the_processs_root(tree: ProcTree, tmp_path: Path) -> None:
    """Its size is that of the file system below the root that /proc shows, whatever this process has."""
    own = tmp_path / "own" / "dev" / "shm"
    own.mkdir(parents=True)
    (tree.path / "20" / "root").symlink_to(tmp_path / "own")

    assert read_host(tree.path, 20).shm == read_shm(own) != read_shm(SHM)


@pytest.mark.parametrize(("device", "same"), [("{}:{}", True), ("0:9999", False)])
def test_where_its_root_is_closed_the_same_device_is_the_same_shared_memory(
    tree: ProcTree,
    device: str,
    same: bool,  # noqa: FBT001 - a case's expectation
) -> None:
    here = SHM.stat().st_dev
    number = device.format(os.major(here), os.minor(here))
    (tree.path / "20" / "mountinfo").write_text(f"25 24 {number} / /dev/shm rw,relatime - tmpfs tmpfs rw\n")

    assert (read_host(tree.path, 20).shm is not None) is same


@pytest.mark.parametrize("mark", ["\u2028", "\u0085", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r"])
def test_a_mount_point_may_have_what_is_a_line_elsewhere_in_its_name(tree: ProcTree, mark: str) -> None:
    here = SHM.stat().st_dev
    own = f"25 24 {os.major(here)}:{os.minor(here)} / /dev/shm rw,relatime - tmpfs tmpfs rw\n"
    hostile = f"26 24 0:99 / /a{mark}b{mark}c rw,relatime - tmpfs tmpfs rw\nshort\n\n"
    (tree.path / "20" / "mountinfo").write_bytes((own + hostile).encode())

    assert read_host(tree.path, 20).shm is not None


def test_no_process_has_no_container_and_no_shared_memory(tree: ProcTree) -> None:
    (tree.path / "meminfo").write_text(MEMINFO)

    host = read_host(tree.path, None)

    assert (host.cgroup, host.shm) == (None, None)
    assert host.machine is not None


def test_a_real_process_that_maps_a_file_holds_nothing_of_it(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(b"w" * (32 * MIB))
    program = (
        "import mmap, sys; held = b'x' * (16 * 2**20); file = open(sys.argv[1], 'rb');"
        " mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ); sum(mapped[::4096]);"
        " shared = mmap.mmap(-1, 8 * 2**20); shared.write(b's' * (8 * 2**20));"
        " print('mapped', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program, str(weights)], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        parts = read_process_parts(PROC, process.pid)
        process.kill()

    assert parts["file_bytes"] >= 32 * MIB
    assert 16 * MIB <= parts["anonymous_bytes"] < 40 * MIB
    assert 8 * MIB <= parts["shared_bytes"] < 9 * MIB


def test_a_kernel_that_does_not_tell_the_parts_leaves_them_unknown(tree: ProcTree) -> None:
    assert read_process_parts(tree.path, 20) == {}
    (tree.path / "20" / "status").write_text("Name:\tvllm\nVmRSS:\t  40 kB\nVmSwap:\tmany kB\n")
    assert read_process_parts(tree.path, 20) == {}
    status = "Name:\tvllm\nRssAnon:\t 40 kB\nRssFile:\t 8 kB\nRssShmem:\t 3 kB\nVmSwap:\t 7 kB\n"
    (tree.path / "20" / "status").write_text(status)
    parts = read_process_parts(tree.path, 20)
    assert parts == {"anonymous_bytes": 40960, "file_bytes": 8192, "shared_bytes": 3072, "swap_bytes": 7168}
