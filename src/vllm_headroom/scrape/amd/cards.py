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


def read_number(path: str) -> int | None:
    """Return the number in a file, None where it holds none; raise OSError where it cannot be read."""
    try:
        return int(read_start(path))
    except ValueError:
        return None


def read_optional_number(path: str) -> int | None:
    """Return the number in a file, None where the driver does not provide it."""
    try:
        return read_number(path)
    except OSError:
        return None


def read_line(path: str) -> str:
    """Return a file's text, empty where it cannot be read."""
    try:
        return read_text(path)
    except OSError:
        return ""


def list_names(folder: str) -> list[str]:
    """Return the sorted names in a folder, none where it cannot be listed."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - no Path, as in start_of
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
    """A card at a PCI address, with its folder in /sys and its sensor files, if any.

    `is_apu`: it has a sensor of the north bridge's voltage, as only integrated GPUs do (amdgpu_pm.c). `nodes` are
    KFD's: several where the card is partitioned, none where ROCm cannot use it, None where KFD denies access: in a
    container it permits the cards whose device in /dev the container has (kfd_topology.c).
    """

    address: str
    folder: str
    temperature: str | None
    power: str | None
    is_apu: bool
    uuid: str
    name: str
    nodes: tuple[Node, ...] | None


def find_cards(sys: str) -> dict[str, Card]:
    """Return the driver's cards by UUID, in the order of PCI addresses, not of DRM numbers."""
    devices = {
        os.path.realpath(f"{sys}/{DRM}/{name}/device") for name in list_names(f"{sys}/{DRM}") if _CARD.fullmatch(name)
    }
    found = {os.path.basename(folder): folder for folder in devices if is_driven(folder)}  # noqa: PTH119 - as there
    nodes, hidden = _read_nodes(sys, found.keys())
    ids = Counter(read_line(f"{folder}/unique_id") for folder in found.values())
    made = (
        _build_card(address, found[address], ids, None if hidden and address not in nodes else tuple(nodes[address]))
        for address in sorted(found)
    )
    return {card.uuid: card for card in made}


def is_driven(folder: str) -> bool:
    """Return whether a folder of /sys is a PCI device that amdgpu drives."""
    driver = os.path.realpath(f"{folder}/driver")
    return bool(_ADDRESS.fullmatch(folder.rpartition("/")[2])) and driver.endswith(f"/{DRIVER}")


def read_signature(sys: str) -> tuple[list[str], int | None]:
    """Return what changes when a card is added, removed or repartitioned."""
    return list_names(f"{sys}/{DRM}"), read_optional_number(f"{sys}/{TOPOLOGY}/generation_id")


def _build_card(address: str, folder: str, ids: Counter[str], nodes: tuple[Node, ...] | None) -> Card:
    """Return one card, identified by its id if that is unique: virtual functions may share one."""
    unique, product = read_line(f"{folder}/unique_id"), read_line(f"{folder}/product_name")
    monitor = f"{folder}/hwmon/{next(iter(list_names(f'{folder}/hwmon')), '')}"
    sensors = list_names(monitor)
    return Card(
        address=address,
        folder=folder,
        temperature=next((f"{monitor}/{name}" for name in TEMPERATURES if name in sensors), None),
        power=next((f"{monitor}/{name}" for name in POWERS if name in sensors), None),
        is_apu="in1_label" in sensors,
        uuid=f"GPU-{unique}" if unique and ids[unique] == 1 else f"PCI-{address}",
        name=product or f"AMD GPU {read_line(f'{folder}/device')}".rstrip(),
        nodes=nodes,
    )


def _read_nodes(sys: str, addresses: Collection[str]) -> tuple[defaultdict[str, list[Node]], bool]:
    """Return KFD's nodes by the address of their card, and whether access to some was denied."""
    found: defaultdict[str, list[Node]] = defaultdict(list)
    hidden = False
    for name in sorted(list_names(f"{sys}/{TOPOLOGY}/nodes"), key=lambda name: (len(name), name)):
        folder = f"{sys}/{TOPOLOGY}/nodes/{name}"
        try:
            gpu_id = int(read_text(f"{folder}/gpu_id"))
            if gpu_id:
                address = _parse_address(read_text(f"{folder}/properties"), addresses)
                found[address].append(Node(gpu_id=gpu_id, memory_bytes=_sum_memory(f"{folder}/mem_banks")))
        except PermissionError:
            hidden = True
        except (OSError, ValueError, KeyError):
            continue
    return found, hidden


def _parse_address(properties: str, addresses: Collection[str]) -> str:
    """Return the PCI address of a node's card; the function bits hold the partition's number."""
    facts = _parse_facts(properties)
    location = int(facts["location_id"])
    device = f"{int(facts.get('domain', 0)):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
    exact = f"{device}.{location & 7}"
    return exact if exact in addresses else f"{device}.0"


def _sum_memory(banks: str) -> int | None:
    sizes = [_read_size(f"{banks}/{name}/properties") for name in list_names(banks)]
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def _read_size(path: str) -> int | None:
    size = _parse_facts(read_line(path)).get("size_in_bytes", "")
    return int(size) if size.isdecimal() else None


def _parse_facts(properties: str) -> dict[str, str]:
    pairs = (words.partition(" ") for words in properties.splitlines())
    return {name: value for name, _, value in pairs}
