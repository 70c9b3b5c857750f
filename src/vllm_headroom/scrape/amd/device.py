"""What one AMD card tells, or each of its partitions."""

from __future__ import annotations

import errno
from collections import defaultdict
from pathlib import Path
from typing import Final

from msgspec import Struct

from vllm_headroom.model import GpuMemory, GpuProcess, GpuReading, Vendor
from vllm_headroom.scrape.amd.cards import Card, Node, is_driven
from vllm_headroom.scrape.amd.files import line, number, told
from vllm_headroom.scrape.amd.processes import CardProcesses
from vllm_headroom.scrape.peak import Peak
from vllm_headroom.scrape.proc.host import machine_of

WHOLE: Final = "SPX"
"""The compute partition of a card that is not cut."""


class Look(Struct, frozen=True, kw_only=True):
    """What the readings of one moment share; `peaks`, by UUID, outlive it."""

    processes: CardProcesses
    peaks: defaultdict[str, Peak]
    now: float
    proc: Path


def readings(card: Card, index: int, look: Look) -> tuple[GpuReading, ...]:
    """Return a reading of the card, or of each of its partitions; raise OSError where its memory cannot be read."""
    if card.nodes is not None and len(card.nodes) > 1:
        _own(card, "total")  # KFD would go on to say nothing of a card that is gone
        return tuple(_partition(card, index, place, node, look) for place, node in enumerate(card.nodes))
    memory = memory_of(card, look.proc)
    busy_percent = told(f"{card.folder}/gpu_busy_percent")
    millidegrees = None if card.temperature is None else told(card.temperature)
    microwatts = None if card.power is None else told(card.power)
    reading = GpuReading(
        vendor=Vendor.AMD,
        index=index,
        uuid=card.uuid,
        name=card.name,
        memory=memory,
        used_peak_bytes=_peak(card.uuid, memory, look),
        utilization_ratio=None if busy_percent is None else busy_percent / 100,
        temperature_celsius=None if millidegrees is None else millidegrees / 1000,
        power_watts=None if microwatts is None else microwatts / 1_000_000,
        processes=look.processes.on_card(card),
    )
    return (reading,)


def memory_of(card: Card, proc: Path) -> GpuMemory | None:
    """Return the memory of a card that is not cut, None where it does not tell what its processes may take.

    Raises OSError where it cannot be read.
    """
    total_bytes, used_bytes = _own(card, "total"), _own(card, "used")
    if total_bytes is None or used_bytes is None:
        return None
    granted_bytes = card.nodes[0].memory_bytes if card.nodes else None
    if granted_bytes is not None and granted_bytes > total_bytes:
        return _of_the_machine(card, granted_bytes, proc)
    if card.nodes is None and _may_grant_other(card):
        return None
    return _memory(total_bytes, used_bytes)


def _own(card: Card, fact: str) -> int | None:
    try:
        value = number(f"{card.folder}/mem_info_vram_{fact}")
    except FileNotFoundError:
        if is_driven(card.folder):
            return None
        raise
    if value is None:
        raise OSError(errno.EBADMSG, f"mem_info_vram_{fact} holds no number")
    return value


def _of_the_machine(card: Card, granted_bytes: int, proc: Path) -> GpuMemory | None:
    """Return the memory of an APU that has less of its own: KFD grants the machine's then (amdgpu_ttm_init)."""
    machine, taken_bytes = machine_of(proc), told(f"{card.folder}/mem_info_gtt_used")
    if machine is None or taken_bytes is None:
        return None
    free_bytes = max(0, min(granted_bytes - taken_bytes, machine.available_bytes))
    return _memory(granted_bytes, granted_bytes - free_bytes, machine.available_bytes)


def _may_grant_other(card: Card) -> bool:
    """Tell whether a card of which KFD does not tell may grant the machine's memory, or a share of its own."""
    return card.is_apu or line(f"{card.folder}/current_compute_partition") not in {"", WHOLE}


def _partition(card: Card, index: int, place: int, node: Node, look: Look) -> GpuReading:
    """Return a reading of a partition: in use is what its processes hold, as KFD counts, beside what the driver has."""
    listed = look.processes.on_node(node)
    used_bytes = None if listed is None else _total(listed)
    known = node.memory_bytes is not None and used_bytes is not None
    memory = _memory(node.memory_bytes or 0, used_bytes or 0) if known else None
    uuid = f"{card.uuid}-{place}"
    return GpuReading(
        vendor=Vendor.AMD,
        index=index,
        uuid=uuid,
        name=f"{card.name} partition {place}",
        memory=memory,
        used_peak_bytes=_peak(uuid, memory, look),
        processes=listed,
    )


def _total(listed: tuple[GpuProcess, ...]) -> int | None:
    held = [process.used_bytes for process in listed]
    return None if None in held else sum(each for each in held if each is not None)


def _memory(total_bytes: int, used_bytes: int, machine_available_bytes: int | None = None) -> GpuMemory:
    return GpuMemory(
        total_bytes=total_bytes,
        used_bytes=used_bytes,
        free_bytes=max(0, total_bytes - used_bytes),
        reserved_bytes=None,
        machine_available_bytes=machine_available_bytes,
    )


def _peak(uuid: str, memory: GpuMemory | None, look: Look) -> int | None:
    peak = look.peaks[uuid]
    if memory is not None:
        peak.add(look.now, memory.used_bytes)
    return peak.highest_bytes(look.now)
