from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml.library import FakeGpu, FakeInstance, FakeNvml
from tests.fakes.nvml.reader import Clock, devices, in_process, run
from vllm_headroom.scrape.nvml.reader import Nvml
from vllm_headroom.scrape.nvml.xids import MAX_KINDS


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    with in_process(tmp_path, monkeypatch, [FakeGpu(uuid="GPU-0"), FakeGpu(uuid="GPU-1")]) as fake:
        yield fake


def test_xids_are_counted_by_gpu_and_code_from_the_first_reading_on(fake: FakeNvml) -> None:
    fake.gpus[0].xids = [(13, None)]
    fake.write()

    async def steps(nvml: Nvml) -> None:
        assert [reading.xid_errors for reading in await devices(nvml)] == [(), ()]

        fake.gpus[0].xids += [(31, None), (13, None), (31, None)]
        fake.write()
        assert [reading.xid_errors for reading in await devices(nvml)] == [((13, 1), (31, 2)), ()]
        assert [reading.xid_errors for reading in await devices(nvml)] == [((13, 1), (31, 2)), ()]

    run(steps)


def test_events_that_hang_cost_a_reading_half_its_time_once_and_no_gpu(fake: FakeNvml) -> None:
    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        fake.hangs = {"nvmlEventSetWait_v2": 600.0}
        fake.write()
        fake.forget_calls()
        for _ in range(2):
            assert [reading.failure for reading in await devices(nvml)] == [None, None]

    run(steps, call_timeout_seconds=0.2)

    assert fake.calls().count("nvmlEventSetWait_v2 -") == 1


def test_the_xid_that_tells_why_a_gpu_was_lost_stays_on_its_reading(fake: FakeNvml) -> None:
    clock = Clock()

    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        fake.gpus[1].xids = [(79, None)]
        fake.gpus[1].errors = {"all": 15}
        fake.write()
        for _ in range(2):
            lost = (await devices(nvml))[1]
            assert lost.failure is not None
            assert lost.xid_errors == ((79, 1),)
            clock.seconds += 61

    run(steps, monotonic=clock)


def test_counts_go_on_after_nvml_was_initialised_again(fake: FakeNvml) -> None:
    clock = Clock()

    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        fake.gpus[0].xids = [(31, None)]
        fake.gpus[1].errors = {"all": 15}
        fake.write()
        await devices(nvml)
        clock.seconds += 61
        await devices(nvml)
        fake.gpus[0].xids += [(31, None)]
        fake.write()
        assert (await devices(nvml))[0].xid_errors == ((31, 2),)

    run(steps, monotonic=clock)

    assert fake.calls().count("nvmlEventSetFree -") == 2


def test_in_mig_mode_an_xid_counts_for_its_instance_or_for_all_where_none_is_named(fake: FakeNvml) -> None:
    fake.gpus[0].mig = True
    fake.gpus[0].instances = [FakeInstance(uuid=f"MIG-{number}", gpu_instance=number) for number in (1, 2)]
    fake.write()

    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        fake.gpus[0].xids = [(43, 2), (79, None)]
        fake.write()
        first_instance, two, other_gpu = await devices(nvml)
        assert (first_instance.xid_errors, two.xid_errors, other_gpu.xid_errors) == (((79, 1),), ((43, 1), (79, 1)), ())

    run(steps)


def test_a_driver_that_reports_ever_new_codes_makes_no_page_without_end_and_no_error_is_lost(fake: FakeNvml) -> None:
    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        fake.gpus[0].xids = [(1 + number, None) for number in range(200)]
        fake.write()
        for _ in range(4):
            errors = (await devices(nvml))[0].xid_errors
        assert errors == ((0, 200 - MAX_KINDS), *((1 + number, 1) for number in range(MAX_KINDS)))

        fake.gpus[0].xids += [(1, None), (300, None)]
        fake.write()
        assert (await devices(nvml))[0].xid_errors[:2] == ((0, 201 - MAX_KINDS), (1, 2))

    run(steps)


@pytest.mark.parametrize("function", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"])
def test_a_driver_without_xid_events_costs_nothing_else(fake: FakeNvml, function: str) -> None:
    fake.errors = {function: 3}
    fake.write()

    async def steps(nvml: Nvml) -> None:
        for _ in range(2):
            for reading in await devices(nvml):
                assert (reading.failure, reading.xid_errors) == (None, ())
                assert reading.memory is not None

    run(steps)

    assert ("nvmlEventSetWait_v2 -" in fake.calls()) is (function == "nvmlEventSetWait_v2")
