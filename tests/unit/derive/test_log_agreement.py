"""Where the engine's log says something else than the probe and the page, that is said once."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.engine_logs import VLLM_0_19
from tests.logs import capture_logs
from tests.samples import engine, page, snapshot
from vllm_headroom.daemon.transitions import DISAGREEING_SECONDS, Transitions
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.derive.log_agreement import find_disagreements
from vllm_headroom.model import EngineStatus, LogReading, ProbedProcess, ProbeReadings, Snapshot, WorkerMeasurements
from vllm_headroom.parse.log.reader import read_log
from vllm_headroom.units import GIB
from vllm_headroom.vocabulary import EngineState, Role

START = read_log(VLLM_0_19.encode().splitlines(keepends=True)).starts[-1]
WEIGHTS, CACHE = int(34.01 * GIB), int(37.28 * GIB)


def see(ratio: float | None = 0.95, **parts: Any) -> Snapshot:
    """Return a sample of an engine in service, beside the log of a start: 34.01 GiB, 37.28 GiB, 0.95."""
    worker = ProbedProcess(
        pid=7,
        started_at_seconds=1.0,
        written_at_seconds=2.0,
        interval_seconds=5.0,
        role=Role.WORKER,
        parts=WorkerMeasurements(**parts),
    )
    sample = snapshot(engines=page(engine(gpu_memory_utilization_ratio=ratio)))
    status = EngineStatus(state=EngineState.SERVING, is_in_service=True)
    return replace(sample, log=LogReading(start=START), probe=ProbeReadings(present=(worker,)), engine_status=status)


@pytest.mark.parametrize(
    ("compared", "names"),
    [
        (see(weights_bytes=WEIGHTS, kv_cache_bytes=CACHE), []),
        (see(weights_bytes=WEIGHTS + 60 * 2**20, kv_cache_bytes=CACHE // 2), []),
        (see(None), []),
        (see(weights_bytes=15 * GIB), ["weights"]),
        (see(kv_cache_bytes=60 * GIB), ["KV cache"]),
        (see(weights_bytes=15 * GIB, pool=WorkerMeasurements(weights_bytes=0)), []),
        (see(weights_bytes=15 * GIB, asleep=True), []),
        (see(0.5), ["--gpu-memory-utilization"]),
        (replace(see(0.5, weights_bytes=1), log=None), []),
        (replace(see(0.5, weights_bytes=1), log=LogReading(start=None)), []),
        (replace(see(0.5, weights_bytes=1), engine_status=None), []),
    ],
)
def test_what_both_know_is_compared(compared: Snapshot, names: list[str]) -> None:
    assert [text.partition(":")[0] for text in find_disagreements(compared)] == names


def test_a_disagreement_that_lasts_is_logged_once() -> None:
    subject = Transitions(Selection(everything=True))
    problems = []
    for step in range(6):
        differing = replace(see(weights_bytes=15 * GIB + step), monotonic_seconds=step * DISAGREEING_SECONDS / 2)
        with capture_logs() as lines:
            subject.report(differing)
        problems += [(step, line["problem"]) for line in lines if "disagrees" in line["event"]]

    assert problems == [(2, "weights: 34 GiB by the log, 15 GiB by the probe")]
