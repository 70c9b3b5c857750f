from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.nvml.library import GIB, MIB, FakeGpu, FakeInstance, FakeNvml
from tests.fakes.nvml.reader import Clock, devices, in_process, run
from vllm_headroom.model import GpuProcess, GpuReading
from vllm_headroom.scrape.nvml.reader import Nvml
from vllm_headroom.vocabulary import Reason

SMALL = FakeInstance(uuid="MIG-small", gpu_instance=7, used_bytes=GIB, processes={11: GIB})
LARGE = FakeInstance(uuid="MIG-large", gpu_instance=2, total_bytes=40 * GIB, used_bytes=30 * GIB, processes={22: None})


def uuids(readings: tuple[GpuReading, ...]) -> list[str]:
    return [reading.uuid for reading in readings]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    parent = FakeGpu(
        uuid="GPU-parent",
        mig=True,
        instances=[SMALL, LARGE],
        used_bytes=31 * GIB,
        power_milliwatts=200_000,
        processes={11: GIB, 22: None},
    )
    with in_process(tmp_path, monkeypatch, [FakeGpu(uuid="GPU-plain", mig=False), parent]) as fake:
        yield fake


def test_a_gpu_in_mig_mode_is_its_instances_never_both(fake: FakeNvml) -> None:  # noqa: ARG001 - it is what is read
    async def steps(nvml: Nvml) -> None:
        plain, small, large = await devices(nvml)

        assert (plain.index, plain.uuid) == (0, "GPU-plain")
        assert (plain.display_name, small.display_name, large.display_name) == (
            "GPU 0",
            "GPU 1 MIG-small",
            "GPU 1 MIG-large",
        )
        assert (small.index, small.uuid, small.name) == (1, "MIG-small", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
        assert small.memory is not None
        assert (small.memory.total_bytes, small.memory.used_bytes) == (10 * GIB, GIB)
        assert small.processes == (GpuProcess(pid=11, used_bytes=GIB),)
        assert (large.index, large.uuid) == (1, "MIG-large")
        assert large.memory is not None
        assert large.memory.used_bytes == large.used_peak_bytes == 30 * GIB
        assert large.processes == (GpuProcess(pid=22, used_bytes=None),)
        assert (large.power_watts, large.utilization_ratio, large.failure) == (None, None, None)

    run(steps)


def test_instances_come_and_go_without_a_trace(fake: FakeNvml) -> None:
    async def steps(nvml: Nvml) -> None:
        assert uuids(await devices(nvml)) == ["GPU-plain", "MIG-small", "MIG-large"]
        for instances, expected in (([LARGE], ["MIG-large"]), ([SMALL, LARGE], ["MIG-small", "MIG-large"])):
            fake.gpus[1].instances = instances
            fake.write()
            await nvml.sample_used(10)
            assert uuids(await devices(nvml)) == ["GPU-plain", *expected]

    run(steps)


def test_of_an_instance_that_was_removed_nothing_is_known_of_the_next_of_its_name(fake: FakeNvml) -> None:
    clock = Clock()

    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        for instances in ([LARGE], [replace(SMALL, used_bytes=GIB - MIB, processes={33: GIB - MIB}), LARGE]):
            fake.gpus[1].instances = instances
            fake.forget_calls()
            fake.write()
            clock.seconds += 2
            _, *read = await devices(nvml)
        small = read[0]

        assert (small.uuid, small.used_peak_bytes) == ("MIG-small", GIB - MIB)
        assert small.processes == (GpuProcess(pid=33, used_bytes=GIB - MIB),)
        assert "nvmlDeviceGetPowerUsage MIG-small" in fake.calls()
        assert "nvmlDeviceGetPowerUsage MIG-large" not in fake.calls()

    run(steps, monotonic=clock)


def test_mig_mode_without_an_instance_is_the_gpu_itself(fake: FakeNvml) -> None:
    fake.gpus[1].instances = []
    fake.write()

    async def steps(nvml: Nvml) -> None:
        readings = await devices(nvml)

        assert uuids(readings) == ["GPU-plain", "GPU-parent"]
        assert readings[1].power_watts == pytest.approx(200)

    run(steps)


def test_a_lost_gpu_fails_all_its_instances_also_after_it_is_gone(fake: FakeNvml) -> None:
    clock = Clock()

    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        del fake.gpus[1]
        fake.write()
        for _ in range(2):
            plain, *instances = await devices(nvml)
            assert plain.failure is None
            assert sorted(uuids(tuple(instances))) == ["MIG-large", "MIG-small"]
            assert {reading.failure and reading.failure.reason for reading in instances} == {Reason.DEVICE_LOST}
            clock.seconds += 61

    run(steps, monotonic=clock)
