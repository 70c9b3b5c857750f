"""What the doctor says where the GPUs are AMD's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from tests.fakes.amd_tree import GIB, AmdTree, open_card
from tests.fakes.nobody import nobody, open_folder
from tests.fakes.nvml.library import FakeNvml
from tests.fakes.proc_tree import HOST, ProcTree
from tests.unit.commands.doctor.looking import CONTAINER, CORE, Vllm, examined, lines, proc
from vllm_headroom_tools.doctor.fixes import Status

CARDS = ("0000:c1:00.0", "0000:e5:00.0")


@pytest.fixture
def folder() -> Iterator[Path]:
    with open_folder() as opened_folder:
        yield opened_folder


@pytest.fixture
def sys(nvml: FakeNvml, folder: Path) -> AmdTree:
    """Two cards, and no driver of NVIDIA's."""
    nvml.errors = {"nvmlInitWithFlags": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}
    nvml.write()
    tree = AmdTree(folder / "sys")
    for number, address in enumerate(CARDS):
        tree.add(address, card=number + 1, unique_id=f"{number:016}", used_bytes=3 * GIB)
        tree.add_node(address, 100 + number)
    return tree


def test_cards_of_amds_need_no_nvml_and_are_the_engines_by_its_processes(
    sys: AmdTree, vllm: Vllm, folder: Path
) -> None:
    sys.hold(CORE, {100: 0, 101: 2 * GIB})

    findings = examined(proc(folder, vllm, namespace=HOST), sys.path, ENGINE_URL=vllm.url)

    nvml = findings["nvml"]
    assert (nvml.state, nvml.text) == (
        Status.NOT_APPLICABLE,
        "not needed: the GPUs are AMD's, whose driver reports them in /sys",
    )
    assert findings["gpus"].details[0] == "GPU 0 (GPU-0000000000000000) AMD Instinct MI300X OAM"
    assert findings["gpu_attribution"].text == "1 of 2 attributed to the engine"
    memory = findings["process_memory"]
    assert (memory.state, memory.text) == (
        Status.OK,
        "AMD's driver reports each process's own memory, as seen from the machine's first PID namespace",
    )


def test_a_container_that_may_trace_the_engine_needs_no_newer_driver(sys: AmdTree, vllm: Vllm, folder: Path) -> None:
    tree = proc(folder, vllm, namespace=CONTAINER)
    open_card(existing(tree), CORE, 11, CARDS[1], client=7, vram_kib=2**21)

    findings = examined(tree, sys.path, ENGINE_URL=vllm.url)

    assert findings["gpu_attribution"].text == "1 of 2 attributed to the engine"
    assert findings["process_memory"].state is Status.OK


def test_a_container_that_may_not_trace_the_engine_is_shown_how(sys: AmdTree, vllm: Vllm, folder: Path) -> None:
    tree = proc(folder, vllm, namespace=CONTAINER)
    (tree / str(CORE) / "fd").mkdir(mode=0)

    examined(tree, sys.path, ENGINE_URL=vllm.url)  # imports what nobody cannot read in a closed checkout
    with nobody():
        findings = examined(tree, sys.path, ENGINE_URL=vllm.url)

    owned, memory = findings["gpu_attribution"], findings["process_memory"]
    assert owned.state is memory.state is Status.MISSING
    assert "which alone show a container who uses AMD's cards" in owned.text
    assert memory.text.startswith("the driver does not report the memory of each process on GPU 0")
    for finding in (owned, memory):
        assert any("SYS_PTRACE" in line for line in lines(finding))
        assert "hostPID: true" in lines(finding)
        assert not any("NVIDIA" in line for line in lines(finding))


def test_a_card_whose_memory_kfd_does_not_tell_is_missing_it(sys: AmdTree, vllm: Vllm, folder: Path) -> None:
    for address in CARDS:
        (sys.path / "devices" / "pci0000:00" / address / "mem_info_vram_total").unlink()

    check = examined(proc(folder, vllm), sys.path, ENGINE_URL=vllm.url)["gpus"]

    assert check.state is Status.MISSING
    assert "KFD does not report what its processes may use of its memory" in check.details[0]
    assert "or not to this container" in check.details[0]
    assert "devices: [/dev/kfd, /dev/dri]" in lines(check)


def test_without_any_gpu_both_ways_are_reported(sys: AmdTree) -> None:
    for address in CARDS:
        sys.remove(address)

    check = examined(None, sys.path)["nvml"]

    assert check.state is Status.MISSING
    assert "nor is there a card of AMD's driver amdgpu" in check.text
    assert {"modprobe nvidia", "cat /sys/class/drm/card*/device/mem_info_vram_total"} <= set(lines(check))


def test_partitions_are_named_by_their_uuids(sys: AmdTree, vllm: Vllm, folder: Path) -> None:
    sys.add_node(CARDS[0], 200, 90 * GIB, part=1)

    check = examined(proc(folder), sys.path, ENGINE_URL=vllm.url)["gpu_attribution"]

    assert lines(check)[-1].startswith("HEADROOM_GPUS=GPU-0000000000000000-0,GPU-0000000000000000-1,1  #")


def test_an_apu_says_whose_memory_it_works_on(nvml: FakeNvml, folder: Path) -> None:
    nvml.errors = {"nvmlInitWithFlags": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}
    nvml.write()
    sys = AmdTree(folder / "sys")
    sys.add(CARDS[0], card=1, product=None, total_bytes=GIB // 2).tell(mem_info_gtt_used=2 * GIB)
    sys.add_node(CARDS[0], 7, 62 * GIB)
    tree = proc(folder)
    (tree / "meminfo").write_text(f"MemTotal: {125 * 2**20} kB\nMemAvailable: {90 * 2**20} kB\n")

    (detail,) = examined(tree, sys.path)["gpus"].details

    assert detail.endswith(
        ", unified memory: 60.00 GiB left of the 62.00 GiB that it may take of the machine's, by /proc/meminfo"
    )


def existing(folder: Path) -> ProcTree:
    """Return the tree that was made in a folder."""
    tree = object.__new__(ProcTree)
    tree.path = folder
    return tree
