"""The probe's folder, which the engine's container may write anything into."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_headroom.model import Failure, ProbedProcess
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.scrape.probe import MAX_ENTRIES, MAX_FILE_BYTES, MAX_FILES, ProbeReader
from vllm_headroom.vocabulary import Reason, Source

BOOT = "a-boot"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "boot_id").write_text(f"{BOOT}\n")
    (tmp_path / "probe").mkdir()
    return tmp_path / "probe"


def probe(folder: Path) -> ProbeReader:
    return ProbeReader(folder, parse=parse_probe, boot=folder.parent / "boot_id")


def write(folder: Path, pid: int = 7, **report_fields: Any) -> Path:
    """Write as the probe does: a new file in the old one's place."""
    document = {"headroom_probe": 1, "t": 2000.0, "pid": pid, "started_at": 1000.0, "boot_id": BOOT} | report_fields
    unfinished, file = folder / f"{pid}-1000.json.tmp", folder / f"{pid}-1000.json"
    unfinished.write_text(json.dumps(document))
    return unfinished.replace(file)


def read(reader: ProbeReader, timeout_seconds: float = 10.0) -> tuple[ProbedProcess, ...] | Failure:
    return asyncio.run(reader.read(timeout_seconds))


def pids(folder: Path) -> list[int]:
    processes = read(probe(folder))
    assert not isinstance(processes, Failure), processes
    return sorted(process.pid for process in processes)


def reason(folder: Path) -> Reason:
    failure = read(probe(folder))
    assert isinstance(failure, Failure)
    assert failure.source is Source.PROBE
    return failure.reason


def test_each_process_is_read_with_what_it_wrote_last(folder: Path) -> None:
    reader = probe(folder)
    write(folder, 7, t=2000.0)
    write(folder, 8, t=2001.0)
    read(reader)
    write(folder, 7, t=2005.0)

    processes = read(reader)

    assert not isinstance(processes, Failure)
    assert {process.pid: process.written_at_seconds for process in processes} == {7: 2005.0, 8: 2001.0}


def test_a_file_that_was_not_written_again_is_not_read_again(folder: Path) -> None:
    parsed: list[bytes] = []

    def parse(content: bytes) -> tuple[ProbedProcess, str | None] | str:
        parsed.append(content)
        return parse_probe(content)

    reader = ProbeReader(folder, parse=parse, boot=folder.parent / "boot_id")
    write(folder, 7)
    for _ in range(3):
        read(reader)

    assert len(parsed) == 1


def test_a_process_whose_file_is_gone_says_nothing(folder: Path) -> None:
    reader = probe(folder)
    write(folder, 7)
    write(folder, 8).unlink()
    read(reader)

    processes = read(reader)
    assert not isinstance(processes, Failure)
    assert [process.pid for process in processes] == [7]


def test_an_earlier_boots_files_are_nobodys(folder: Path) -> None:
    write(folder, 7, boot_id="another-boot")
    assert reason(folder) is Reason.NOT_FOUND

    write(folder, 8)
    write(folder, 9, boot_id=None)
    assert pids(folder) == [8, 9]


def test_what_is_no_file_of_a_process_is_not_looked_at(folder: Path, tmp_path: Path) -> None:
    write(folder, 7)
    elsewhere = tmp_path / "secret.json"
    elsewhere.write_text((folder / "7-1000.json").read_text())
    (folder / "8-1000.json").symlink_to(elsewhere)
    os.mkfifo(folder / "9-1000.json")
    (folder / "10-1000.json").mkdir()
    (folder / "11-1000.json.tmp").write_text(elsewhere.read_text())
    (folder / "7-1000.record.json").write_text(elsewhere.read_text())
    (folder / "record.json").write_text(elsewhere.read_text())
    for name in ("১-1000.json", "7-1000.json\n", "\n7-1000.json", os.fsdecode(b"\xff-1000.json"), "-7-1000.json"):
        (folder / name).write_text(elsewhere.read_text())
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "12-1000.json"))
    listener.close()

    assert pids(folder) == [7]


def test_a_file_that_becomes_a_pipe_after_it_was_listed_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, 7)
    os.mkfifo(folder / "8-1000.json")
    listed = {file.name: _stamp_of(file) for file in folder.iterdir()}
    monkeypatch.setattr("vllm_headroom.scrape.probe.list_newest", lambda _: listed)

    assert pids(folder) == [7]


def _stamp_of(path: Path) -> tuple[int, int, int]:
    status = path.lstat()
    return status.st_mtime_ns, status.st_ino, status.st_size


def test_a_file_that_is_too_large_is_refused_and_named(folder: Path) -> None:
    (folder / "7-1000.json").write_text(" " * (MAX_FILE_BYTES + 1))

    failure = read(probe(folder))

    assert isinstance(failure, Failure)
    assert failure.reason is Reason.MALFORMED
    assert failure.message == (f"{folder}/7-1000.json cannot be used: it is no file of at most 16 KiB that can be read")


def test_a_damaged_file_costs_its_process_alone(folder: Path) -> None:
    write(folder, 7)
    (folder / "8-1000.json").write_text("{")
    assert pids(folder) == [7]

    (folder / "7-1000.json").unlink()
    assert reason(folder) is Reason.MALFORMED


def test_of_thousands_of_files_the_newest_are_read(folder: Path) -> None:
    for pid in range(MAX_FILES + 20):
        os.utime(write(folder, pid), (1000 + pid, 1000 + pid))

    assert pids(folder) == list(range(20, MAX_FILES + 20))


def test_more_entries_than_any_probe_makes_fail_the_source(folder: Path) -> None:
    write(folder, 7)
    for number in range(MAX_ENTRIES):
        (folder / f"x{number}").touch()

    assert reason(folder) is Reason.OUT_OF_BOUNDS


def test_an_empty_folder_says_where_the_probe_has_to_be_found(folder: Path) -> None:
    failure = read(probe(folder))

    assert isinstance(failure, Failure)
    assert failure.reason is Reason.NOT_FOUND
    assert failure.message == (
        f"no probe has written into {folder}: let vLLM find it on PYTHONPATH, with HEADROOM_PROBE_DIR set to the same"
        " folder (vllm-headroom doctor)"
    )


def test_a_folder_that_is_not_there_comes_back(folder: Path) -> None:
    reader = probe(folder)
    folder.rmdir()
    failure = read(reader)
    folder.mkdir()
    write(folder, 7)

    assert isinstance(failure, Failure)
    assert failure.reason is Reason.UNAVAILABLE
    assert not isinstance(read(reader), Failure)


def test_a_file_in_the_folders_place_is_no_folder(folder: Path) -> None:
    folder.rmdir()
    folder.touch()

    assert reason(folder) is Reason.UNAVAILABLE


def test_a_folder_that_may_not_be_read_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.scandir", refuse)

    assert reason(folder) is Reason.NO_PERMISSION


def test_a_volume_that_hangs_is_given_up_and_comes_back(folder: Path) -> None:
    write(folder, 7)
    lets_go = threading.Event()

    def stuck(content: bytes) -> tuple[ProbedProcess, str | None] | str:
        lets_go.wait(60)
        return parse_probe(content)

    reader = ProbeReader(folder, parse=stuck, boot=folder.parent / "boot_id")
    hung = read(reader, 0.05)
    at_once = read(reader, 30.0)
    lets_go.set()

    assert isinstance(hung, Failure)
    assert isinstance(at_once, Failure)
    assert hung.reason is at_once.reason is Reason.TIMEOUT
    deadline = time.monotonic() + 30
    while isinstance(read(reader), Failure) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not isinstance(read(reader), Failure)
