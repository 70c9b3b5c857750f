"""However much is known when an engine ends, its incident fits the volume, and can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.samples import snapshot
from vllm_headroom.trace import flight as record
from vllm_headroom.trace.entries import build_record, encode_line
from vllm_headroom.trace.flight import (
    INCIDENT_BYTES,
    append_to_record,
    find_newest,
    find_size_share,
    list_incidents,
    write_incident,
)
from vllm_headroom.units import MIB
from vllm_headroom_tools.trace import read_trace

ENDED = 1_760_000_100.0
SENTENCE = {"sentence": "GPU 0 leaks."}


def kept(folder: Path, log: str = "", **facts_before: object) -> int:
    """Set the samples of 100 s aside with what was known; return the size of the incident, which has the newest."""
    for at in range(100):
        append_to_record(folder, encode_line(build_record(snapshot(at=float(at)))))
    write_incident(
        folder, ENDED, {"what": "ended", "t": ENDED, "log": log, "before": {"verdicts": [SENTENCE], **facts_before}}
    )
    (file,) = list_incidents(folder / "incidents")
    assert [snapshot.time_seconds for snapshot in read_trace(str(file))][-1] == ENDED - 1
    return file.stat().st_size


def before_the_end(folder: Path) -> dict[str, object]:
    newest = find_newest(folder)
    assert newest is not None
    facts_before: dict[str, object] = newest[1]["before"]
    return facts_before


def test_files_of_the_probe_that_say_a_megabyte_leave_an_incident_that_can_be_read(tmp_path: Path) -> None:
    assert kept(tmp_path, probe=["x" * 2 * MIB]) <= INCIDENT_BYTES

    assert before_the_end(tmp_path) == {"verdicts": [SENTENCE]}


def test_on_a_small_volume_the_longest_of_what_was_known_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "ROOMY_BYTES", int(record.ROOMY_BYTES / find_size_share(tmp_path)))
    monkeypatch.setattr(record, "INCIDENT_BYTES", 4000)

    assert kept(tmp_path, used="x" * 5000, holders=["y"]) <= 4000

    assert before_the_end(tmp_path) == {"verdicts": [SENTENCE], "holders": ["y"]}


def test_a_log_that_is_longer_than_all_room_costs_half_of_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "INCIDENT_BYTES", 4000)

    assert 6000 < kept(tmp_path, log="x" * 5000) <= 7500

    assert before_the_end(tmp_path) == {}
