import asyncio
import os
import stat
from pathlib import Path

import pytest

from tests.fakes.amd_tree import GIB
from tests.fakes.nobody import nobody
from tests.fakes.nvml.reader import reasons
from tests.unit.scrape.amd.conftest import PATIENCE_SECONDS, Machine
from vllm_headroom.model import GpuReading, Vendor
from vllm_headroom.scrape.amd.reader import Amd
from vllm_headroom.vocabulary import Reason, Source

CARD, OTHER = "0000:c1:00.0", "0000:e5:00.0"
USED = "mem_info_vram_used"


def in_place(file: Path, target: str) -> None:
    """Let the kernel answer for a file."""
    file.unlink()
    file.symlink_to(target)


def only(machine: Machine) -> GpuReading:
    (gpu,) = machine.read()
    return gpu


@pytest.mark.parametrize("memory_text", ["", "\n", "lots\n", "0x1000\n"])
def test_memory_that_is_no_number_is_a_failure_of_that_card(machine: Machine, memory_text: str) -> None:
    machine.sys.add(CARD, card=1, unique_id="a" * 16).folder.joinpath(USED).write_text(memory_text)
    machine.sys.add(OTHER, card=2, unique_id="b" * 16)

    ill, well = machine.read()

    assert (reasons((ill, well)), ill.memory) == ([Reason.DRIVER_ERROR, None], None)
    assert ill.failure is not None
    assert ill.failure.source is Source.NVML
    assert ill.failure.message == (
        "the GPU cannot be read: look for amdgpu lines in the node's kernel log (mem_info_vram_used holds no number)"
    )
    assert well.memory is not None


def test_a_read_error_is_a_failure_of_that_card(machine: Machine) -> None:
    """The start of a process's memory cannot be read: EIO, of the kernel's own."""
    in_place(machine.sys.add(CARD, card=1).folder / USED, "/proc/self/mem")

    gpu = only(machine)

    assert reasons((gpu,)) == [Reason.DRIVER_ERROR]
    assert gpu.failure is not None
    assert gpu.failure.message.endswith("kernel log (Input/output error)")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a device")
def test_a_device_that_is_no_more_is_lost(machine: Machine) -> None:
    file = machine.sys.add(CARD, card=1).folder / USED
    file.unlink()
    try:
        os.mknod(file, stat.S_IFCHR | 0o444, os.makedev(10, 250))  # no driver has this number
        descriptor = os.open(file, os.O_RDONLY)
    except PermissionError:
        pytest.skip("devices may not be made, or not be opened here")
    except OSError as error:
        assert error.strerror == "No such device"  # noqa: PT017 - else this proves nothing
    else:
        os.close(descriptor)

    assert reasons((only(machine),)) == [Reason.DEVICE_LOST]


def test_memory_that_may_not_be_read_is_reported_as_that(machine: Machine) -> None:
    machine.sys.add(CARD, card=1).folder.joinpath(USED).chmod(0)

    with nobody():
        gpu = only(machine)

    assert reasons((gpu,)) == [Reason.NO_PERMISSION]


@pytest.mark.parametrize("fact", ["mem_info_vram_total", "mem_info_vram_used"])
def test_a_driver_that_does_not_tell_memory_has_a_card_without(machine: Machine, fact: str) -> None:
    machine.sys.add(CARD, card=1).folder.joinpath(fact).unlink()

    gpu = only(machine)

    assert (gpu.failure, gpu.memory, gpu.used_peak_bytes) == (None, None, None)


def test_sensors_and_load_that_are_not_reported_are_absent(machine: Machine) -> None:
    card = machine.sys.add(CARD, card=1)
    in_place(card.folder / "gpu_busy_percent", "/proc/self/mem")
    card.sense(power1_input="", temp2_input="hot")

    gpu = only(machine)

    assert (gpu.utilization_ratio, gpu.temperature_celsius, gpu.power_watts) == (None, None, None)
    assert gpu.memory is not None


def test_a_card_without_sensors_is_read(machine: Machine) -> None:
    sensors = machine.sys.add(CARD, card=1).sensors
    for file in sensors.iterdir():
        file.unlink()
    sensors.rmdir()

    gpu = only(machine)

    assert (gpu.temperature_celsius, gpu.power_watts, gpu.failure) == (None, None, None)


def test_a_card_that_vanishes_is_lost_and_comes_back_as_itself(machine: Machine) -> None:
    machine.sys.add(CARD, card=1, unique_id="a" * 16)
    machine.sys.add(OTHER, card=2, unique_id="b" * 16)

    async def steps(amd: Amd) -> None:
        assert reasons(await amd.read(PATIENCE_SECONDS)) == [None, None]

        machine.sys.remove(CARD)
        await amd.sample_used(PATIENCE_SECONDS)
        lost, well = await amd.read(PATIENCE_SECONDS)

        assert reasons((lost, well)) == [Reason.DEVICE_LOST, None]
        assert (lost.index, lost.uuid, lost.name) == (0, f"GPU-{'a' * 16}", "AMD Instinct MI300X OAM")
        assert (lost.vendor, lost.memory, well.index) == (Vendor.AMD, None, 1)

        machine.sys.add(CARD, card=1, unique_id="a" * 16, used_bytes=2 * GIB)
        back, _ = await amd.read(PATIENCE_SECONDS)

        assert (back.index, back.uuid, back.failure) == (0, f"GPU-{'a' * 16}", None)

    machine.run(steps)


def test_a_cut_card_that_vanishes_is_lost_with_its_parts(machine: Machine) -> None:
    machine.sys.add(CARD, card=1)
    for part in range(2):
        machine.sys.add_node(CARD, 10 + part, 12 * GIB, part=part)

    async def steps(amd: Amd) -> None:
        await amd.read(PATIENCE_SECONDS)
        machine.sys.remove(CARD)
        lost = await amd.read(PATIENCE_SECONDS)

        assert reasons(lost) == [Reason.DEVICE_LOST] * 2
        assert [gpu.uuid[-2:] for gpu in lost] == ["-0", "-1"]

    machine.run(steps)


def test_a_card_that_another_driver_takes_over_is_lost(machine: Machine) -> None:
    card = machine.sys.add(CARD, card=1)

    async def steps(amd: Amd) -> None:
        await amd.read(PATIENCE_SECONDS)
        in_place(card.folder / "driver", str(machine.sys.path / "bus" / "pci" / "drivers" / "ast"))
        (card.folder / USED).unlink()

        assert reasons(await amd.read(PATIENCE_SECONDS)) == [Reason.DEVICE_LOST]

    machine.run(steps)


def test_a_driver_that_does_not_answer_costs_the_reading_its_time_and_is_waited_for(machine: Machine) -> None:
    """A pipe without a writer holds who opens it, as an ill driver does."""
    card = machine.sys.add(CARD, card=1)
    busy = card.folder / "gpu_busy_percent"

    async def steps(amd: Amd) -> None:
        assert reasons(await amd.read(PATIENCE_SECONDS)) == [None]
        busy.unlink()
        os.mkfifo(busy)

        assert reasons(await amd.read(0.05)) == [Reason.TIMEOUT]
        assert reasons(await amd.read(PATIENCE_SECONDS)) == [Reason.TIMEOUT], "at once, behind the call that hangs"

        with busy.open("w") as stream:
            stream.write("12\n")
        busy.unlink()
        card.tell(gpu_busy_percent=12)
        (gpu,) = await amd.read(PATIENCE_SECONDS)
        while gpu.failure is not None:  # the call that hung is on its way back
            await asyncio.sleep(0.01)
            (gpu,) = await amd.read(PATIENCE_SECONDS)

        assert gpu.utilization_ratio == 0.12

    machine.run(steps)
