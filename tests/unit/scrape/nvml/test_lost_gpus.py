import gc

import pytest

from tests.fakes.nvml.library import FakeNvml
from tests.fakes.nvml.reader import Clock, devices, reasons, run
from tests.logs import capture_logs
from vllm_headroom.model import GpuReading
from vllm_headroom.scrape.gpu_state import RecentPeak
from vllm_headroom.scrape.nvml.reader import MAX_GPUS, Nvml
from vllm_headroom.vocabulary import Reason

INIT = "nvmlInitWithFlags -"


@pytest.mark.parametrize("code", [15, 16, 28])
def test_a_lost_gpu_costs_only_itself_and_its_handle_is_never_used_again(fake: FakeNvml, code: int) -> None:
    clock = Clock()

    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        fake.gpus[1].errors = {"all": code}
        fake.write()
        with capture_logs() as lines:
            first_readings = await devices(nvml)
            fake.forget_calls()
            clock.seconds += 59
            await nvml.sample_used(10)
            second = await devices(nvml)

        assert reasons(first_readings) == reasons(second) == [None, Reason.DEVICE_LOST, None]
        assert (first_readings[1].index, first_readings[1].uuid, first_readings[1].memory) == (1, "GPU-1", None)
        assert [call for call in fake.calls() if call.endswith("GPU-1")] == []
        assert INIT not in fake.calls()
        assert [(line["event"], line["uuid"], line["reason"]) for line in lines] == [
            ("GPU failed", "GPU-1", "device_lost")
        ]

    run(steps, monotonic=clock)


def test_a_lost_gpu_is_looked_for_every_minute_and_comes_back(fake: FakeNvml) -> None:
    clock = Clock()

    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        lost, fake.gpus = fake.gpus[1], [fake.gpus[0], fake.gpus[2]]
        fake.write()
        await nvml.sample_used(10)
        assert reasons(await devices(nvml)) == [None, Reason.DEVICE_LOST, None]
        clock.seconds += 60
        still = await devices(nvml)
        assert [(reading.index, reading.uuid) for reading in still] == [(0, "GPU-0"), (1, "GPU-2"), (1, "GPU-1")]
        assert reasons(still) == [None, None, Reason.DEVICE_LOST]

        fake.gpus.insert(1, lost)
        fake.write()
        clock.seconds += 60
        with capture_logs() as lines:
            for _ in range(2):
                assert reasons(await devices(nvml)) == [None, None, None]
        assert [line["event"] for line in lines] == ["GPU answers again"]

    run(steps, monotonic=clock)


def test_a_gpu_that_does_not_open_again_keeps_its_name(fake: FakeNvml) -> None:
    clock = Clock()

    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        fake.gpus[1].errors = {"all": 15}
        fake.write()
        for _ in range(2):
            readings = await devices(nvml)
            assert [reading.uuid for reading in readings] == ["GPU-0", "GPU-1", "GPU-2"]
            assert reasons(readings) == [None, Reason.DEVICE_LOST, None]
            clock.seconds += 61

    run(steps, monotonic=clock)


def test_a_gpu_that_comes_back_at_another_index_answers_again(fake: FakeNvml) -> None:
    clock = Clock()

    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        lost = fake.gpus.pop(1)
        fake.write()
        await devices(nvml)
        fake.gpus.append(lost)
        fake.write()
        clock.seconds += 60
        with capture_logs() as lines:
            back = await devices(nvml)
        fake.gpus[2].errors = {"all": 15}
        fake.write()
        with capture_logs() as again:
            await devices(nvml)

        assert [(reading.index, reading.uuid) for reading in back] == [(0, "GPU-0"), (1, "GPU-2"), (2, "GPU-1")]
        assert [(line["event"], line["gpu"], line["uuid"]) for line in lines] == [("GPU answers again", 2, "GPU-1")]
        assert [(line["event"], line["gpu"], line["uuid"]) for line in again] == [("GPU failed", 2, "GPU-1")]

    run(steps, monotonic=clock)


def test_gpus_that_come_back_as_others_each_time_are_not_listed_without_end(fake: FakeNvml) -> None:
    clock = Clock()

    async def steps(nvml: Nvml) -> tuple[tuple[GpuReading, ...], int]:
        for turn in range(MAX_GPUS + 9):
            fake.gpus[1].uuid, fake.gpus[1].errors = f"GPU-of-turn-{turn}", {}
            fake.write()
            await devices(nvml)
            fake.gpus[1].errors = {"all": 15}
            fake.write()
            await devices(nvml)
            clock.seconds += 60
        readings = await devices(nvml)
        gc.collect()
        return readings, sum(isinstance(referenced, RecentPeak) for referenced in gc.get_objects())

    readings, peaks = run(steps, monotonic=clock)
    uuids = [reading.uuid for reading in readings]

    assert len(uuids) == MAX_GPUS
    assert peaks < MAX_GPUS
    assert {"GPU-0", "GPU-2", f"GPU-of-turn-{MAX_GPUS + 8}"} <= set(uuids)


def test_a_gpu_that_may_not_be_opened_is_listed_by_its_index(fake: FakeNvml) -> None:
    fake.gpus[2].errors = {"nvmlDeviceGetHandleByIndex_v2": 4}
    fake.write()
    readings = run(devices)

    assert reasons(readings) == [None, None, Reason.NO_PERMISSION]
    assert (readings[2].index, readings[2].uuid) == (2, "")


def test_an_unknown_error_on_one_gpu_costs_that_gpu_until_it_is_over(fake: FakeNvml) -> None:
    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        for errors, reason in (({"all": 999}, Reason.UNKNOWN), ({}, None)):
            fake.gpus[0].errors = errors
            fake.write()
            assert reasons(await devices(nvml)) == [reason, None, None]

    run(steps)
