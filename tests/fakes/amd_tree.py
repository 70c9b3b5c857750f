"""A /sys with AMD cards of one's own making, in a folder.

Names and numbers are those of real trees: properties of nodes as ROCm/k8s-device-plugin keeps them of an MI210 and an
MI308X in its testdata, the rest by the kernel's documentation of amdgpu (driver-misc, thermal) and its sources.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from tests.fakes.proc_tree import ProcTree

GIB: Final = 2**30
MI300X_BYTES: Final = 206_141_652_992
"""The total that rocm-smi prints of an MI300X."""

DRIVER_BYTES: Final = 284 * 2**20
"""Taken by the driver of an idle card."""


class AmdCard:
    """The files of one card; write another text, or remove a file, and the card shows it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sensors = folder / "hwmon" / "hwmon3"

    def tell(self, **facts: object) -> None:
        """Write facts of the card."""
        for name, value in facts.items():
            (self.folder / name).write_text(f"{value}\n")

    def sense(self, **facts: object) -> None:
        """Write what its sensors tell."""
        for name, value in facts.items():
            (self.sensors / name).write_text(f"{value}\n")


class AmdTree:
    """Starts as the /sys of a machine with a processor and a display, and no card."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.drm = path / "class" / "drm"
        self.kfd = path / "devices" / "virtual" / "kfd" / "kfd"
        for folder in (self.drm, path / "class" / "kfd", self.kfd / "topology" / "nodes", self.kfd / "proc"):
            folder.mkdir(parents=True)
        for driver in ("amdgpu", "ast"):
            (path / "bus" / "pci" / "drivers" / driver).mkdir(parents=True)
        (path / "class" / "kfd" / "kfd").symlink_to(self.kfd)
        self._generation = 0
        self._node(0, {"cpu_cores_count": 96, "simd_count": 0, "location_id": 0, "domain": 0}, 64 * GIB)
        self._device("0000:03:00.0", "ast", "0x1a03", card=0)
        (self.drm / "card0-VGA-1").mkdir()
        (self.drm / "version").write_text("drm 1.1.0 20060810\n")

    def add(
        self,
        address: str,
        *,
        card: int,
        unique_id: str | None = "fc1d2a3b4c5d6e7f",
        product: str | None = "AMD Instinct MI300X OAM",
        total_bytes: int = MI300X_BYTES,
        used_bytes: int = DRIVER_BYTES,
    ) -> AmdCard:
        """Add a card as DRM's number `card`; KFD does not know it before it has a node."""
        amd_card = AmdCard(self._device(address, "amdgpu", "0x1002", card=card))
        amd_card.sensors.mkdir(parents=True)
        card_facts = {"unique_id": unique_id, "product_name": product}
        amd_card.tell(**{name: value for name, value in card_facts.items() if value is not None})
        amd_card.tell(
            mem_info_vram_total=total_bytes, mem_info_vram_used=used_bytes, gpu_busy_percent=0, device="0x74a1"
        )
        amd_card.tell(mem_info_gtt_total=64 * GIB, mem_info_gtt_used=14_970_880, current_compute_partition="SPX")
        amd_card.sense(name="amdgpu", power1_input=138_000_000, temp2_input=41_000, temp3_input=36_000)
        return amd_card

    def add_node(self, address: str, gpu_id: int, memory_bytes: int | None = MI300X_BYTES, *, part: int = 0) -> Path:
        """Add a compute device on a card; a partition's number lies in the bits of the function."""
        domain, bus, device_function = address.split(":")
        device, function = device_function.split(".")
        location = int(bus, 16) << 8 | int(device, 16) << 3 | int(function) | part
        facts = {"cpu_cores_count": 0, "simd_count": 304, "vendor_id": 4098, "domain": int(domain, 16)}
        return self._node(gpu_id, {**facts, "location_id": location, "gfx_target_version": 90402}, memory_bytes)

    def hold(self, pid: int, held_by_node: dict[int, int]) -> None:
        """Let a process hold so many bytes on the nodes of these ids."""
        folder = self.kfd / "proc" / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "pasid").write_text("32770\n")
        for gpu_id, held_bytes in held_by_node.items():
            (folder / f"vram_{gpu_id}").write_text(f"{held_bytes}\n")
            (folder / f"sdma_{gpu_id}").write_text("0\n")

    def remove(self, address: str) -> None:
        """Take a card off the bus, with its names in DRM."""
        device_folder = self.path / "devices" / "pci0000:00" / address
        for link in [link for link in self.drm.iterdir() if (link / "device").resolve() == device_folder]:
            shutil.rmtree(link)
        shutil.rmtree(device_folder)

    def without_nodes(self) -> None:
        """Take all nodes but the processor's away, as before the card is cut again."""
        for node in (self.kfd / "topology" / "nodes").iterdir():
            if node.name != "0":
                shutil.rmtree(node)

    def _node(self, gpu_id: int, facts: dict[str, int], memory_bytes: int | None) -> Path:
        nodes = self.kfd / "topology" / "nodes"
        node = nodes / str(len(list(nodes.iterdir())))
        (node / "mem_banks").mkdir(parents=True)
        (node / "gpu_id").write_text(f"{gpu_id}\n")
        (node / "properties").write_text("".join(f"{name} {value}\n" for name, value in facts.items()))
        if memory_bytes is not None:
            (node / "mem_banks" / "0").mkdir()
            bank = f"heap_type 1\nsize_in_bytes {memory_bytes}\nflags 0\nwidth 8192\nmem_clk_max 1300\n"
            (node / "mem_banks" / "0" / "properties").write_text(bank)
        self._generation += 1
        (self.kfd / "topology" / "generation_id").write_text(f"{self._generation}\n")
        return node

    def _device(self, address: str, driver: str, vendor: str, *, card: int) -> Path:
        folder = self.path / "devices" / "pci0000:00" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "driver").symlink_to(self.path / "bus" / "pci" / "drivers" / driver)
        name = self.drm / f"card{card}"
        name.mkdir()
        (name / "device").symlink_to(folder)
        return folder


def open_card(proc: ProcTree, pid: int, descriptor: int, address: str, *, client: int, vram_kib: int) -> None:
    """Let a process have a card's device open, as one client of DRM."""
    folder = proc.path / str(pid)
    for name in ("fd", "fdinfo"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "fd" / str(descriptor)).symlink_to("/dev/dri/renderD128")
    (folder / "fdinfo" / str(descriptor)).write_text(
        f"pos:\t0\nflags:\t02100002\npasid:\t32770\ndrm-driver:\tamdgpu\ndrm-pdev:\t{address}\n"
        f"drm-client-id:\t{client}\ndrm-memory-vram:\t{vram_kib} KiB\ndrm-memory-gtt: \t2048 KiB\n"
    )
