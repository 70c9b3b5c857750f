"""Find AMD's cards and their partitions."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Final

from msgspec import Struct

from vllm_headroom.scrape.proc.files import parse_digits, read_start, split_kernel_lines


def read_text_file(path: str) -> str:
    """Return the text of a file in /sys or /proc.

    Raises OSError if the file cannot be read.
    """
    return read_start(path).decode(errors="replace").strip()


def read_line(path: str) -> str:
    """Return a file's text, or an empty string if it cannot be read."""
    try:
        return read_text_file(path)
    except OSError:
        return ""


def read_number_file(path: str) -> int | None:
    """Return the number in a file.

    Returns None if the file cannot be read or contains no number.
    """
    try:
        return int(read_start(path))
    except (OSError, ValueError):
        return None


def list_folder(folder: str) -> list[str]:
    """Return the sorted names in a folder.

    The list is empty if the folder cannot be listed.
    """
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - no Path per file
    except OSError:
        return []


DRIVER: Final = "amdgpu"
DRM_FOLDER: Final = "class/drm"
TOPOLOGY_FOLDER: Final = "class/kfd/kfd/topology"

TEMPERATURE_FILES: Final = ("temp1_input", "temp2_input")
"""The edge temperature sensor. Cards from the MI200 on do not have this sensor. The junction
temperature sensor is used instead.
"""

POWER_FILES: Final = ("power1_average", "power1_input")
"""The sensors for the average power and for the current power. A card has only one of the two
sensors.
"""

_CARD_NAME: Final = re.compile(r"card\d+")
_PCI_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""The name of a PCI device's folder. Partitions are also listed as cards. The device of a
partition, `amdgpu_xcp_N`, provides no facts and does not match this pattern.
"""


class KfdNode(Struct, frozen=True, kw_only=True):
    """A card or a partition as listed by KFD, the compute part of the driver."""

    gpu_id: int
    memory_bytes: int | None
    """The memory that processes on the node can allocate (amdgpu_amdkfd_reserve_mem_limit), or None
    if unknown.
    """


class KfdNodes(Struct, frozen=True, kw_only=True):
    """All nodes that KFD lists."""

    by_address: Mapping[str, list[KfdNode]]
    """The nodes of each card, keyed by the card's PCI address. Cards without a node are omitted."""
    is_any_hidden: bool
    """Whether KFD denied access to at least one node."""


class AmdCard(Struct, frozen=True, kw_only=True):
    """A card at a PCI address."""

    address: str
    folder: str
    """The PCI device's folder in /sys."""
    temperature_file: str
    """The path of the temperature sensor, or "" if there is none."""
    power_file: str
    """The path of the power sensor, or "" if there is none."""
    is_apu: bool
    """Whether the card is an integrated GPU. Only integrated GPUs have a northbridge voltage sensor
    (amdgpu_pm.c).
    """
    uuid: str
    name: str
    nodes: tuple[KfdNode, ...] | None
    """The card's KFD nodes. A partitioned card has several nodes. The tuple is empty if ROCm cannot
    use the card. The value is None if KFD denies access (kfd_topology.c). An example is a container
    whose /dev lacks the card's device.
    """


def find_cards(sys: str) -> dict[str, AmdCard]:
    """Return the driver's cards, keyed by UUID, or {} if there are none.

    The cards are ordered by PCI address, not by DRM number. If a card has no unique id, its UUID is
    derived from its PCI address. The UUID is also derived from the PCI address if another card has
    the same id.
    """
    folders = _find_folders(sys)
    kfd = _read_nodes(sys, folders.keys())
    unique_ids: dict[str, str] = {}
    for address, folder in folders.items():
        unique_ids[address] = read_line(f"{folder}/unique_id")
    # An id that two cards share cannot identify either card.
    id_counts = Counter(unique_ids.values())
    cards: dict[str, AmdCard] = {}
    for address, folder in sorted(folders.items()):
        unique_id = unique_ids[address]
        # Virtual functions of one card may share its id.
        is_unique = bool(unique_id) and id_counts[unique_id] == 1
        uuid = f"GPU-{unique_id}" if is_unique else f"PCI-{address}"
        product_name = read_line(f"{folder}/product_name")
        monitor_names = list_folder(f"{folder}/hwmon")
        monitor = f"{folder}/hwmon/{monitor_names[0] if monitor_names else ''}"
        sensors = list_folder(monitor)
        nodes: tuple[KfdNode, ...] | None = tuple(kfd.by_address.get(address, ()))
        # A hidden node may belong to any card that has no visible node.
        if not nodes and kfd.is_any_hidden:
            nodes = None
        cards[uuid] = AmdCard(
            address=address,
            folder=folder,
            temperature_file=_find_sensor(monitor, sensors, TEMPERATURE_FILES),
            power_file=_find_sensor(monitor, sensors, POWER_FILES),
            is_apu="in1_label" in sensors,
            uuid=uuid,
            name=product_name or f"AMD GPU {read_line(f'{folder}/device')}".rstrip(),
            nodes=nodes,
        )
    return cards


def _find_folders(sys: str) -> dict[str, str]:
    """Return the folder of each PCI device that amdgpu drives, keyed by PCI address."""
    folders: dict[str, str] = {}
    for name in list_folder(f"{sys}/{DRM_FOLDER}"):
        if _CARD_NAME.fullmatch(name):
            folder = os.path.realpath(f"{sys}/{DRM_FOLDER}/{name}/device")
            if is_driven(folder):
                folders[_find_name(folder)] = folder
    return folders


def _find_sensor(monitor: str, sensors: list[str], names: Collection[str]) -> str:
    """Return the path of the card's first sensor in `names`, or ""."""
    for name in names:
        if name in sensors:
            return f"{monitor}/{name}"
    return ""


def is_driven(folder: str) -> bool:
    """Return whether a folder of /sys is a PCI device that amdgpu drives."""
    if not _PCI_ADDRESS.fullmatch(_find_name(folder)):
        return False
    driver = os.path.realpath(f"{folder}/driver")
    return _find_name(driver) == DRIVER


def _find_name(path: str) -> str:
    return path.rpartition("/")[2]


def _read_nodes(sys: str, addresses: Collection[str]) -> KfdNodes:
    """Return KFD's nodes for the cards at these PCI addresses.

    CPU nodes and nodes whose facts cannot be read or parsed are omitted.
    """
    nodes: defaultdict[str, list[KfdNode]] = defaultdict(list)
    is_any_hidden = False
    names = list_folder(f"{sys}/{TOPOLOGY_FOLDER}/nodes")
    names.sort(key=len)  # numerically: 2 before 10
    for name in names:
        folder = f"{sys}/{TOPOLOGY_FOLDER}/nodes/{name}"
        try:
            gpu_id = int(read_text_file(f"{folder}/gpu_id"))
            if gpu_id == 0:  # a CPU
                continue
            facts = _parse_facts(read_text_file(f"{folder}/properties"))
            location = int(facts["location_id"])
            domain = int(facts.get("domain", 0))
        except PermissionError:
            is_any_hidden = True
            continue
        except (OSError, ValueError, KeyError):
            continue
        node = KfdNode(gpu_id=gpu_id, memory_bytes=_read_node_memory(folder))
        nodes[_format_address(domain, location, addresses)].append(node)
    return KfdNodes(by_address=nodes, is_any_hidden=is_any_hidden)


def _format_address(domain: int, location: int, addresses: Collection[str]) -> str:
    """Return the PCI address of a node's card; `location` packs the bus, slot and function."""
    bus = location >> 8 & 0xFF
    slot = location >> 3 & 0x1F
    function = location & 7
    device = f"{domain:04x}:{bus:02x}:{slot:02x}"
    address = f"{device}.{function}"
    # If the card is partitioned, the function bits contain the partition number.
    return address if address in addresses else f"{device}.0"


def _read_node_memory(folder: str) -> int | None:
    """Return the total size of a node's memory banks in bytes.

    Returns None if the node lists no banks. Also returns None if the size of any bank is unknown.
    """
    memory_bytes = 0
    banks = list_folder(f"{folder}/mem_banks")
    for bank in banks:
        facts = _parse_facts(read_line(f"{folder}/mem_banks/{bank}/properties"))
        size_bytes = parse_digits(facts.get("size_in_bytes", ""))
        # Without the size of this bank, the sum would be too small.
        if size_bytes is None:
            return None
        memory_bytes += size_bytes
    return memory_bytes if banks else None


def _parse_facts(properties: str) -> dict[str, str]:
    """Return the names and values of lines such as `location_id 768`."""
    facts: dict[str, str] = {}
    for line in split_kernel_lines(properties):
        name, _, value = line.partition(" ")
        facts[name] = value
    return facts
