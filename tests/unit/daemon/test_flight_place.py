"""What lies where the record or an incident should lie, and is none, is neither waited for nor taken into memory."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from tests.logs import capture_logs
from tests.samples import snapshot
from tests.unit.daemon.test_flight import BEGAN, died, flight
from vllm_headroom.trace.entries import build_record, encode_line
from vllm_headroom.trace.flight import append_to_record, list_incidents, write_incident
from vllm_headroom.units import MIB
from vllm_headroom_tools.trace import read_trace

OLD = "incidents/2025-01-01T00-00-00Z.jsonl"


@pytest.mark.parametrize("name", [OLD, "flight.jsonl.1"])
def test_a_pipe_costs_no_incident(name: str, tmp_path: Path) -> None:
    (tmp_path / "incidents").mkdir()
    os.mkfifo(tmp_path / name)
    subject = flight(tmp_path)

    died(subject)

    assert subject.last is not None
    assert [incident.name for incident in list_incidents(tmp_path / "incidents")] == [Path(subject.last.file).name]


def test_a_record_that_a_crash_left_as_zeros_is_set_aside_as_it_is(tmp_path: Path) -> None:
    record, aside = tmp_path / "flight.jsonl", tmp_path / "spoiled-flight.jsonl"
    sample = encode_line(build_record(snapshot()))
    zeros = bytes(4096) + b"\n" + sample
    record.write_bytes(zeros)

    with capture_logs() as lines:
        append_to_record(tmp_path, sample)
        append_to_record(tmp_path, sample)

    assert [line["file"] for line in lines] == [str(aside)]
    assert aside.read_bytes() == zeros
    assert len(list(read_trace(str(record)))) == 2

    record.write_bytes(bytes(7))
    append_to_record(tmp_path, sample)
    assert aside.read_bytes() == bytes(7), "of another crash, over the one before"
    assert len(list(read_trace(str(record)))) == 1


def test_a_pipe_in_place_of_the_record_is_set_aside(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "flight.jsonl")

    append_to_record(tmp_path, encode_line(build_record(snapshot())))

    assert (tmp_path / "spoiled-flight.jsonl").is_fifo()
    assert len(list(read_trace(str(tmp_path / "flight.jsonl")))) == 1


@pytest.mark.parametrize("foreign", [b"dear diary\n", b'{"headroom_tr\xffce":1}\n', b"null\n", b"[]\n", b"-" * 100_000])
def test_a_record_that_is_no_trace_is_set_aside_and_costs_no_sample(tmp_path: Path, foreign: bytes) -> None:
    record = tmp_path / "flight.jsonl"
    record.write_bytes(foreign)

    append_to_record(tmp_path, encode_line(build_record(snapshot())))

    assert (tmp_path / "spoiled-flight.jsonl").read_bytes() == foreign
    assert len(list(read_trace(str(record)))) == 1


def test_a_record_without_an_end_of_line_is_not_taken_into_memory(tmp_path: Path) -> None:
    append_to_record(tmp_path, encode_line(build_record(snapshot())))
    with (tmp_path / "flight.jsonl.1").open("wb") as stream:
        stream.truncate(64 * MIB)

    tracemalloc.start()
    try:
        write_incident(tmp_path, BEGAN + 1001, {"what": "ended"})
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 8 * MIB
