"""What lies where the record or an incident should lie, and is none, is neither waited for nor taken into memory."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from tests.samples import snapshot
from tests.unit.daemon.test_flight import BEGAN, died, flight
from vllm_headroom.trace.flight import keep, set_aside
from vllm_headroom.trace.incidents import incidents_in
from vllm_headroom.trace.write import line, record_of
from vllm_headroom.units import MIB

OLD = "incidents/2025-01-01T00-00-00Z.jsonl"


@pytest.mark.parametrize("name", [OLD, "flight.jsonl.1"])
def test_a_pipe_costs_no_incident(name: str, tmp_path: Path) -> None:
    (tmp_path / "incidents").mkdir()
    os.mkfifo(tmp_path / name)
    subject = flight(tmp_path)

    died(subject)

    assert subject.last is not None
    assert [each.name for each in incidents_in(tmp_path / "incidents")] == [Path(subject.last.file).name]


def test_a_record_without_an_end_of_line_is_not_taken_into_memory(tmp_path: Path) -> None:
    keep(tmp_path, line(record_of(snapshot())))
    with (tmp_path / "flight.jsonl.1").open("wb") as stream:
        stream.truncate(64 * MIB)

    tracemalloc.start()
    try:
        set_aside(tmp_path, BEGAN + 1001, {"what": "ended"})
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 8 * MIB
