"""A folder in which somebody else writes too, or that is not the probe's at all: nobody's files suffer, nor vLLM."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_headroom_probe import folder as probes_folder
from vllm_headroom_probe.folder import prune, write_document
from vllm_headroom_probe.record import Recording

NAME = "7-1000.json"
OTHERS = ("config.json", "7-1000.json.bak", "a-1.json", "7-1000.records.json", "tokens.tmp", ".cache.json.tmp")


def test_of_a_folder_that_is_another_programs_only_the_probes_own_files_are_removed(folder: Path) -> None:
    own = [f"{number}-1.json" for number in range(3)] + ["3-1.record.json", ".4-1.json.tmp", ".4-1.record.json.tmp"]
    for name in (*OTHERS, *own):
        (folder / name).write_text("{}")
    prune(str(folder), max_files=0)

    assert {path.name for path in folder.iterdir()} == set(OTHERS)


def test_of_a_folder_without_end_a_part_is_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes_folder, "MAX_ENTRIES", 5)
    for number in range(9):
        (folder / f"{number}-1.json").write_text("{}")
    prune(str(folder), max_files=1)

    assert len(list(folder.iterdir())) == 9 - 4


def hard_link(place: Path, victim: Path) -> None:
    place.hardlink_to(victim)


def link(place: Path, victim: Path) -> None:
    place.symlink_to(victim)


def pipe(place: Path, _: Path) -> None:
    os.mkfifo(place)
    place.chmod(0o644)


@pytest.mark.parametrize("name", [NAME, f".{NAME}.tmp"])
@pytest.mark.parametrize("put", [hard_link, link, pipe])
def test_what_lies_in_its_files_place_is_replaced_and_never_written_through(
    folder: Path, tmp_path: Path, put: Callable[[Path, Path], None], name: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    put(folder / name, victim)
    # a pipe would be waited for: it has a reader, so that a test of it ends
    reader = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_document(str(folder), NAME, {"sequence": 1})
    finally:
        os.close(reader)

    assert victim.read_text() == "precious"
    assert (folder / NAME).is_file()
    assert not (folder / NAME).is_symlink()
    assert json.loads((folder / NAME).read_text()) == {"sequence": 1}


def test_a_folder_in_its_files_place_is_an_error_of_the_folder(folder: Path) -> None:
    (folder / NAME).mkdir()
    with pytest.raises(IsADirectoryError):
        write_document(str(folder), NAME, {})

    assert [path.name for path in folder.iterdir()] == [NAME]


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    tracemalloc.stop()


def request(**changes: Any) -> str:
    request_fields = {"headroom_record": 1, "id": "r1", "until": time.time() + 60, "host": True, "gpu": True}
    return json.dumps(request_fields | changes)


def linked(place: Path) -> None:
    (place.parent / "elsewhere").write_text(request())
    place.symlink_to("elsewhere")


def deep(place: Path) -> None:
    place.write_text("[" * 4096)


def of_tomorrow(place: Path) -> None:
    place.write_text(request())
    os.utime(place, (time.time() + 86_400,) * 2)


@pytest.mark.parametrize("put", [os.mkfifo, Path.mkdir, linked, deep, of_tomorrow])
def test_what_is_no_request_is_neither_waited_for_nor_followed_nor_kept_open(
    folder: Path, put: Callable[[Path], None]
) -> None:
    put(folder / "record.json")
    opened = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counts what is open
    Recording(str(folder)).tick("7-1", "worker", None)

    assert not tracemalloc.is_tracing()
    assert len(os.listdir("/proc/self/fd")) == opened  # noqa: PTH208


@pytest.mark.parametrize("until", [float("inf"), 1e300, 10**400])
def test_a_request_without_end_ends_within_an_hour(folder: Path, until: float) -> None:
    (folder / "record.json").write_text(request(until=until))
    record = Recording(str(folder))
    record.tick("7-1", "worker", None)
    began = time.time()

    try:
        assert tracemalloc.is_tracing()
        assert record._end_at <= began + 3600
    finally:
        record.discard()


def test_requests_upon_requests_end_the_one_before(folder: Path) -> None:
    record = Recording(str(folder))
    for number in range(3):
        (folder / "record.json").write_text(request(id=f"r{number}" + "x" * 1000))
        record.tick("7-1", "worker", None)
    record.discard()

    assert not tracemalloc.is_tracing()
    assert not list(folder.glob("*.record.json"))
