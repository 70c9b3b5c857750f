"""NVIDIA's GPUs and AMD's, side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pynvml
import pytest

from tests.fakes.amd_tree import GIB, AmdTree
from tests.fakes.nvml.library import FakeNvml
from tests.fakes.nvml.reader import reasons
from tests.fakes.proc_tree import ProcTree
from vllm_headroom.model import Failure, GpuReading, GpuReadings, Vendor
from vllm_headroom.scrape.gpus import Gpus
from vllm_headroom.vocabulary import Reason

T = TypeVar("T")
CARDS = ("0000:c1:00.0", "0000:e5:00.0")


@pytest.fixture
def no_nvidia(nvml: FakeNvml) -> FakeNvml:
    nvml.errors = {"nvmlInitWithFlags": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}
    nvml.write()
    return nvml


@pytest.fixture
def sys(tmp_path: Path) -> AmdTree:
    return AmdTree(tmp_path / "sys")


@pytest.fixture
def proc(tmp_path: Path) -> ProcTree:
    (tmp_path / "proc").mkdir()
    return ProcTree(tmp_path / "proc")


def add(sys: AmdTree) -> None:
    for number, address in enumerate(CARDS):
        sys.add(address, card=number + 1, unique_id=f"{number:016}")


def run(sys: AmdTree, proc: ProcTree, steps: Callable[[Gpus], Awaitable[T]]) -> T:
    async def main() -> T:
        gpus = Gpus(monotonic=time.monotonic, sys=sys.path, proc=proc.path)
        try:
            return await steps(gpus)
        finally:
            await gpus.close()

    return asyncio.run(main())


async def devices(gpus: Gpus) -> tuple[GpuReading, ...]:
    readings = await gpus.read(10)
    assert isinstance(readings, GpuReadings), readings
    return readings.devices


@pytest.mark.usefixtures("nvml")
def test_amds_cards_are_counted_on_after_nvidias(sys: AmdTree, proc: ProcTree) -> None:
    add(sys)

    result = run(sys, proc, devices)

    assert [(gpu.index, gpu.vendor) for gpu in result] == [
        (0, Vendor.NVIDIA),
        (1, Vendor.NVIDIA),
        (2, Vendor.AMD),
        (3, Vendor.AMD),
    ]


@pytest.mark.usefixtures("no_nvidia")
def test_where_nvidia_has_none_amds_are_counted_from_the_first(sys: AmdTree, proc: ProcTree) -> None:
    add(sys)

    result = run(sys, proc, devices)

    assert [(gpu.index, gpu.vendor, gpu.failure) for gpu in result] == [(0, Vendor.AMD, None), (1, Vendor.AMD, None)]


@pytest.mark.usefixtures("no_nvidia")
def test_where_there_is_neither_both_ways_are_named(sys: AmdTree, proc: ProcTree) -> None:
    readings = run(sys, proc, lambda gpus: gpus.read(10))

    assert isinstance(readings, Failure)
    assert readings.reason is Reason.DRIVER_MISSING
    assert readings.message == (
        "the NVIDIA driver is not loaded on this node: load it, or move the pod to a node with GPUs (NVML error 9);"
        " nor is there a card of AMD's driver amdgpu in /sys/class/drm"
    )


def test_an_ill_driver_of_nvidias_alone_is_reported_as_it_is(nvml: FakeNvml, sys: AmdTree, proc: ProcTree) -> None:
    nvml.errors = {"nvmlInitWithFlags": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}
    nvml.write()

    readings = run(sys, proc, lambda gpus: gpus.read(10))

    assert isinstance(readings, Failure)
    assert readings.reason is Reason.VERSION_MISMATCH
    assert "amdgpu" not in readings.message


def test_an_ill_driver_of_nvidias_costs_amds_cards_nothing(nvml: FakeNvml, sys: AmdTree, proc: ProcTree) -> None:
    add(sys)

    async def steps(gpus: Gpus) -> None:
        await gpus.read(10)
        nvml.errors = {"nvmlDeviceGetMemoryInfo_v2": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}
        nvml.write()

        gpus_found = await devices(gpus)

        assert reasons(gpus_found) == [Reason.VERSION_MISMATCH, Reason.VERSION_MISMATCH, None, None]
        assert [(gpu.index, gpu.uuid) for gpu in gpus_found[:2]] == [(0, "GPU-a"), (1, "GPU-b")]

        assert [gpu.index for gpu in await devices(gpus)] == [0, 1, 2, 3], "while it is not tried again"

    run(sys, proc, steps)


def test_a_driver_of_nvidias_that_is_ill_from_the_start_is_not_passed_over(
    nvml: FakeNvml, sys: AmdTree, proc: ProcTree
) -> None:
    add(sys)
    nvml.errors = {"nvmlInitWithFlags": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}
    nvml.write()

    result = run(sys, proc, devices)

    assert [(gpu.index, gpu.uuid) for gpu in result][:2] == [(0, ""), (1, "GPU-0000000000000000")]
    assert reasons(result) == [Reason.VERSION_MISMATCH, None, None]


@pytest.mark.usefixtures("nvml")
def test_beside_other_gpus_the_processors_own_is_left_out(sys: AmdTree, proc: ProcTree) -> None:
    apu(sys, proc)

    assert [gpu.uuid for gpu in run(sys, proc, devices)] == ["GPU-a", "GPU-b"]


@pytest.mark.usefixtures("no_nvidia")
def test_beside_amds_own_cards_the_processors_is_left_out(sys: AmdTree, proc: ProcTree) -> None:
    apu(sys, proc)
    sys.add(CARDS[1], card=2, unique_id="f" * 16)

    (gpu,) = run(sys, proc, devices)

    assert gpu.uuid == "GPU-ffffffffffffffff"


@pytest.mark.usefixtures("nvml")
def test_a_card_that_does_not_tell_its_memory_is_not_taken_for_the_processors(sys: AmdTree, proc: ProcTree) -> None:
    (sys.add(CARDS[0], card=1).folder / "mem_info_vram_total").unlink()

    assert len(run(sys, proc, devices)) == 3


@pytest.mark.usefixtures("no_nvidia")
def test_alone_the_processors_own_is_the_gpu(sys: AmdTree, proc: ProcTree) -> None:
    apu(sys, proc)

    (gpu,) = run(sys, proc, devices)

    assert gpu.memory is not None
    assert gpu.memory.is_unified


def test_a_lost_card_stays_listed_beside_others(nvml: FakeNvml, sys: AmdTree, proc: ProcTree) -> None:
    assert nvml.gpus
    add(sys)

    async def steps(gpus: Gpus) -> None:
        await gpus.read(10)
        sys.remove(CARDS[0])

        assert len(await gpus.sample_used(10)) == 3
        assert reasons(await devices(gpus)) == [None, None, Reason.DEVICE_LOST, None]

    run(sys, proc, steps)


@pytest.mark.usefixtures("nvml")
def test_each_gpu_says_what_it_knows_of_faults_in_its_memory(sys: AmdTree, proc: ProcTree) -> None:
    add(sys)

    async def steps(gpus: Gpus) -> None:
        await gpus.read(10)
        gpu_faults = await gpus.read_faults(10)

        assert [faults.index for faults in gpu_faults] == [0, 1, 2, 3]
        assert gpu_faults[2].ecc is None

    run(sys, proc, steps)


def apu(sys: AmdTree, proc: ProcTree) -> None:
    sys.add(CARDS[0], card=1, product=None, total_bytes=GIB // 2)
    sys.add_node(CARDS[0], 7, 15 * GIB)
    (proc.path / "meminfo").write_text(f"MemTotal: {30 * 2**20} kB\nMemAvailable: {20 * 2**20} kB\n")
