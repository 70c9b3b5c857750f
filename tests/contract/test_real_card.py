"""What is derived of a real vLLM on a real card, recorded while it leaked until it ended, and while it slept."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.contract.traces import read_recording, watch_recording
from vllm_headroom.model import Failure
from vllm_headroom.vocabulary import LeakLocation, MemoryPart

LEAK, SLEEP = (Path(__file__).parent / "card" / f"h100-{name}.jsonl.gz" for name in ("leak", "sleep"))
UUID: Final = "GPU-11111111-2222-4333-8444-555555555555"
MIB: Final = 2**20
BEGAN, FULL, ENDED = 1795744538.0, 1795745010.0, 1795745011.0
BYTES_PER_SECOND: Final = 14 * MIB


def test_the_leak_is_forecast_and_located() -> None:
    course = watch_recording(LEAK).course(UUID)
    first_alarm = course.first_alarm

    assert first_alarm is not None
    assert BEGAN < first_alarm.seconds < FULL
    assert first_alarm.bytes_per_second == pytest.approx(BYTES_PER_SECOND, rel=0.05)
    # After five minutes of growth; the engine ended at a peak of its use, before all of the room was leaked.
    assert first_alarm.time_to_oom_seconds == pytest.approx(FULL - first_alarm.seconds, rel=0.4)
    assert first_alarm.time_to_oom_seconds_lower is not None
    assert first_alarm.time_to_oom_seconds_lower < ENDED - first_alarm.seconds
    assert first_alarm.location is LeakLocation.TENSORS
    assert course.leaking == [(first_alarm.seconds, None)], "one alarm, which is not taken back"
    assert course.growing == []


def test_what_grew_beside_torch_is_what_was_allocated_there() -> None:
    """512 MiB past torch before the leak; while tensors were kept, what is outside stayed as it was."""
    gpus = [
        (read_snapshot.time_seconds, read_snapshot.gpus[0])
        for read_snapshot in read_recording(LEAK)
        if not isinstance(read_snapshot.gpus, Failure)
    ]
    outside = [
        (seconds, dict(gpu.inside.parts)[MemoryPart.OUTSIDE_TORCH])
        for seconds, gpu in gpus
        if gpu.inside and {MemoryPart.KV_CACHE, MemoryPart.OUTSIDE_TORCH} <= dict(gpu.inside.parts).keys()
    ]
    bytes_before = outside[0][1]
    later = [held_bytes for seconds, held_bytes in outside if seconds > BEGAN + 10]

    assert len(later) > 400
    assert min(later) >= bytes_before + 512 * MIB
    assert max(later) <= bytes_before + 700 * MIB


def test_a_sleep_is_no_leak() -> None:
    course = watch_recording(SLEEP).course(UUID)

    assert course.leaking == []
    assert course.growing == []
