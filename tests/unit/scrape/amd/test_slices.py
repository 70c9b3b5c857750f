"""Cards that are cut, and cards without separate memory."""

import pytest

from tests.fakes.amd_tree import DRIVER_BYTES, GIB, MI300X_BYTES, AmdCard
from tests.fakes.nobody import nobody
from tests.unit.scrape.amd.conftest import PATIENCE_SECONDS, Machine
from vllm_headroom.model import GpuMemory, GpuProcess
from vllm_headroom.scrape.amd.reader import Amd

CARD = "0000:0a:00.0"
PARTS = 8
PART_BYTES = MI300X_BYTES // PARTS


def cut(machine: Machine) -> AmdCard:
    """Add an MI300X in CPX and NPS4: eight nodes of KFD, one PCI device that reports them all."""
    card = machine.sys.add(CARD, card=1, used_bytes=100 * GIB)
    card.tell(current_compute_partition="CPX")
    for part in range(PARTS):
        machine.sys.add_node(CARD, 1000 + part, PART_BYTES, part=part)
        platform = machine.sys.path / "devices" / "platform" / f"amdgpu_xcp_{part}"
        platform.mkdir(parents=True)
        (machine.sys.drm / f"card{part + 2}").mkdir()
        (machine.sys.drm / f"card{part + 2}" / "device").symlink_to(platform)
    return card


def test_each_part_of_a_cut_card_has_its_own_memory_and_processes(machine: Machine) -> None:
    cut(machine)
    machine.sys.hold(4242, {1000 + part: 0 for part in range(PARTS)} | {1003: 20 * GIB})
    machine.sys.hold(4243, {1003: GIB, 1004: 2 * GIB})

    gpus = machine.read()

    assert [(gpu.index, gpu.uuid) for gpu in gpus] == [(0, f"GPU-fc1d2a3b4c5d6e7f-{part}") for part in range(PARTS)]
    assert gpus[3].memory == GpuMemory(
        total_bytes=PART_BYTES, used_bytes=21 * GIB, free_bytes=PART_BYTES - 21 * GIB, reserved_bytes=None
    )
    assert gpus[3].processes == (
        GpuProcess(pid=4242, used_bytes=20 * GIB),
        GpuProcess(pid=4243, used_bytes=GIB),
    )
    assert gpus[3].name == "AMD Instinct MI300X OAM partition 3"
    assert gpus[3].display_name == "GPU 0 partition 3"
    assert (gpus[0].memory and gpus[0].memory.used_bytes, gpus[0].processes) == (0, ())
    assert all((gpu.power_watts, gpu.utilization_ratio) == (None, None) for gpu in gpus), "they are the whole card's"


@pytest.mark.parametrize("bank_text", ["", "size_in_bytes much\n", f"size_in_bytes {'9' * 5000}\n"])
def test_a_part_of_which_one_memory_bank_cannot_be_read_has_no_memory(machine: Machine, bank_text: str) -> None:
    """The sum of the others would be less than its processes may take."""
    machine.sys.add(CARD, card=1)
    banks = machine.sys.add_node(CARD, 1, GIB) / "mem_banks"
    machine.sys.add_node(CARD, 2, GIB, part=1)
    (banks / "1").mkdir()
    second = banks / "1" / "properties"

    second.write_text(f"size_in_bytes {2 * GIB}\n")
    whole_card, _ = machine.read()
    second.write_text(bank_text)
    half, _ = machine.read()

    assert whole_card.memory is not None
    assert (whole_card.memory.total_bytes, half.memory) == (3 * GIB, None)


def test_a_part_whose_size_or_use_is_not_reported_has_no_memory(machine: Machine) -> None:
    machine.sys.add(CARD, card=1)
    machine.sys.add_node(CARD, 1, None)
    machine.sys.add_node(CARD, 2, GIB, part=1)
    machine.sys.hold(4242, {2: 1})
    (machine.sys.kfd / "proc" / "4242" / "vram_2").write_text("much\n")

    sizeless, useless = machine.read()

    assert (sizeless.memory, sizeless.processes) == (None, ())
    assert (useless.memory, useless.processes) == (None, (GpuProcess(pid=4242, used_bytes=None),))


def test_a_card_that_is_cut_again_is_read_again(machine: Machine) -> None:
    card = cut(machine)

    async def steps(amd: Amd) -> None:
        assert len(await amd.read(PATIENCE_SECONDS)) == PARTS
        card.tell(current_compute_partition="SPX")
        machine.sys.without_nodes()
        machine.sys.add_node(CARD, 51_110)

        (whole_card,) = await amd.read(PATIENCE_SECONDS)

        assert whole_card.memory is not None
        assert (whole_card.uuid, whole_card.memory.total_bytes) == ("GPU-fc1d2a3b4c5d6e7f", MI300X_BYTES)

    machine.run(steps)


def test_a_cut_card_of_which_kfd_may_not_tell_has_no_memory(machine: Machine) -> None:
    """In a container without the card's devices: what is free on the card is not what is free on a part of it."""
    cut(machine)
    hide(machine)

    with nobody():
        (gpu,) = machine.read()

    assert (gpu.memory, gpu.failure) == (None, None)


def test_a_whole_card_of_which_kfd_may_not_tell_has_its_memory(machine: Machine) -> None:
    machine.sys.add(CARD, card=1)
    machine.sys.add_node(CARD, 51_110)
    hide(machine)

    with nobody():
        (gpu,) = machine.read()

    assert gpu.memory is not None
    assert gpu.memory.used_bytes == DRIVER_BYTES


def test_an_apu_with_little_of_its_own_works_on_the_machines_memory(machine: Machine) -> None:
    apu(machine, own_bytes=GIB // 2, granted_bytes=62 * GIB)
    meminfo(machine, available_gib=90)

    (gpu,) = machine.read()

    assert gpu.memory == GpuMemory(
        total_bytes=62 * GIB,
        used_bytes=22 * GIB,
        free_bytes=40 * GIB,
        reserved_bytes=None,
        machine_available_bytes=90 * GIB,
    )


def test_an_apu_can_take_no_more_than_the_machine_has(machine: Machine) -> None:
    apu(machine, own_bytes=GIB // 2, granted_bytes=62 * GIB)
    meminfo(machine, available_gib=10)

    (gpu,) = machine.read()

    assert gpu.memory is not None
    assert (gpu.memory.free_bytes, gpu.memory.used_bytes) == (10 * GIB, 52 * GIB)


def test_an_apu_whose_machine_does_not_tell_has_no_memory(machine: Machine) -> None:
    apu(machine, own_bytes=GIB // 2, granted_bytes=62 * GIB)

    (gpu,) = machine.read()

    assert gpu.memory is None


def test_an_apu_with_much_of_its_own_works_on_that(machine: Machine) -> None:
    apu(machine, own_bytes=96 * GIB, granted_bytes=96 * GIB)

    (gpu,) = machine.read()

    assert gpu.memory is not None
    assert (gpu.memory.total_bytes, gpu.memory.is_unified) == (96 * GIB, False)


def test_an_apu_of_which_kfd_may_not_tell_has_no_memory(machine: Machine) -> None:
    apu(machine, own_bytes=GIB // 2, granted_bytes=62 * GIB)
    meminfo(machine, available_gib=90)
    hide(machine)

    async def steps(amd: Amd) -> None:
        (gpu,) = await amd.read(PATIENCE_SECONDS)

        assert gpu.memory is None
        assert amd.integrated_uuids == {gpu.uuid}

    with nobody():
        machine.run(steps)


def apu(machine: Machine, *, own_bytes: int, granted_bytes: int) -> None:
    card = machine.sys.add("0000:c5:00.0", card=1, product=None, total_bytes=own_bytes, used_bytes=GIB // 4)
    card.tell(mem_info_gtt_used=22 * GIB)
    card.sense(in1_label="vddnb", in1_input=800)
    machine.sys.add_node("0000:c5:00.0", 7, granted_bytes)


def meminfo(machine: Machine, *, available_gib: int) -> None:
    text = f"MemTotal: {125 * 2**20} kB\nMemFree: 9 kB\nMemAvailable: {available_gib * 2**20} kB\n"
    (machine.proc.path / "meminfo").write_text(text)


def hide(machine: Machine) -> None:
    """Let KFD refuse to tell of its nodes, as it does to a container that may not open the card's device."""
    for node in (machine.sys.kfd / "topology" / "nodes").iterdir():
        if node.name != "0":
            for name in ("gpu_id", "properties"):
                (node / name).chmod(0)
