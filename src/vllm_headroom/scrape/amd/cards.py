"""Find AMD's cards and their partitions."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import Final

from msgspec import Struct

from vllm_headroom.scrape.proc.files import read_start


def read_text(path: str) -> str:
    """Return a file's text; raise OSError where it cannot be read."""
    return read_start(path).decode(errors="replace").strip()


def read_line(path: str) -> str:
    """Return a file's text, empty where it cannot be read."""
    try:
        return read_text(path)
    except OSError:
        return ""


def read_number(path: str) -> int | None:
    """Return the number in a file, None where the driver does not provide it."""
    try:
        return int(read_start(path))
    except (OSError, ValueError):
        return None


def list_names(folder: str) -> list[str]:
    """Return the sorted names in a folder, none where it cannot be listed."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - no Path per file
    except OSError:
        return []


DRIVER: Final = "amdgpu"
DRM: Final = "class/drm"
TEMPERATURES: Final = ("temp1_input", "temp2_input")
"""Edge, else junction: from MI200 on there is no edge sensor."""

POWERS: Final = ("power1_average", "power1_input")
"""A card has one of them: average or current power."""

TOPOLOGY: Final = "class/kfd/kfd/topology"
_CARD: Final = re.compile(r"card\d+")
_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""A PCI address; partitions appear as cards too, of a device `amdgpu_xcp_N` without any facts."""


class Node(Struct, frozen=True, kw_only=True):
    """A card or a partition by KFD; `memory_bytes` is its processes' limit (amdgpu_amdkfd_reserve_mem_limit)."""

    gpu_id: int
    memory_bytes: int | None


class Card(Struct, frozen=True, kw_only=True):
    """A card at a PCI address, with its folder in /sys and its sensor files, "" without one.

    `is_apu`: it has a sensor of the north bridge's voltage, as only integrated GPUs do (amdgpu_pm.c). `nodes` are
    KFD's: several where the card is partitioned, none where ROCm cannot use it, None where KFD denies access: in a
    container it permits the cards whose device in /dev the container has (kfd_topology.c).
    """

    address: str
    folder: str
    temperature: str
    power: str
    is_apu: bool
    uuid: str
    name: str
    nodes: tuple[Node, ...] | None


def find_cards(sys: str) -> dict[str, Card]:
    """Return the driver's cards by UUID, in the order of PCI addresses, not of DRM numbers."""
    devices = {
        os.path.realpath(f"{sys}/{DRM}/{name}/device")
        for name in list_names(f"{sys}/{DRM}")
        if _CARD.fullmatch(name)
    }
    found = {os.path.basename(folder): folder for folder in devices if is_driven(folder)}  # noqa: PTH119 - as there
    nodes, hidden = _read_nodes(sys, found.keys())
    ids = Counter(read_line(f"{folder}/unique_id") for folder in found.values())
    cards: dict[str, Card] = {}
    for address, folder in sorted(found.items()):
        unique, product = read_line(f"{folder}/unique_id"), read_line(f"{folder}/product_name")
        monitor = f"{folder}/hwmon/{next(iter(list_names(f'{folder}/hwmon')), '')}"
        sensors = list_names(monitor)
        uuid = (
            f"GPU-{unique}" if unique and ids[unique] == 1 else f"PCI-{address}"
        )  # virtual functions may share an id
        cards[uuid] = Card(
            address=address,
            folder=folder,
            temperature=next((f"{monitor}/{name}" for name in TEMPERATURES if name in sensors), ""),
            power=next((f"{monitor}/{name}" for name in POWERS if name in sensors), ""),
            is_apu="in1_label" in sensors,
            uuid=uuid,
            name=product or f"AMD GPU {read_line(f'{folder}/device')}".rstrip(),
            nodes=None if hidden and address not in nodes else tuple(nodes[address]),
        )
    return cards


def is_driven(folder: str) -> bool:
    """Return whether a folder of /sys is a PCI device that amdgpu drives."""
    driver = os.path.realpath(f"{folder}/driver")
    return bool(_ADDRESS.fullmatch(folder.rpartition("/")[2])) and driver.endswith(f"/{DRIVER}")


def _read_nodes(sys: str, addresses: Collection[str]) -> tuple[defaultdict[str, list[Node]], bool]:
    """Return KFD's nodes by the address of their card, and whether access to some was denied."""
    found: defaultdict[str, list[Node]] = defaultdict(list)
    hidden = False
    for name in sorted(list_names(f"{sys}/{TOPOLOGY}/nodes"), key=lambda name: (len(name), name)):
        folder = f"{sys}/{TOPOLOGY}/nodes/{name}"
        try:
            gpu_id = int(read_text(f"{folder}/gpu_id"))
            facts = _parse_facts(read_text(f"{folder}/properties")) if gpu_id else {}
            location, domain = int(facts["location_id"]), int(facts.get("domain", 0))
        except PermissionError:
            hidden = True
        except (OSError, ValueError, KeyError):  # KeyError: a node without a GPU
            continue
        else:
            device = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
            exact = f"{device}.{location & 7}"
            banks = [
                read_line(f"{folder}/mem_banks/{bank}/properties")
                for bank in list_names(f"{folder}/mem_banks")
            ]
            sizes = [_parse_facts(bank).get("size_in_bytes", "") for bank in banks]
            memory_bytes = (
                sum(map(int, sizes)) if sizes and all(map(str.isdecimal, sizes)) else None
            )
            # the function bits hold the partition's number
            found[exact if exact in addresses else f"{device}.0"].append(
                Node(gpu_id=gpu_id, memory_bytes=memory_bytes)
            )
    return found, hidden


def _parse_facts(properties: str) -> dict[str, str]:
    pairs = (words.partition(" ") for words in properties.splitlines())
    return {name: value for name, _, value in pairs}
