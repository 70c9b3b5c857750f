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
    AmdCard,
    KfdNode,
    is_driven,
    list_folder,
    read_line,
    read_number_file,
    read_text_file,
)
from vllm_headroom.scrape.gpu_state import RecentPeak
from vllm_headroom.scrape.proc.files import KIB, has_host_pids, parse_digits, split_kernel_lines
from vllm_headroom.scrape.proc.host import read_machine

UNPARTITIONED_MODE: Final = "SPX"
"""The compute partition mode of a card without partitions."""

KFD_FOLDER: Final = "class/kfd/kfd/proc"
"""The folder under /sys that contains one folder per compute process (KFD)."""

KFD_FILE_PREFIX: Final = "vram_"
"""In a process's folder, the file `vram_ID` has the process's bytes on one node."""

DRI_FOLDER: Final = "/dev/dri/"
"""The folder that contains the cards' device files, which processes open."""

GpuProcesses = tuple[GpuProcess, ...]

ProcessTable = Mapping[str, GpuProcesses]
"""The processes on each KFD node or card. The key is the node's ID or the card's PCI address."""


def read_card(card: AmdCard, index: int, context: "ReadContext") -> tuple[GpuReading, ...]:
    """Return one reading of the card, or one per partition if it is partitioned.

    Raises OSError if the card is gone or its memory cannot be read.
    """
    if card.nodes is not None and len(card.nodes) > 1:
        # KFD keeps listing the nodes of a card that is gone. For a card that is gone, this call
        # raises OSError.
        _read_vram(card, "total")
        return tuple(
            _read_partition(card, index, position, node, context)
            for position, node in enumerate(card.nodes)
        )
    memory = read_memory(card, context.proc)
    busy_percent = read_number_file(f"{card.folder}/gpu_busy_percent")
    # The driver's units are percent, thousandths of a degree, and millionths of a watt.
    millidegrees = read_number_file(card.temperature_file)
    microwatts = read_number_file(card.power_file)
    reading = GpuReading(
        vendor=Vendor.AMD,
        index=index,
        uuid=card.uuid,
        name=card.name,
        memory=memory,
        used_peak_bytes=context.update_peak(card.uuid, memory),
        utilization_ratio=None if busy_percent is None else busy_percent / 100,
        temperature_celsius=None if millidegrees is None else millidegrees / 1000,
        power_watts=None if microwatts is None else microwatts / 1_000_000,
        processes=context.list_on_card(card),
    )
    return (reading,)


def read_memory(card: AmdCard, proc: Path) -> GpuMemory | None:
    """Return the memory of a card without partitions.

    Returns None if the driver does not report the memory. Also returns None if the amount that
    processes can allocate is unknown. The amount is unknown if KFD hides the nodes of an integrated
    GPU or a partitioned card. Raises OSError if the card is gone or its files cannot be read.
    """
    total_bytes = _read_vram(card, "total")
    used_bytes = _read_vram(card, "used")
    if total_bytes is None or used_bytes is None:
        return None
    limit_bytes = card.nodes[0].memory_bytes if card.nodes else None
    # Only an integrated GPU can have more memory than its VRAM. An integrated GPU also uses the
    # machine's memory.
    if limit_bytes is not None and limit_bytes > total_bytes:
        return _read_unified_memory(card, limit_bytes, proc)
    if card.nodes is None:
        mode = read_line(f"{card.folder}/current_compute_partition")
        if card.is_apu or mode not in {"", UNPARTITIONED_MODE}:
            return None
    return _build_memory(total_bytes, used_bytes)


def _read_unified_memory(card: AmdCard, limit_bytes: int, proc: Path) -> GpuMemory | None:
    """Return the memory of an integrated GPU (APU) that uses the machine's memory.

    The GPU can use up to `limit_bytes` of the machine's memory (amdgpu_ttm_init). Returns None if
    the size of the machine's memory is unknown. Also returns None if the GPU's use of the machine's
    memory is unknown.
    """
    machine = read_machine(proc)
    granted_bytes = read_number_file(f"{card.folder}/mem_info_gtt_used")
    if machine is None or granted_bytes is None:
        return None
    free_bytes = max(0, min(limit_bytes - granted_bytes, machine.available_bytes))
    return _build_memory(limit_bytes, limit_bytes - free_bytes, machine.available_bytes)


def _read_vram(card: AmdCard, fact: str) -> int | None:
    """Return the `total` or `used` bytes of VRAM.

    Returns None if the driver has no file for this fact. Raises OSError if the card is gone or the
    file cannot be read.
    """
    try:
        return int(read_text_file(f"{card.folder}/mem_info_vram_{fact}"))
    except ValueError:
        raise OSError(errno.EBADMSG, f"mem_info_vram_{fact} holds no number") from None
    except FileNotFoundError:
        if is_driven(card.folder):
            return None
        raise


def _read_partition(
    card: AmdCard, index: int, position: int, node: KfdNode, context: "ReadContext"
) -> GpuReading:
    """Return a reading of the partition with this KFD node.

    The partition's memory in use is the sum of its processes' bytes in KFD. The sum does not
    include what the driver itself uses. The memory is None if the partition's size is unknown. The
    memory is also None if the use of any process is unknown.
    """
    processes = context.list_on_node(node)
    uuid = f"{card.uuid}-{position}"
    memory = None
    if node.memory_bytes is not None and processes is not None:
        held_bytes = [process.used_bytes for process in processes]
        # If the bytes of any process are unknown, the sum would be too small.
        known_bytes = [used_bytes for used_bytes in held_bytes if used_bytes is not None]
        if len(known_bytes) == len(held_bytes):
            memory = _build_memory(node.memory_bytes, sum(known_bytes))
    return GpuReading(
        vendor=Vendor.AMD,
        index=index,
        uuid=uuid,
        name=f"{card.name} partition {position}",
        memory=memory,
        used_peak_bytes=context.update_peak(uuid, memory),
        processes=processes,
    )


def _build_memory(
    total_bytes: int, used_bytes: int, machine_available_bytes: int | None = None
) -> GpuMemory:
    """Return a GPU's memory; `machine_available_bytes` is given if it is the machine's memory."""
    return GpuMemory(
        total_bytes=total_bytes,
        used_bytes=used_bytes,
        free_bytes=max(0, total_bytes - used_bytes),
        reserved_bytes=None,
        machine_available_bytes=machine_available_bytes,
    )


class ReadContext:
    """Data shared by all readings of a scrape: peaks, and holders of GPU memory.

    There are two sources for the processes that hold a card. KFD has a folder for each compute
    process. The folder contains the process's bytes on each node. Every user can read this folder.
    The folder's name is the pid in the machine's initial PID namespace. Only a daemon in that
    namespace can use the folder. If KFD's pids are unusable or nodes are hidden, /proc is used
    instead. /proc shows the open files of each process. Only users that may trace a process can
    read its open files. Open files show cards but not partitions.
    """

    def __init__(
        self, *, sys: str, proc: Path, now: float, peaks: defaultdict[str, RecentPeak]
    ) -> None:
        self.proc = proc
        self._sys = sys
        self._now = now
        self._peaks = peaks
        """The peaks by the UUID of a card or partition."""

    def update_peak(self, uuid: str, memory: GpuMemory | None) -> int | None:
        """Add the memory in use, if known. Return the highest sample, or None if there is none."""
        if memory is not None:
            self._peaks[uuid].add(self._now, memory.used_bytes)
        return self._peaks[uuid].highest_bytes(self._now)

    def list_on_node(self, node: KfdNode) -> GpuProcesses | None:
        """Return the processes on a KFD node, or None if KFD's processes cannot be read."""
        if self._by_node is None:
            return None
        return self._by_node.get(str(node.gpu_id), ())

    def list_on_card(self, card: AmdCard) -> GpuProcesses | None:
        """Return the processes on a card without partitions, or None if no source shows them."""
        if card.nodes and self._by_node is not None:
            return self.list_on_node(card.nodes[0])
        if self._by_address is None:
            return None
        return self._by_address.get(card.address, ())

    @cached_property
    def _kfd_pids(self) -> list[str] | None:
        """Return KFD's sorted pids, or None if this process cannot read or use them."""
        if not has_host_pids(self.proc):
            return None
        try:
            names = os.listdir(f"{self._sys}/{KFD_FOLDER}")  # noqa: PTH208 - no Path per file
        except OSError:
            return None
        return sorted(filter(str.isdecimal, names), key=int)

    @cached_property
    def _by_node(self) -> ProcessTable | None:
        """Return the processes, keyed by the id of the KFD node that they use.

        The bytes of a process are None if its file cannot be read. Returns None if KFD's processes
        cannot be read.
        """
        if self._kfd_pids is None:
            return None
        table: defaultdict[str, GpuProcesses] = defaultdict(tuple)
        for pid in self._kfd_pids:
            folder = f"{self._sys}/{KFD_FOLDER}/{pid}"
            for name in list_folder(folder):
                if not name.startswith(KFD_FILE_PREFIX):
                    continue
                try:
                    used_bytes = int(read_text_file(f"{folder}/{name}"))
                except FileNotFoundError:
                    continue  # The process has exited.
                except (OSError, ValueError):
                    used_bytes = None
                # If a process does not use a node, its file for the node contains 0.
                if used_bytes != 0:
                    gpu_id = name.removeprefix(KFD_FILE_PREFIX)
                    table[gpu_id] += (GpuProcess(pid=int(pid), used_bytes=used_bytes),)
        return table

    @cached_property
    def _by_address(self) -> ProcessTable | None:
        """Return the processes found through open files, keyed by the PCI address of their card.

        Returns None if access to a process was denied and no process was found.
        """
        # A machine has thousands of processes with hundreds of open files each. Therefore, if KFD
        # lists its processes, only those processes are read.
        pids = self._kfd_pids
        if pids is None:
            pids = [name for name in list_folder(str(self.proc)) if name.isdecimal()]
        table: defaultdict[str, GpuProcesses] = defaultdict(tuple)
        is_any_hidden = False
        for pid in pids:
            try:
                used_bytes_by_card = _read_open_cards(f"{self.proc}/{pid}")
            except PermissionError:
                is_any_hidden = True
                continue
            except OSError:
                continue  # The process has exited.
            for address, used_bytes in used_bytes_by_card.items():
                table[address] += (GpuProcess(pid=int(pid), used_bytes=used_bytes),)
        return None if is_any_hidden and not table else table


def _read_open_cards(process: str) -> dict[str, int]:
    """Return the bytes that a process holds on each card, by PCI address.

    Cards on which the process holds no memory are omitted. Raises OSError if the process has exited
    or may not be read.
    """
    # The bytes are keyed by client, because a client can have several open files.
    clients_bytes: dict[tuple[str, str], int] = {}
    for descriptor in os.listdir(f"{process}/fd"):  # noqa: PTH208 - a process has hundreds of them
        facts = _read_descriptor(process, descriptor)
        if facts.get("drm-driver") != DRIVER:
            continue
        size_kib = _parse_kib(facts.get("drm-memory-vram", ""))
        if size_kib is not None:
            client = facts.get("drm-pdev", ""), facts.get("drm-client-id", "")
            # The client's other files contain the same value.
            clients_bytes[client] = size_kib * KIB
    cards_bytes: defaultdict[str, int] = defaultdict(int)
    for (address, _), client_bytes in clients_bytes.items():
        cards_bytes[address] += client_bytes
    return {address: used_bytes for address, used_bytes in cards_bytes.items() if used_bytes}


def _parse_kib(text: str) -> int | None:
    """Return the number of a size such as `1024 KiB`.

    Returns None for any other text.
    """
    number, _, unit = text.partition(" ")
    return parse_digits(number) if unit.split()[:1] == ["KiB"] else None


def _read_descriptor(process: str, descriptor: str) -> dict[str, str]:
    """Return the kernel's facts about an open file of a DRM device, keyed by name.

    The result is empty for any other file. The result is also empty if the file has been closed in
    the meantime. Raises OSError for any other failure.
    """
    try:
        target = os.readlink(f"{process}/fd/{descriptor}")  # noqa: PTH115 - no Path per file
        if not target.startswith(DRI_FOLDER):
            return {}
        text = read_text_file(f"{process}/fdinfo/{descriptor}")
    except FileNotFoundError:
        return {}
    facts: dict[str, str] = {}
    for line in split_kernel_lines(text):
        name, _, value = line.partition(":")
        facts[name] = value.strip()
    return facts
