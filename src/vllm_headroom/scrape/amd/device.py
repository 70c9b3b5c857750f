"""Read one AMD card, or each of its partitions."""

import errno
import os
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Final

from vllm_headroom.model import GpuMemory, GpuProcess, GpuReading, Vendor
from vllm_headroom.scrape.amd.cards import (
    DRIVER,
    Card,
    Node,
    is_driven,
    list_names,
    read_line,
    read_number,
    read_text,
)
from vllm_headroom.scrape.gpu_state import Peak
from vllm_headroom.scrape.proc.files import has_host_pids
from vllm_headroom.scrape.proc.host import read_machine

KFD: Final = "class/kfd/kfd/proc"
DEVICES: Final = "/dev/dri/"
_KIB: Final = 1024
Listed = Mapping[str, tuple[GpuProcess, ...]]


class ReadContext:
    """What the readings of one moment share: the peaks by UUID, and the processes that hold GPU memory.

    KFD has a folder, readable for all, for each process that computes, with its bytes on each node, under the machine's
    pids: usable in the machine's first PID namespace only. Elsewhere, and where nodes are hidden, /proc shows what each
    process has open, to users that may trace it, by card and not by partition.
    """

    def __init__(self, *, sys: str, proc: Path, now: float, peaks: defaultdict[str, Peak]) -> None:
        self.proc = proc
        self._sys = sys
        self._now = now
        self._peaks = peaks

    def update_peak(self, uuid: str, memory: GpuMemory | None) -> int | None:
        """Add the memory in use, where known, and return the peak."""
        if memory is not None:
            self._peaks[uuid].add(self._now, memory.used_bytes)
        return self._peaks[uuid].highest_bytes(self._now)

    def list_on_node(self, node: Node) -> tuple[GpuProcess, ...] | None:
        """Return the processes on a node of KFD, None where they cannot be known."""
        listed = self._by_kfd
        return None if listed is None else listed.get(str(node.gpu_id), ())

    def list_on_card(self, card: Card) -> tuple[GpuProcess, ...] | None:
        """Return the processes on a card without partitions, None where they cannot be known."""
        if card.nodes and self._by_kfd is not None:
            return self.list_on_node(card.nodes[0])
        listed = self._by_files
        return None if listed is None else listed.get(card.address, ())

    @cached_property
    def _computing(self) -> list[str] | None:
        """The pids that KFD lists, None where it lists none or this is another PID namespace."""
        try:
            found = os.listdir(f"{self._sys}/{KFD}") if has_host_pids(self.proc) else None  # noqa: PTH208 - as in all
        except OSError:
            return None
        return None if found is None else sorted(filter(str.isdecimal, found), key=int)

    @cached_property
    def _by_kfd(self) -> Listed | None:
        if self._computing is None:
            return None
        listed: defaultdict[str, tuple[GpuProcess, ...]] = defaultdict(tuple)
        for pid in self._computing:
            folder = f"{self._sys}/{KFD}/{pid}"
            for name in list_names(folder):
                if not name.startswith("vram_"):
                    continue
                try:
                    held_bytes = int(read_text(f"{folder}/{name}"))
                except FileNotFoundError:
                    continue  # it has ended
                except (OSError, ValueError):
                    held_bytes = None
                if held_bytes != 0:  # the file of a node that it does not use contains 0
                    listed[name.removeprefix("vram_")] += (
                        GpuProcess(pid=int(pid), used_bytes=held_bytes),
                    )
        return listed

    @cached_property
    def _by_files(self) -> Listed | None:
        """Return the processes by the address of their card; None where access was denied and none is found."""
        listed: defaultdict[str, tuple[GpuProcess, ...]] = defaultdict(tuple)
        hidden = False
        # A machine has thousands of processes with hundreds of files: if known, only those that compute are read.
        pids = (
            filter(str.isdecimal, list_names(str(self.proc)))
            if self._computing is None
            else self._computing
        )
        for pid in pids:
            try:
                held = _read_held(f"{self.proc}/{pid}")
            except PermissionError:
                hidden = True
            except OSError:
                continue  # it has ended
            else:
                for address, held_bytes in held.items():
                    listed[address] += (GpuProcess(pid=int(pid), used_bytes=held_bytes),)
        return None if hidden and not listed else listed


def _read_held(process: str) -> dict[str, int]:
    """Return the bytes that a process holds of each card, of a DRM client once; raise OSError where unreadable."""
    clients: dict[tuple[str, str], int] = {}
    for name in os.listdir(f"{process}/fd"):  # noqa: PTH208 - a process has hundreds of them
        facts = _read_facts(process, name)
        size, unit = (*facts.get("drm-memory-vram", "").split(), "", "")[:2]
        if facts.get("drm-driver") == DRIVER and size.isdecimal() and unit == "KiB":
            clients[facts.get("drm-pdev", ""), facts.get("drm-client-id", "")] = int(size) * _KIB
    held: defaultdict[str, int] = defaultdict(int)
    for (address, _), client_bytes in clients.items():
        held[address] += client_bytes
    return {address: held_bytes for address, held_bytes in held.items() if held_bytes}


def _read_facts(process: str, descriptor: str) -> dict[str, str]:
    """Return the kernel's facts about an open file of a DRM device, none about any other or a closed one."""
    try:
        if not os.readlink(f"{process}/fd/{descriptor}").startswith(DEVICES):  # noqa: PTH115 - as above
            return {}
        lines = read_text(f"{process}/fdinfo/{descriptor}").splitlines()
    except FileNotFoundError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


WHOLE: Final = "SPX"
"""The compute partition mode of a card without partitions."""


def read_card(card: Card, index: int, look: ReadContext) -> tuple[GpuReading, ...]:
    """Return a reading of the card, or of each of its partitions; raise OSError where its memory cannot be read."""
    if card.nodes is not None and len(card.nodes) > 1:
        _read_own(card, "total")  # KFD keeps its nodes when the card is gone
        return tuple(
            _read_partition(card, index, place, node, look) for place, node in enumerate(card.nodes)
        )
    memory = read_memory(card, look.proc)
    busy_percent = read_number(f"{card.folder}/gpu_busy_percent")
    millidegrees, microwatts = read_number(card.temperature), read_number(card.power)
    reading = GpuReading(
        vendor=Vendor.AMD,
        index=index,
        uuid=card.uuid,
        name=card.name,
        memory=memory,
        used_peak_bytes=look.update_peak(card.uuid, memory),
        utilization_ratio=None if busy_percent is None else busy_percent / 100,
        temperature_celsius=None if millidegrees is None else millidegrees / 1000,
        power_watts=None if microwatts is None else microwatts / 1_000_000,
        processes=look.list_on_card(card),
    )
    return (reading,)


def read_memory(card: Card, proc: Path) -> GpuMemory | None:
    """Return the memory of a card without partitions, None where its processes' limit is unknown; raise OSError."""
    total_bytes, used_bytes = _read_own(card, "total"), _read_own(card, "used")
    if total_bytes is None or used_bytes is None:
        return None
    granted_bytes = card.nodes[0].memory_bytes if card.nodes else None
    if granted_bytes is not None and granted_bytes > total_bytes:
        # an APU whose limit exceeds its VRAM: KFD grants the machine's memory (amdgpu_ttm_init)
        machine, taken_bytes = read_machine(proc), read_number(f"{card.folder}/mem_info_gtt_used")
        if machine is None or taken_bytes is None:
            return None
        free_bytes = max(0, min(granted_bytes - taken_bytes, machine.available_bytes))
        return _build_memory(granted_bytes, granted_bytes - free_bytes, machine.available_bytes)
    if card.nodes is None and (
        card.is_apu or read_line(f"{card.folder}/current_compute_partition") not in {"", WHOLE}
    ):
        return None
    return _build_memory(total_bytes, used_bytes)


def _read_own(card: Card, fact: str) -> int | None:
    try:
        return int(read_text(f"{card.folder}/mem_info_vram_{fact}"))
    except ValueError:
        raise OSError(errno.EBADMSG, f"mem_info_vram_{fact} holds no number") from None
    except FileNotFoundError:
        if is_driven(card.folder):
            return None
        raise


def _read_partition(
    card: Card, index: int, place: int, node: Node, look: ReadContext
) -> GpuReading:
    """Return a reading of a partition: in use is what its processes hold as KFD counts it, without the driver's own."""
    listed = look.list_on_node(node)
    held = [None] if listed is None else [process.used_bytes for process in listed]
    known = [each for each in held if each is not None]
    has_memory = node.memory_bytes is not None and len(known) == len(held)
    memory = _build_memory(node.memory_bytes or 0, sum(known)) if has_memory else None
    uuid = f"{card.uuid}-{place}"
    return GpuReading(
        vendor=Vendor.AMD,
        index=index,
        uuid=uuid,
        name=f"{card.name} partition {place}",
        memory=memory,
        used_peak_bytes=look.update_peak(uuid, memory),
        processes=listed,
    )


def _build_memory(
    total_bytes: int, used_bytes: int, machine_available_bytes: int | None = None
) -> GpuMemory:
    return GpuMemory(
        total_bytes=total_bytes,
        used_bytes=used_bytes,
        free_bytes=max(0, total_bytes - used_bytes),
        reserved_bytes=None,
        machine_available_bytes=machine_available_bytes,
    )
