import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml.library import GIB, MIB, FakeGpu, FakeNvml
from tests.fakes.nvml.reader import Clock, devices, in_process, run
from tests.logs import capture_logs
from vllm_headroom.model import GpuMemory, GpuProcess, GpuReadings
from vllm_headroom.scrape.nvml.reader import Nvml

UUID = "GPU-0000"
LIST_PROCESSES = f"nvmlDeviceGetComputeRunningProcesses_v3 {UUID}"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    with in_process(tmp_path, monkeypatch) as fake:
        yield fake


def test_a_full_reading_has_every_fact_in_base_units(fake: FakeNvml) -> None:
    fake.gpus[0] = FakeGpu(
        uuid=UUID,
        total_bytes=80 * GIB,
        used_bytes=70 * GIB,
        reserved_bytes=600 * MIB,
        utilization_percent=37,
        temperature_celsius=41,
        power_milliwatts=212_500,
        processes={4242: 69 * GIB},
    )
    fake.write()

    async def steps(nvml: Nvml) -> None:
        readings = await nvml.read(10)
        assert isinstance(readings, GpuReadings)
        (gpu,) = readings.devices

        assert readings.driver_version == "580.95.05"
        assert (gpu.index, gpu.uuid, gpu.name) == (0, UUID, "NVIDIA H100 80GB HBM3")
        assert gpu.memory == GpuMemory(
            total_bytes=80 * GIB,
            used_bytes=70 * GIB,
            free_bytes=10 * GIB - 600 * MIB,
            reserved_bytes=600 * MIB,
        )
        assert gpu.used_peak_bytes == 70 * GIB
        assert gpu.utilization_ratio == pytest.approx(0.37)
        assert gpu.temperature_celsius == pytest.approx(41)
        assert gpu.power_watts == pytest.approx(212.5)
        assert gpu.processes == (GpuProcess(pid=4242, used_bytes=69 * GIB),)
        assert gpu.xid_errors == ()
        assert gpu.failure is None

    run(steps)


def test_what_no_gpu_can_have_is_unknown(fake: FakeNvml) -> None:
    fake.gpus[0] = FakeGpu(
        uuid=UUID,
        total_bytes=2**64 - 1,
        used_bytes=2**63,
        utilization_percent=101,
        temperature_celsius=2**32 - 1,
        power_milliwatts=2**32 - 1,
        processes={4242: 2**63},
    )
    fake.write()

    async def steps(nvml: Nvml) -> None:
        (gpu,) = await devices(nvml)

        assert (gpu.memory, gpu.used_peak_bytes, gpu.failure) == (None, None, None)
        assert (gpu.utilization_ratio, gpu.temperature_celsius, gpu.power_watts) == (None, None, None)
        assert gpu.processes == (GpuProcess(pid=4242, used_bytes=None),)

    run(steps)


def test_without_memory_info_v2_used_contains_reserved_and_reserved_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(uuid=UUID, total_bytes=80 * GIB, used_bytes=70 * GIB, reserved_bytes=GIB)

    async def steps(nvml: Nvml) -> None:
        with capture_logs() as lines:
            readings = [(await devices(nvml))[0] for _ in range(2)]

        expected = GpuMemory(total_bytes=80 * GIB, used_bytes=71 * GIB, free_bytes=9 * GIB, reserved_bytes=None)
        assert [reading.memory for reading in readings] == [expected, expected]
        assert len([line for line in lines if "v2" in line["event"]]) == 1

    with in_process(tmp_path, monkeypatch, [gpu], no_v2=True):
        run(steps)


def test_what_is_not_supported_is_unknown_and_not_asked_again(fake: FakeNvml) -> None:
    async def steps(nvml: Nvml) -> None:
        for _ in range(3):
            (gpu,) = await devices(nvml)
            assert (gpu.utilization_ratio, gpu.temperature_celsius, gpu.power_watts) == (None, None, None)
            assert gpu.memory is not None

    run(steps)
    calls = fake.calls()

    for function in ("UtilizationRates", "Temperature", "PowerUsage"):
        assert calls.count(f"nvmlDeviceGet{function} {UUID}") == 1
    assert calls.count(f"nvmlDeviceGetMemoryInfo_v2 {UUID}") == 3


@pytest.mark.parametrize("code", [4, 13])
def test_a_process_list_that_is_not_allowed_or_missing_is_unknown_not_empty(fake: FakeNvml, code: int) -> None:
    fake.gpus[0].errors = {"nvmlDeviceGetComputeRunningProcesses_v3": code}
    fake.write()

    async def steps(nvml: Nvml) -> None:
        assert [(await devices(nvml))[0].processes for _ in range(2)] == [None, None]

    run(steps)

    assert fake.calls().count(LIST_PROCESSES) == 1


def test_a_fact_that_fails_once_is_asked_again(fake: FakeNvml) -> None:
    fake.gpus[0].power_milliwatts = 100_000
    fake.gpus[0].errors = {"nvmlDeviceGetPowerUsage": 999}
    fake.write()

    async def steps(nvml: Nvml) -> None:
        (gpu,) = await devices(nvml)
        assert gpu.power_watts is None
        assert gpu.failure is None

        fake.gpus[0].errors = {}
        fake.write()
        assert (await devices(nvml))[0].power_watts == pytest.approx(100)

    run(steps)


def test_process_memory_the_driver_does_not_tell_is_unknown(fake: FakeNvml) -> None:
    fake.gpus[0].processes = {7: None, 8: GIB}
    fake.write()

    async def steps(nvml: Nvml) -> None:
        assert (await devices(nvml))[0].processes == (
            GpuProcess(pid=7, used_bytes=None),
            GpuProcess(pid=8, used_bytes=GIB),
        )

    run(steps)


def test_the_process_list_is_renewed_after_its_interval(fake: FakeNvml) -> None:
    clock = Clock()

    async def steps(nvml: Nvml) -> None:
        for step_seconds, pids in ((0, ()), (14.9, ()), (0.2, (9,))):
            clock.seconds += step_seconds
            assert tuple(process.pid for process in (await devices(nvml))[0].processes or ()) == pids
            fake.gpus[0].processes = {9: MIB}
            fake.write()

    run(steps, monotonic=clock, process_interval_seconds=15.0)


@pytest.mark.parametrize(("age_seconds", "change_bytes", "lists"), [(1, 2 * MIB, 2), (1, MIB, 1), (0.5, GIB, 1)])
def test_the_process_list_is_renewed_when_memory_moved_unless_it_is_brand_new(
    fake: FakeNvml, age_seconds: float, change_bytes: int, lists: int
) -> None:
    clock = Clock()

    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        fake.gpus[0].used_bytes += change_bytes
        fake.write()
        clock.seconds += age_seconds
        await devices(nvml)

    run(steps, monotonic=clock)

    assert fake.calls().count(LIST_PROCESSES) == lists


def meminfo(folder: Path, *, total: int, available: int) -> Path:
    """Write a /proc that shows the machine's memory, and return it."""
    (folder / "meminfo").write_text(f"MemTotal: {total >> 10} kB\nMemFree: 9 kB\nMemAvailable: {available >> 10} kB\n")
    return folder


def test_unified_memory_is_the_machines_and_its_processes_are_nvmls(fake: FakeNvml, tmp_path: Path) -> None:
    fake.gpus[0] = FakeGpu(uuid=UUID, name="NVIDIA GB10", total_bytes=None, processes={5: 37 * GIB})
    fake.write()
    proc = meminfo(tmp_path, total=120 * GIB, available=70 * GIB)
    (proc / "buddyinfo").write_text("Node 0, zone Normal 7 0 0 0 0 0 0 0 0 0 256\n")

    async def steps(nvml: Nvml) -> None:
        (gpu_before,) = await devices(nvml)
        meminfo(tmp_path, total=120 * GIB, available=60 * GIB)
        (gpu_after,) = await devices(nvml)

        assert gpu_before.memory == GpuMemory(
            total_bytes=120 * GIB,
            used_bytes=50 * GIB,
            free_bytes=70 * GIB,
            reserved_bytes=None,
            machine_available_bytes=70 * GIB,
            machine_free_blocks_bytes=1024 * os.sysconf("SC_PAGE_SIZE") * 256,
        )
        assert gpu_after.memory is not None
        assert (gpu_after.memory.used_bytes, gpu_after.used_peak_bytes) == (60 * GIB, 60 * GIB)
        assert gpu_after.processes == (GpuProcess(pid=5, used_bytes=37 * GIB),)

    run(steps, proc=proc)


def test_of_several_cards_none_is_taken_for_unified(fake: FakeNvml, tmp_path: Path) -> None:
    fake.gpus = [FakeGpu(uuid="GPU-0"), FakeGpu(uuid="GPU-1", total_bytes=None)]
    fake.write()

    async def steps(nvml: Nvml) -> None:
        assert [gpu.memory is not None for gpu in await devices(nvml)] == [True, False]

    run(steps, proc=meminfo(tmp_path, total=120 * GIB, available=70 * GIB))


def test_a_card_that_fails_for_a_moment_is_not_taken_for_unified(fake: FakeNvml, tmp_path: Path) -> None:
    proc = meminfo(tmp_path, total=120 * GIB, available=70 * GIB)

    async def steps(nvml: Nvml) -> None:
        assert (await devices(nvml))[0].memory is not None
        for code in (3, 4, 13):
            fake.gpus[0].errors = {"nvmlDeviceGetMemoryInfo_v2": code}
            fake.write()
            assert (await devices(nvml))[0].memory is None

    run(steps, proc=proc)


def test_memory_that_nobody_tells_is_unknown_and_the_rest_known(fake: FakeNvml, tmp_path: Path) -> None:
    fake.gpus[0] = FakeGpu(uuid=UUID, name="NVIDIA GB10", total_bytes=None, processes={5: 37 * GIB})
    fake.write()

    async def steps(nvml: Nvml) -> None:
        with capture_logs() as lines:
            gpu = [(await devices(nvml))[0] for _ in range(2)][1]

        assert (gpu.memory, gpu.used_peak_bytes, gpu.failure) == (None, None, None)
        assert gpu.processes == (GpuProcess(pid=5, used_bytes=37 * GIB),)
        assert [line["event"] for line in lines] == ["GPU does not report its memory: its memory series are absent"]

    run(steps, proc=tmp_path)
