"""`probe record` over a folder that somebody else writes too: it ends with what the others said, and harms nobody."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.probe import record as asking
from vllm_headroom_tools.probe.record import MAX_ANSWER_BYTES, record
from vllm_headroom_tools.probe.report import render_recording

HONEST, HOSTILE = "7-1000.record.json", "8-1000.record.json"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two processes write into it."""
    monkeypatch.setattr(asking, "RECORD_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(asking, "POLL_SECONDS", 0.01)
    directory = tmp_path / "files"
    directory.mkdir()
    for pid in (7, 8):
        report = {"headroom_probe": 1, "t": time.time(), "pid": pid, "started_at": 1000.5, "role": "worker"}
        (directory / f"{pid}-1000.json").write_text(json.dumps(report))
    return directory


def a_folder(place: Path, _: Path) -> None:
    place.mkdir()


def a_pipe(place: Path, _: Path) -> None:
    os.mkfifo(place)


def a_link(place: Path, elsewhere: Path) -> None:
    elsewhere.write_text("{")
    place.symlink_to(elsewhere)


def a_large_one(place: Path, _: Path) -> None:
    place.write_text("[" * (MAX_ANSWER_BYTES + 1))


@pytest.mark.parametrize("put", [a_folder, a_pipe, a_link, a_large_one])
def test_an_answer_that_is_no_file_is_none_and_the_others_are_reported(
    folder: Path, tmp_path: Path, put: Callable[[Path, Path], None]
) -> None:
    put(folder / HOSTILE, tmp_path / "elsewhere")

    recorded = asyncio.run(record(folder, 0.1, lambda _: _answered(folder)))

    assert {process["pid"]: process["problem"] for process in recorded["processes"]} == {7: None, 8: "no answer"}


def _answered(folder: Path) -> None:
    document = json.loads((folder / "record.json").read_text())
    (folder / HONEST).write_text(json.dumps({"headroom_record": 1, "id": document["id"]}))


DEEP: Final = b"[" * MAX_ANSWER_BYTES


def test_an_answer_nested_without_end_cannot_be_used(folder: Path) -> None:
    (folder / HOSTILE).write_bytes(DEEP)
    recorded = asyncio.run(record(folder, 0.1, lambda _: _answered(folder)))

    (problem,) = (process["problem"] for process in recorded["processes"] if process["pid"] == 8)
    assert problem.startswith("not JSON: ")
    assert f"worker (pid 8): an answer that cannot be used: {problem}" in list(render_recording(recorded))


def test_a_request_of_tomorrow_keeps_nobody_from_recording(folder: Path) -> None:
    (folder / "record.json").write_text("{}")
    os.utime(folder / "record.json", (time.time() + 86_400,) * 2)
    recorded = asyncio.run(record(folder, 0.1, lambda _: _answered(folder)))

    assert None in [process["problem"] for process in recorded["processes"]]


def test_a_request_that_becomes_a_link_touches_nothing_elsewhere(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    os.utime(elsewhere, (1.0, 1.0))

    def swapped(_: Any) -> None:
        _answered(folder)
        (folder / "record.json").unlink()
        (folder / "record.json").symlink_to(elsewhere)

    asyncio.run(record(folder, 0.1, swapped))

    assert elsewhere.stat().st_mtime == 1.0
    assert not (folder / "record.json").is_symlink()


def test_a_folder_in_the_requests_place_is_reported(folder: Path) -> None:
    (folder / "record.json").mkdir()
    os.utime(folder / "record.json", (1.0, 1.0))

    with pytest.raises(BadInput, match=r"record\.json.*Is a directory"):
        asyncio.run(record(folder, 0.1, lambda _: None))
