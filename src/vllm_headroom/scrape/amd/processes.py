"""Which processes hold memory of AMD's cards."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Final

from vllm_headroom.model import GpuProcess
from vllm_headroom.scrape.amd.cards import DRIVER, Card, Node
from vllm_headroom.scrape.amd.files import names, number, text
from vllm_headroom.scrape.proc.files import sees_host_pids

KFD: Final = "class/kfd/kfd/proc"
DEVICES: Final = "/dev/dri/"
_KIB: Final = 1024
Listed = Mapping[str, tuple[GpuProcess, ...]]


class CardProcesses:
    """What is listed at one moment, by KFD or by the processes' own files; a process is listed where it holds memory.

    KFD has a folder for each process that computes, with its bytes on each node, readable for all. It names them by the
    machine's pids, so that it is of use in the machine's first PID namespace only. Elsewhere, and where the nodes are
    hidden, /proc tells what each process has open, to who may trace it; it knows cards, not their partitions.
    """

    def __init__(self, sys: str, proc: Path) -> None:
        self._sys = sys
        self._proc = proc

    def on_node(self, node: Node) -> tuple[GpuProcess, ...] | None:
        """Return the processes on a node of KFD, None where they cannot be known."""
        listed = self._by_kfd
        return None if listed is None else listed.get(str(node.gpu_id), ())

    def on_card(self, card: Card) -> tuple[GpuProcess, ...] | None:
        """Return the processes on a card that is not cut, None where they cannot be known."""
        if card.nodes and self._by_kfd is not None:
            return self.on_node(card.nodes[0])
        listed = self._by_files
        return None if listed is None else listed.get(card.address, ())

    @cached_property
    def _computing(self) -> list[str] | None:
        """The pids that KFD lists, None where it does not or they mean others here."""
        try:
            found = os.listdir(f"{self._sys}/{KFD}") if sees_host_pids(self._proc) else None  # noqa: PTH208 - as in all
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
            for name in names(folder):
                if name.startswith("vram_"):
                    listed[name.removeprefix("vram_")] += _on_node(int(pid), f"{folder}/{name}")
        return listed

    @cached_property
    def _by_files(self) -> Listed | None:
        """Return the processes by the address of their card; None where some hide theirs and none tells.

        A machine has thousands of processes, and each some hundred files: only those that compute are asked, if known.
        """
        listed: defaultdict[str, tuple[GpuProcess, ...]] = defaultdict(tuple)
        hidden = False
        pids = filter(str.isdecimal, names(str(self._proc))) if self._computing is None else self._computing
        for pid in pids:
            try:
                held = _held(f"{self._proc}/{pid}")
            except PermissionError:
                hidden = True
            except OSError:
                continue  # it has ended
            else:
                for address, held_bytes in held.items():
                    listed[address] += (GpuProcess(pid=int(pid), used_bytes=held_bytes),)
        return None if hidden and not listed else listed


def _on_node(pid: int, path: str) -> tuple[GpuProcess, ...]:
    """Return a process that holds memory of a node; it has a file for every node it may use, at 0 where it does not."""
    try:
        held_bytes = number(path)
    except FileNotFoundError:
        return ()  # it has ended
    except OSError:
        held_bytes = None
    return () if held_bytes == 0 else (GpuProcess(pid=pid, used_bytes=held_bytes),)


def _held(process: str) -> dict[str, int]:
    """Return the bytes that a process holds of each card; raise OSError where it does not show or has ended.

    A client of DRM is one however many files it is open through (the kernel's drm-usage-stats.rst).
    """
    clients: dict[tuple[str, str], int] = {}
    for name in os.listdir(f"{process}/fd"):  # noqa: PTH208 - a process has hundreds of them
        facts = _facts(process, name)
        size, unit = (*facts.get("drm-memory-vram", "").split(), "", "")[:2]
        if facts.get("drm-driver") == DRIVER and size.isdecimal() and unit == "KiB":
            clients[facts.get("drm-pdev", ""), facts.get("drm-client-id", "")] = int(size) * _KIB
    held: defaultdict[str, int] = defaultdict(int)
    for (address, _), client_bytes in clients.items():
        held[address] += client_bytes
    return {address: held_bytes for address, held_bytes in held.items() if held_bytes}


def _facts(process: str, descriptor: str) -> dict[str, str]:
    """Return what the kernel says of an open file that is a device of DRM, nothing of any other or a closed one."""
    try:
        if not os.readlink(f"{process}/fd/{descriptor}").startswith(DEVICES):  # noqa: PTH115 - as above
            return {}
        lines = text(f"{process}/fdinfo/{descriptor}").splitlines()
    except FileNotFoundError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
