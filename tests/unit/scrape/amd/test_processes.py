"""Who is listed on a card, and when it is not known."""

import shutil

from tests.fakes.amd_tree import GIB, open_card
from tests.fakes.nobody import nobody
from tests.unit.scrape.amd.conftest import Machine
from vllm_headroom.model import GpuProcess

CARD = "0000:c1:00.0"
CONTAINER = "pid:[4026532555]"
NODE = 51_110


def card(machine: Machine) -> None:
    machine.sys.add(CARD, card=1)
    machine.sys.add_node(CARD, NODE)


def in_a_container(machine: Machine) -> None:
    link = machine.proc.path / "self" / "ns" / "pid"
    link.unlink()
    link.symlink_to(CONTAINER)


def listed(machine: Machine) -> tuple[GpuProcess, ...] | None:
    (gpu,) = machine.read()
    return gpu.processes


def test_kfds_pids_are_not_taken_for_those_of_a_container(machine: Machine) -> None:
    card(machine)
    machine.sys.hold(4242, {NODE: GIB})
    in_a_container(machine)
    machine.proc.add(77, 1, "python3", "serve.py")
    open_card(machine.proc, 77, 11, CARD, client=7, vram_kib=1024)

    assert listed(machine) == (GpuProcess(pid=77, used_bytes=2**20),)


def test_a_container_that_shows_no_other_users_files_does_not_know_who_is_there(machine: Machine) -> None:
    card(machine)
    in_a_container(machine)
    machine.proc.add(77, 1, "python3", "serve.py")
    open_card(machine.proc, 77, 11, CARD, client=7, vram_kib=1024)
    (machine.proc.path / "77" / "fd").chmod(0)

    with nobody():
        assert listed(machine) is None


def test_what_one_user_shows_is_listed_though_another_hides(machine: Machine) -> None:
    card(machine)
    in_a_container(machine)
    for pid in (77, 78):
        machine.proc.add(pid, 1, "python3", "serve.py")
        open_card(machine.proc, pid, 11, CARD, client=pid, vram_kib=1024)
    (machine.proc.path / "78" / "fd").chmod(0)

    with nobody():
        assert listed(machine) == (GpuProcess(pid=77, used_bytes=2**20),)


def test_a_machine_without_kfds_list_is_reported_by_files(machine: Machine) -> None:
    card(machine)
    shutil.rmtree(machine.sys.kfd / "proc")
    machine.proc.add(77, 1, "python3", "serve.py")
    open_card(machine.proc, 77, 11, CARD, client=7, vram_kib=1024)

    assert listed(machine) == (GpuProcess(pid=77, used_bytes=2**20),)


def test_where_kfd_hides_its_nodes_the_files_of_those_that_compute_tell(machine: Machine) -> None:
    """On the host's PID namespace, without the card's device: a process that does not compute is not even asked."""
    card(machine)
    (machine.sys.kfd / "topology" / "nodes" / "1" / "gpu_id").chmod(0)
    machine.sys.hold(77, {NODE: GIB})
    for pid in (77, 78):
        machine.proc.add(pid, 1, "python3", "serve.py")
        open_card(machine.proc, pid, 11, CARD, client=pid, vram_kib=1024)

    with nobody():
        assert listed(machine) == (GpuProcess(pid=77, used_bytes=2**20),)


def test_a_card_that_kfd_does_not_know_has_no_process_that_computes(machine: Machine) -> None:
    machine.sys.add(CARD, card=1)

    assert listed(machine) == ()


def test_a_process_that_ends_meanwhile_is_not_listed(machine: Machine) -> None:
    card(machine)
    machine.sys.hold(4242, {NODE: GIB})
    (machine.sys.kfd / "proc" / "4242" / f"vram_{NODE}").unlink()
    (machine.sys.kfd / "proc" / "4242" / f"vram_{NODE}").symlink_to("gone")

    assert listed(machine) == ()


def test_a_file_that_is_closed_meanwhile_is_passed_over(machine: Machine) -> None:
    machine.sys.add(CARD, card=1)
    in_a_container(machine)
    machine.proc.add(77, 1, "python3", "serve.py")
    for descriptor in (11, 12):
        open_card(machine.proc, 77, descriptor, CARD, client=descriptor, vram_kib=1024)
    (machine.proc.path / "77" / "fdinfo" / "11").unlink()

    assert listed(machine) == (GpuProcess(pid=77, used_bytes=2**20),)


def test_a_client_of_another_driver_and_one_of_another_unit_are_not_counted(machine: Machine) -> None:
    machine.sys.add(CARD, card=1)
    in_a_container(machine)
    machine.proc.add(77, 1, "python3", "serve.py")
    open_card(machine.proc, 77, 11, CARD, client=1, vram_kib=1024)
    file = machine.proc.path / "77" / "fdinfo" / "11"
    text = file.read_text()

    assert listed(machine) == (GpuProcess(pid=77, used_bytes=2**20),)

    for foreign_text in (
        text.replace("amdgpu", "nouveau"),
        text.replace("1024 KiB", "1024 MiB"),
        text.replace("1024 ", "?"),
    ):
        file.write_text(foreign_text)

        assert listed(machine) == ()


def test_a_file_of_kfds_that_may_not_be_read_is_a_process_of_unknown_size(machine: Machine) -> None:
    card(machine)
    machine.sys.hold(4242, {NODE: GIB})
    (machine.sys.kfd / "proc" / "4242" / f"vram_{NODE}").chmod(0)

    with nobody():
        assert listed(machine) == (GpuProcess(pid=4242, used_bytes=None),)
