"""GPUs that several share: by MPS, as a vGPU in a guest, and by a layer like HAMi's. MIG is in test_mig."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.fakes.nvml.reader import devices, in_process, run
from vllm_headroom.model import GpuProcess, GpuReading
from vllm_headroom.scrape.nvml.reader import Nvml

UUID = "GPU-0000"
COMPUTE, MPS = (f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in ("Compute", "MPSCompute"))
NOT_SUPPORTED, FUNCTION_NOT_FOUND, NO_PERMISSION = 3, 13, 4


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    with in_process(tmp_path, monkeypatch) as fake:
        yield fake


def only(fake: FakeNvml) -> GpuReading:
    fake.write()

    async def steps(nvml: Nvml) -> GpuReading:
        (gpu,) = await devices(nvml)
        return gpu

    return run(steps)


def test_the_clients_of_mps_are_processes_beside_its_server(fake: FakeNvml) -> None:
    fake.gpus[0].processes = {100: 30 * 2**20}
    fake.gpus[0].clients = {4242: 20 * GIB, 4243: None}

    assert only(fake).processes == (
        GpuProcess(pid=100, used_bytes=30 * 2**20),
        GpuProcess(pid=4242, used_bytes=20 * GIB),
        GpuProcess(pid=4243, used_bytes=None),
    )


def test_a_client_that_is_listed_twice_counts_once(fake: FakeNvml) -> None:
    fake.gpus[0].processes = {100: 30 * 2**20, 4242: 20 * GIB}
    fake.gpus[0].clients = {4242: 20 * GIB}

    assert [process.pid for process in only(fake).processes or ()] == [100, 4242]


@pytest.mark.parametrize("code", [NOT_SUPPORTED, FUNCTION_NOT_FOUND, NO_PERMISSION])
def test_a_driver_that_knows_no_mps_lists_its_processes_as_ever(fake: FakeNvml, code: int) -> None:
    fake.gpus[0].processes = {4242: 20 * GIB}
    fake.gpus[0].errors = {MPS: code}

    assert only(fake).processes == (GpuProcess(pid=4242, used_bytes=20 * GIB),)


def test_where_nothing_computes_nobody_asks_for_clients_of_mps(fake: FakeNvml) -> None:
    assert only(fake).processes == ()
    assert f"{COMPUTE} {UUID}" in fake.calls()
    assert f"{MPS} {UUID}" not in fake.calls()


def test_a_vgpu_has_the_guests_memory_and_no_list_of_processes(fake: FakeNvml) -> None:
    """A guest's driver does not list processes, and does not tell the host's temperature and power."""
    fake.gpus[0] = FakeGpu(uuid=UUID, name="NVIDIA A100-40C", total_bytes=40 * GIB, used_bytes=35 * GIB)
    fake.gpus[0].errors = {COMPUTE: NOT_SUPPORTED}

    gpu = only(fake)

    assert gpu.processes is None
    assert gpu.memory is not None
    assert (gpu.memory.total_bytes, gpu.memory.used_bytes) == (40 * GIB, 35 * GIB)
    assert (gpu.temperature_celsius, gpu.power_watts, gpu.failure) == (None, None, None)


def test_a_list_that_a_vgpu_never_tells_is_asked_for_once(fake: FakeNvml) -> None:
    fake.gpus[0].errors = {COMPUTE: NOT_SUPPORTED}
    fake.write()

    async def steps(nvml: Nvml) -> None:
        for _ in range(3):
            await devices(nvml)

        assert fake.calls().count(f"{COMPUTE} {UUID}") == 1

    run(steps)


@pytest.mark.parametrize(("used", "reserved"), [(2**64 - GIB, 0), (81 * GIB, 0), (79 * GIB, 2 * GIB)])
def test_memory_that_a_sharing_library_reckons_below_zero_is_unknown_and_leaves_no_peak(
    fake: FakeNvml, used: int, reserved: int
) -> None:
    """HAMi's shows what is used, or free, as some 2**64 bytes (Project-HAMi/HAMi#1181, HAMi-core#200)."""
    (gpu,) = fake.gpus
    gpu.used_bytes, gpu.reserved_bytes, gpu.temperature_celsius = used, reserved, 41

    reading = only(fake)

    assert (reading.memory, reading.used_peak_bytes, reading.failure) == (None, None, None)
    assert reading.temperature_celsius == 41
