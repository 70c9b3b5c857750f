import shutil

from tests.fakes.amd_tree import DRIVER_BYTES, GIB, MI300X_BYTES, open_card
from tests.unit.scrape.amd.conftest import PATIENCE_SECONDS, Machine
from vllm_headroom.model import GpuMemory, GpuProcess, Vendor
from vllm_headroom.scrape.amd.reader import Amd

CARD = "0000:c1:00.0"


def test_a_full_reading_has_every_fact_in_base_units(machine: Machine) -> None:
    card = machine.sys.add(CARD, card=1, used_bytes=150 * GIB)
    card.tell(gpu_busy_percent=37)
    machine.sys.add_node(CARD, 51_110)
    machine.sys.hold(4242, {51_110: 149 * GIB})

    (gpu,) = machine.read()

    assert (gpu.vendor, gpu.index, gpu.uuid, gpu.name) == (
        Vendor.AMD,
        0,
        "GPU-fc1d2a3b4c5d6e7f",
        "AMD Instinct MI300X OAM",
    )
    assert gpu.memory == GpuMemory(
        total_bytes=MI300X_BYTES,
        used_bytes=150 * GIB,
        free_bytes=MI300X_BYTES - 150 * GIB,
        reserved_bytes=None,
    )
    assert gpu.used_peak_bytes == 150 * GIB
    assert (gpu.utilization_ratio, gpu.temperature_celsius, gpu.power_watts) == (0.37, 41.0, 138.0)
    assert gpu.processes == (GpuProcess(pid=4242, used_bytes=149 * GIB),)
    assert gpu.failure is None


def test_a_machine_without_a_card_has_no_reading(machine: Machine) -> None:
    assert machine.read() == ()


def test_cards_are_counted_by_pci_address_whatever_drm_calls_them(machine: Machine) -> None:
    for number, bus in enumerate(("e5", "05", "9f")):
        machine.sys.add(f"0000:{bus}:00.0", card=number + 1, unique_id=f"{bus:0>16}")

    assert [gpu.uuid[-2:] for gpu in machine.read()] == ["05", "9f", "e5"]


def test_a_card_that_is_numbered_again_in_drm_stays_the_same(machine: Machine) -> None:
    machine.sys.add(CARD, card=1)

    async def steps(amd: Amd) -> None:
        old_reading = await amd.read(PATIENCE_SECONDS)
        (machine.sys.drm / "card1").rename(machine.sys.drm / "card7")

        assert await amd.read(PATIENCE_SECONDS) == old_reading

    machine.run(steps)


def test_a_card_that_comes_later_does_not_move_the_others(machine: Machine) -> None:
    machine.sys.add(CARD, card=1, unique_id="a" * 16)

    async def steps(amd: Amd) -> None:
        await amd.read(PATIENCE_SECONDS)
        machine.sys.add("0000:05:00.0", card=2, unique_id="b" * 16)

        readings = await amd.read(PATIENCE_SECONDS)

        assert [(gpu.index, gpu.uuid) for gpu in readings] == [(0, f"GPU-{'a' * 16}"), (1, f"GPU-{'b' * 16}")]

    machine.run(steps)


def test_an_older_card_senses_at_its_edge_and_tells_its_average_power(machine: Machine) -> None:
    machine.sys.add(CARD, card=1).sense(temp1_input=52_000, power1_average=87_250_000)

    (gpu,) = machine.read()

    assert (gpu.temperature_celsius, gpu.power_watts) == (52.0, 87.25)


def test_a_card_that_comes_back_at_another_address_is_the_same(machine: Machine) -> None:
    for address, unique_id in ((CARD, "a" * 16), ("0000:e5:00.0", "b" * 16)):
        machine.sys.add(address, card=len(list(machine.sys.drm.iterdir())), unique_id=unique_id)

    async def steps(amd: Amd) -> None:
        readings_before = await amd.read(PATIENCE_SECONDS)
        machine.sys.remove(CARD)
        machine.sys.add("0000:f1:00.0", card=9, unique_id="a" * 16)

        assert await amd.read(PATIENCE_SECONDS) == readings_before

    machine.run(steps)


def test_cards_that_share_an_id_are_distinguished_by_their_addresses(machine: Machine) -> None:
    for number, address in enumerate((CARD, "0000:e5:00.0")):
        machine.sys.add(address, card=number + 1)

    assert [gpu.uuid for gpu in machine.read()] == [f"PCI-{CARD}", "PCI-0000:e5:00.0"]


def test_a_card_without_an_id_or_a_name_is_called_by_its_address_and_its_kind(machine: Machine) -> None:
    machine.sys.add(CARD, card=1, unique_id=None, product=None)

    (gpu,) = machine.read()

    assert (gpu.uuid, gpu.name) == (f"PCI-{CARD}", "AMD GPU 0x74a1")


def test_the_peak_is_that_of_the_fast_looks_too(machine: Machine) -> None:
    card = machine.sys.add(CARD, card=1)

    async def steps(amd: Amd) -> None:
        await amd.read(PATIENCE_SECONDS)
        card.tell(mem_info_vram_used=9 * GIB)
        assert list((await amd.sample_used(PATIENCE_SECONDS)).values()) == [9 * GIB]

        card.tell(mem_info_vram_used=DRIVER_BYTES)
        (gpu,) = await amd.read(PATIENCE_SECONDS)

        assert gpu.memory is not None
        assert (gpu.memory.used_bytes, gpu.used_peak_bytes) == (DRIVER_BYTES, 9 * GIB)

        machine.clock.seconds += 61
        (gpu,) = await amd.read(PATIENCE_SECONDS)

        assert gpu.used_peak_bytes == DRIVER_BYTES

    machine.run(steps)


def test_a_process_is_listed_where_it_holds_memory_and_nowhere_else(machine: Machine) -> None:
    for number, bus in enumerate(("05", "c1")):
        machine.sys.add(f"0000:{bus}:00.0", card=number + 1, unique_id=f"{bus:0>16}")
        machine.sys.add_node(f"0000:{bus}:00.0", 100 + number)
    machine.sys.hold(4242, {100: 0, 101: 3 * GIB})
    machine.sys.hold(17, {100: 0, 101: 0})

    assert [gpu.processes for gpu in machine.read()] == [(), (GpuProcess(pid=4242, used_bytes=3 * GIB),)]


def test_where_kfd_is_silent_the_processes_own_files_tell(machine: Machine) -> None:
    """A card with a render node, on a machine without KFD."""
    machine.sys.add(CARD, card=1)
    shutil.rmtree(machine.sys.path / "class" / "kfd")
    machine.proc.add(4242, 1, "python3", "serve.py")
    open_card(machine.proc, 4242, 11, CARD, client=7, vram_kib=1024)
    open_card(machine.proc, 4242, 12, CARD, client=7, vram_kib=1024)
    open_card(machine.proc, 4242, 13, CARD, client=8, vram_kib=512)
    open_card(machine.proc, 4242, 14, "0000:05:00.0", client=9, vram_kib=4096)
    (machine.proc.path / "4242" / "fd" / "3").symlink_to("/var/log/serve.log")

    (gpu,) = machine.read()

    assert gpu.processes == (GpuProcess(pid=4242, used_bytes=1536 * 1024),)


def test_a_machine_without_a_card_is_looked_through_every_15_seconds(machine: Machine) -> None:
    async def steps(amd: Amd) -> list[int]:
        card_counts = [len(await amd.read(PATIENCE_SECONDS))]
        machine.sys.add(CARD, card=1)
        for wait_seconds in (14.0, 1.0):
            machine.clock.seconds += wait_seconds
            card_counts.append(len(await amd.read(PATIENCE_SECONDS)))
        return card_counts

    assert machine.run(steps) == [0, 0, 1]
