"""What the flight record takes of the daemon's memory while an incident is written."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from tests.samples import gpu, snapshot
from tests.unit.daemon.test_flight import BEGAN, died, flight, the_incident
from vllm_headroom.daemon.flight import MOST_USE_SAMPLES
from vllm_headroom.trace.entries import build_record, encode_line
from vllm_headroom.trace.flight import INCIDENT_BYTES, append_to_record
from vllm_headroom.units import MIB

MOST_BYTES = 4 * MIB
GPUS = [f"GPU-0000000{index:x}" for index in range(16)]


def test_an_incident_as_large_as_can_be_takes_less_than_four_mebibytes(tmp_path: Path) -> None:
    cards = tuple(gpu(index=index, uuid=uuid) for index, uuid in enumerate(GPUS))
    for at in (*range(-6 * 3600, -600, 15), *range(-600, 0)):
        append_to_record(tmp_path, encode_line(build_record(snapshot(at=float(at), gpus=cards))))
    assert (tmp_path / "flight.jsonl").stat().st_size > 0.9 * INCIDENT_BYTES

    tracemalloc.start()
    try:
        subject = flight(tmp_path)
        for second in range(MOST_USE_SAMPLES):
            subject.recent.add(BEGAN - MOST_USE_SAMPLES + second, dict.fromkeys(("GPU-a", *GPUS), 70 * 2**30 + second))
        died(subject)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert the_incident(tmp_path).stat().st_size > 0.9 * INCIDENT_BYTES
    assert peak_bytes < MOST_BYTES, peak_bytes
