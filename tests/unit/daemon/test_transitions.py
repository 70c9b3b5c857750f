"""What is reported about GPUs that NVML counts again."""

from __future__ import annotations

from tests.logs import capture_logs
from tests.samples import gpu, snapshot
from vllm_headroom.daemon.transitions import Transitions
from vllm_headroom.derive.attribution import AttributionState, Selection, attribute
from vllm_headroom.model import Failure, GpuReadings
from vllm_headroom.vocabulary import Reason, Source

BLIND = Failure(source=Source.PROCESS, reason=Reason.UNAVAILABLE, message="no /proc")


def test_gpus_that_come_back_in_another_order_are_no_news_and_none_is_missing() -> None:
    selection = Selection(listed=("1", "2"))
    state, subject, line_counts = AttributionState(), Transitions(selection), list[int]()
    for order in (("GPU-a", "GPU-b", "GPU-c"), ("GPU-b", "GPU-c"), ("GPU-c", "GPU-b")):
        devices = tuple(gpu(index=index, uuid=uuid).reading for index, uuid in enumerate(order))
        state, gpus = attribute(state, GpuReadings(driver_version="580.00", devices=devices), BLIND, selection)
        with capture_logs() as lines:
            subject.report(snapshot(gpus=gpus, processes=BLIND))
        line_counts.append(len([line for line in lines if "GPU" in line["event"]]))

    assert line_counts == [2, 0, 0]
