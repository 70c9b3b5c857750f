"""Which AMD cards are there, and how are they cut?"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import Final

from msgspec import Struct

from vllm_headroom.scrape.proc.files import start_of


def text(path: str) -> str:
    """Return what a file says; raise OSError where it cannot be read."""
    return start_of(path).decode(errors="replace").strip()


def number(path: str) -> int | None:
    """Return the number in a file, None where it holds none; raise OSError where it cannot be read."""
    try:
        return int(start_of(path))
    except ValueError:
        return None


def told(path: str) -> int | None:
    """Return the number in a file, None where the driver does not tell it now or at all."""
    try:
        return number(path)
    except OSError:
        return None


def line(path: str) -> str:
    """Return what a file says, nothing where it cannot be read."""
    try:
        return text(path)
    except OSError:
        return ""


def names(folder: str) -> list[str]:
    """Return the names in a folder in order, none where it cannot be looked into."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - no Path, as in start_of
    except OSError:
        return []


DRIVER: Final = "amdgpu"
DRM: Final = "class/drm"
TEMPERATURES: Final = ("temp1_input", "temp2_input")
"""At the edge, else at the junction: from MI200 on there is no sensor at the edge."""

POWERS: Final = ("power1_average", "power1_input")
"""A card has one or the other: what it took of late, or takes now."""

TOPOLOGY: Final = "class/kfd/kfd/topology"
_CARD: Final = re.compile(r"card\d+")
_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""Where a partition is, there is a card too, of a device `amdgpu_xcp_N` that tells nothing."""


class Node(Struct, frozen=True, kw_only=True):
    """A compute device of KFD: a card, or a partition of one; `memory_bytes` is all that its processes may take.

    KFD grants no more than that (amdgpu_amdkfd_reserve_mem_limit), and HIP calls it the device's total.
    """

    gpu_id: int
    memory_bytes: int | None


class Card(Struct, frozen=True, kw_only=True):
    """A card at a PCI address, with its folder in /sys, and the files of its sensors where it has them.

    Only `is_apu`, a processor's own, has a sensor of the north bridge's voltage (amdgpu_pm.c).

    `nodes` are those of KFD: several where the card is cut, none where ROCm cannot use it, None where KFD does not let
    itself be asked: in a container it does for the cards whose device in /dev the container has (kfd_topology.c).
    """

    address: str
    folder: str
    temperature: str | None
    power: str | None
    is_apu: bool
    uuid: str
    name: str
    nodes: tuple[Node, ...] | None


def cards(sys: str) -> dict[str, Card]:
    """Return the driver's cards by UUID, in the order of PCI addresses, which is not that of their numbers in DRM."""
    devices = {
        os.path.realpath(f"{sys}/{DRM}/{name}/device") for name in names(f"{sys}/{DRM}") if _CARD.fullmatch(name)
    }
    found = {os.path.basename(folder): folder for folder in devices if is_driven(folder)}  # noqa: PTH119 - as there
    nodes, hidden = _nodes(sys, found.keys())
    ids = Counter(line(f"{folder}/unique_id") for folder in found.values())
    made = (
        _card(address, found[address], ids, None if hidden and address not in nodes else tuple(nodes[address]))
        for address in sorted(found)
    )
    return {card.uuid: card for card in made}


def is_driven(folder: str) -> bool:
    """Tell whether a folder of /sys is a PCI device that amdgpu drives."""
    driver = os.path.realpath(f"{folder}/driver")
    return bool(_ADDRESS.fullmatch(folder.rpartition("/")[2])) and driver.endswith(f"/{DRIVER}")


def signature(sys: str) -> tuple[list[str], int | None]:
    """Return what changes when a card comes, goes, or is cut anew."""
    return names(f"{sys}/{DRM}"), told(f"{sys}/{TOPOLOGY}/generation_id")


def _card(address: str, folder: str, ids: Counter[str], nodes: tuple[Node, ...] | None) -> Card:
    """Return one card; its id names it where it has one, and shares it with no other, as virtual functions might."""
    unique, product = line(f"{folder}/unique_id"), line(f"{folder}/product_name")
    monitor = f"{folder}/hwmon/{next(iter(names(f'{folder}/hwmon')), '')}"
    sensors = names(monitor)
    return Card(
        address=address,
        folder=folder,
        temperature=next((f"{monitor}/{name}" for name in TEMPERATURES if name in sensors), None),
        power=next((f"{monitor}/{name}" for name in POWERS if name in sensors), None),
        is_apu="in1_label" in sensors,
        uuid=f"GPU-{unique}" if unique and ids[unique] == 1 else f"PCI-{address}",
        name=product or f"AMD GPU {line(f'{folder}/device')}".rstrip(),
        nodes=nodes,
    )


def _nodes(sys: str, addresses: Collection[str]) -> tuple[defaultdict[str, list[Node]], bool]:
    """Return KFD's nodes by the card they are on, and whether there are some that may not be asked."""
    found: defaultdict[str, list[Node]] = defaultdict(list)
    hidden = False
    for name in sorted(names(f"{sys}/{TOPOLOGY}/nodes"), key=lambda name: (len(name), name)):
        folder = f"{sys}/{TOPOLOGY}/nodes/{name}"
        try:
            gpu_id = int(text(f"{folder}/gpu_id"))
            if gpu_id:
                address = _address(text(f"{folder}/properties"), addresses)
                found[address].append(Node(gpu_id=gpu_id, memory_bytes=_memory(f"{folder}/mem_banks")))
        except PermissionError:
            hidden = True
        except (OSError, ValueError, KeyError):
            continue
    return found, hidden


def _address(properties: str, addresses: Collection[str]) -> str:
    """Return the PCI address of a node's card; the number of a partition lies in the bits of the function."""
    facts = _facts(properties)
    location = int(facts["location_id"])
    device = f"{int(facts.get('domain', 0)):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
    exact = f"{device}.{location & 7}"
    return exact if exact in addresses else f"{device}.0"


def _memory(banks: str) -> int | None:
    sizes = [_size(f"{banks}/{name}/properties") for name in names(banks)]
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def _size(path: str) -> int | None:
    size = _facts(line(path)).get("size_in_bytes", "")
    return int(size) if size.isdecimal() else None


def _facts(properties: str) -> dict[str, str]:
    pairs = (words.partition(" ") for words in properties.splitlines())
    return {name: value for name, _, value in pairs}
