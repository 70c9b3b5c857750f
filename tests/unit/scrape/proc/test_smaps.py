"""What a process's mappings report about its growth, of real leaks in C and of hostile files."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.fakes.leaks import build_leaks
from vllm_headroom.scrape.proc.smaps import find_growth, read_mappings

MIB = 2**20
PROC = Path("/proc")


@pytest.fixture(scope="module")
def leaks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_leaks(tmp_path_factory.mktemp("leaks"))


@pytest.fixture
def shared() -> Iterator[Path]:
    path = Path("/dev/shm", f"headroom-test-{uuid4().hex}")  # noqa: S108 - the real one
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("way", "kind"), [("malloc", "heap"), ("mmap", "anonymous mmap"), ("memfd", "memfd"), ("shm", "shm")]
)
def test_a_leak_in_c_is_in_its_kind(leaks: Path, shared: Path, way: str, kind: str) -> None:
    with subprocess.Popen([leaks, way, shared], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        readings = []
        for _ in range(2):  # the first leak also brings in what is used once
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
            readings.append(read_mappings(PROC, process.pid))
        process.stdin.close()

    kinds_before, kinds_after = readings
    assert kinds_before is not None
    assert kinds_after is not None
    name, size = next(iter(find_growth(kinds_before, kinds_after).items()))
    assert name == kind
    assert 15 * MIB <= size + kinds_after.get("swapped out", 0) <= 17 * MIB


def write(folder: Path, text: bytes) -> Path:
    (folder / "7").mkdir(exist_ok=True)
    (folder / "7" / "smaps").write_bytes(text)
    return folder


def test_libraries_have_their_names_and_what_is_swapped_out_is_apart(tmp_path: Path) -> None:
    text = b"".join(
        b"7f00-7f10 rw-p 00000000 08:01 5 %s\nSize:  9 kB\nRss:  %d kB\nSwap:  1 kB\nSwapPss: 1 kB\n" % (name, size)
        for name, size in (
            (b"   /usr/lib/libucs.so.0", 3),
            (b"   /usr/lib/libucs.so.0 (deleted)", 4),
            (b"", 5),
            (b"   [stack]", 6),
            (b"   /x/\xff\xfe", 7),
            (b"   /dev/shm/nccl-9IW2Zf", 8),
            (b"   /dev/shm/psm_12", 9),
        )
    )

    assert read_mappings(write(tmp_path, text), 7) == {
        "libucs.so.0": 7 * 1024,
        "anonymous mmap": 5 * 1024,
        "shm of NCCL": 8 * 1024,
        "shm": 9 * 1024,
        "stack": 6 * 1024,
        "\ufffd\ufffd": 7 * 1024,
        "swapped out": 7 * 1024,
    }


@pytest.mark.parametrize("text", [b"", b"Rss: many kB\n", b"Rss:\n", b"\xff" * 100])
def test_a_file_that_lies_says_nothing(tmp_path: Path, text: bytes) -> None:
    assert read_mappings(write(tmp_path, text), 7) is None
    assert read_mappings(tmp_path, 8) is None


def test_of_many_files_those_beyond_a_thousand_are_one_kind(tmp_path: Path) -> None:
    text = b"".join(b"7f00-7f10 rw-p 00000000 08:01 5 /tmp/%d\nRss: 4 kB\n" % number for number in range(40_000))
    sizes_by_kind = read_mappings(write(tmp_path, text), 7)

    assert sizes_by_kind is not None
    assert (len(sizes_by_kind), sizes_by_kind["other files"], sum(sizes_by_kind.values())) == (
        1001,
        39_000 * 4096,
        40_000 * 4096,
    )


def test_forty_thousand_mappings_are_read_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = b"7f00-7f10 rw-p 00000000 00:00 0\nRss: 4 kB\n" + b"Shared_Clean: 0 kB\n" * 22
    proc = write(tmp_path, mapping * 40_000)
    sizes_by_kind = read_mappings(proc, 7)
    assert sizes_by_kind is None or sizes_by_kind == {"anonymous mmap": 40_000 * 4096}

    ticks = iter(range(100_000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    assert read_mappings(proc, 7) is None
