from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.proc_tree import ProcTree
from tests.unit.scrape.proc.engines import SERVER
from vllm_headroom.scrape.proc.files import read_entry, read_usage


@contextmanager
def no_descriptor() -> Iterator[None]:
    """Let this process open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_cannot_be_read_for_want_of_descriptors_has_not_gone() -> None:
    proc = Path("/proc")
    entry = read_entry(proc, os.getpid())
    assert entry is not None

    with pytest.raises(OSError, match="Too many open files"), no_descriptor():
        read_entry(proc, os.getpid())
    with pytest.raises(OSError, match="Too many open files"), no_descriptor():
        read_usage(proc, entry)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EIO])
def test_a_process_of_the_engine_that_may_no_longer_be_read_has_not_gone(
    tree: ProcTree, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tree.add(7, 1, *SERVER)
    entry = read_entry(tree.path, 7)
    assert entry is not None

    def refuse(*_: object) -> int:
        raise OSError(number, "refused")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="refused"):
        read_entry(tree.path, 7, entry, is_engine=True)
    with pytest.raises(OSError, match="refused"):
        read_usage(tree.path, entry)
    assert read_entry(tree.path, 7, entry) is None, "a stranger costs no reading"


def test_a_process_that_stays_what_it_is_is_not_read_twice(tree: ProcTree) -> None:
    tree.add(7, 1, "sleep", "600")
    entry = read_entry(tree.path, 7)
    (tree.path / "7" / "cmdline").unlink()

    assert entry is not None
    assert read_entry(tree.path, 7, entry) is entry


@pytest.mark.parametrize(
    ("old_command", "new_command"),
    [
        pytest.param(("bash",), ("sleep", "600"), id="another program"),
        pytest.param(("bash",), SERVER, id="a shell becomes the server"),
        pytest.param(("python3.11", "launcher.py"), SERVER, id="the same interpreter"),
        pytest.param(("vllm", "bench"), ("vllm", "serve", "m"), id="the same program"),
        pytest.param(SERVER, ("VLLM::EngineCore",), id="a title"),
        pytest.param(("VLLM::EngineCore",), ("VLLM::EngineCore_DP0",), id="a title that is cut at the same place"),
        pytest.param(("ray::IDLE",), ("ray::RayWorkerWrapper.execute_method",), id="an actor"),
    ],
)
def test_what_may_have_changed_is_read_again(
    tree: ProcTree, old_command: tuple[str, ...], new_command: tuple[str, ...]
) -> None:
    tree.add(7, 1, *old_command)
    entry = read_entry(tree.path, 7)
    tree.add(7, 1, *new_command)
    proc_entry = read_entry(tree.path, 7, entry)

    assert proc_entry is not None
    assert proc_entry.command == new_command
    assert proc_entry == read_entry(tree.path, 7)


def test_another_process_with_the_same_pid_is_read_again(tree: ProcTree) -> None:
    tree.add(7, 1, "sleep", "600", started_ticks=5000)
    entry = read_entry(tree.path, 7)
    tree.add(7, 1, "sleep", "30", started_ticks=9000)

    assert read_entry(tree.path, 7, entry) == read_entry(tree.path, 7) != entry


def test_a_parent_that_has_gone_is_seen(tree: ProcTree) -> None:
    tree.add(7, 6, "sleep", "600")
    entry = read_entry(tree.path, 7)
    tree.add(7, 1, "sleep", "600")

    assert read_entry(tree.path, 7, entry) == read_entry(tree.path, 7) != entry


def test_a_process_that_has_become_a_zombie_has_gone(tree: ProcTree) -> None:
    tree.add(7, 1, "sleep", "600")
    entry = read_entry(tree.path, 7)
    tree.add(7, 1, "sleep", "600", state="Z")

    assert read_entry(tree.path, 7, entry) is None


def test_a_process_that_was_seen_between_its_name_and_its_command_line_is_read_again(tree: ProcTree) -> None:
    tree.add(7, 1, "sleep", "600")
    command_line = (tree.path / "7" / "cmdline").read_bytes()
    (tree.path / "7" / "cmdline").write_bytes(b"")
    entry = read_entry(tree.path, 7)
    (tree.path / "7" / "cmdline").write_bytes(command_line)

    assert entry is not None
    assert entry.command == ("sleep",)
    assert read_entry(tree.path, 7, entry) == read_entry(tree.path, 7) != entry
