"""A log file is followed over rotation, truncation and replacement."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.engine_logs import append
from vllm_headroom.model import Failure
from vllm_headroom.scrape.log import files
from vllm_headroom.scrape.log.batch import LogBatch
from vllm_headroom.scrape.log.files import LogFiles
from vllm_headroom.vocabulary import Reason


def fetch(source: LogFiles) -> LogBatch:
    batch = asyncio.run(source.fetch(5.0))
    assert isinstance(batch, LogBatch)
    return batch


def fail(source: LogFiles) -> Failure:
    failure = asyncio.run(source.fetch(5.0))
    assert isinstance(failure, Failure)
    return failure


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "vllm.log"
    file.write_text("old\n")
    return file


def test_what_is_added_comes_once_and_what_was_there_is_old(file: Path) -> None:
    source = LogFiles(str(file))

    assert fetch(source) == LogBatch(content=b"old\n", is_old=True, is_broken=True)
    assert fetch(source).content == b""
    append(file, "new\n")
    assert fetch(source) == LogBatch(content=b"new\n")


def test_a_file_that_was_renamed_is_read_to_its_end_before_the_next(file: Path) -> None:
    source = LogFiles(str(file))
    fetch(source)
    append(file, "last\n")
    file.rename(file.with_suffix(".log.1"))

    assert fetch(source).content == b"last\n"
    assert fetch(source).content == b""
    file.write_text("first\n")
    assert fetch(source) == LogBatch(content=b"first\n", is_broken=True)


@pytest.mark.parametrize("content", ["short\n", "old\nof another length\n" * 3])
def test_a_file_that_was_truncated_is_read_from_its_beginning(file: Path, content: str) -> None:
    append(file, "and more\n")
    source = LogFiles(str(file))
    fetch(source)
    with file.open("r+") as stream:
        stream.truncate()
        stream.write(content.replace("old", "new"))

    assert fetch(source).content.decode() == content.replace("old", "new")


def test_a_pattern_follows_the_newest_file_and_leaves_packed_ones_out(tmp_path: Path) -> None:
    for age, name in enumerate(("2.log.gz", "1.log", "0.log")):
        (tmp_path / name).write_text(f"{name}\n")
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    source = LogFiles(f"{tmp_path}/*.log*")

    assert fetch(source).content == b"1.log\n"
    append(tmp_path / "0.log", "more\n")
    assert fetch(source).content == b"0.log\nmore\n"
    os.utime(tmp_path / "1.log")
    append(tmp_path / "1.log", "again\n")
    assert fetch(source).content == b"again\n", "two files that grow are each read once"


def test_the_middle_of_a_long_past_is_left_out(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 10)
    monkeypatch.setattr(files, "MOST_BACKLOG_BYTES", 40)
    file.write_text("".join(f"{number:09}\n" for number in range(100)))
    source = LogFiles(str(file))

    assert fetch(source).content == b"000000000\n"
    assert fetch(source) == LogBatch(content=b"000000099\n", is_old=True, is_broken=True)
    assert fetch(source).content == b""


def test_a_file_that_cannot_be_read_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    assert fail(LogFiles(str(tmp_path / "none.log"))).reason is Reason.NOT_FOUND
    assert fail(LogFiles(f"{tmp_path}/*.log")).reason is Reason.NOT_FOUND
    os.mkfifo(tmp_path / "pipe.log")
    assert fail(LogFiles(str(tmp_path / "pipe.log"))).reason is Reason.UNAVAILABLE
    assert fail(LogFiles(str(tmp_path))).reason is Reason.UNAVAILABLE


def test_a_pattern_of_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_FILES", 3)
    for number in range(5):
        (tmp_path / f"{number}.log").touch()

    assert fail(LogFiles(f"{tmp_path}/*.log")).reason is Reason.OUT_OF_BOUNDS


def test_a_removed_file_is_missing_and_its_successor_is_found(file: Path) -> None:
    source = LogFiles(str(file))
    fetch(source)
    file.unlink()
    assert fail(source).reason is Reason.NOT_FOUND

    file.write_text("next\n")
    assert fetch(source).content == b"next\n"
