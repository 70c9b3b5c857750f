"""Pods and services of a node, in a /proc and a folder of logs made by hand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from tests.fakes.proc_tree import ProcTree

UID: Final = "11111111-2222-3333-4444-55555555{:04d}"
FIB_TRIE: Final = """\
Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
Local:
  +-- 0.0.0.0/0 3 0 5
     +-- 127.0.0.0/8 2 0 2
        |-- 127.0.0.1
           /32 host LOCAL
        |-- 127.255.255.255
           /32 link BROADCAST
"""
TCP_HEAD: Final = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"


def write_listening(address: str, port: int, state: str = "0A") -> str:
    """Return a line of net/tcp or net/tcp6."""
    packed = ip_address(address).packed
    words = [packed[start : start + 4] for start in range(0, len(packed), 4)]
    text = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    return f"   0: {text}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0\n"


class NodeTree(ProcTree):
    """A node whose daemon is in a separate pod."""

    def __init__(self, folder: Path) -> None:
        proc = folder / "proc"
        proc.mkdir()
        super().__init__(proc)
        self.container_logs = folder / "containers"
        self.container_logs.mkdir()
        self.pod_logs = folder / "pods"
        self.pod_logs.mkdir()

    def add_pod(
        self,
        number: int,
        pid: int,
        *command: str,
        name: str = "",
        address: str = "",
        listening: Sequence[tuple[str, int]] = (("0.0.0.0", 8000),),
        containers: Sequence[str] = ("vllm",),
        parent_pid: int = 1,
    ) -> str:
        """Write a pod with a process in its container; return its UID."""
        uid = UID.format(number)
        self.add(pid, parent_pid, *command)
        slice_name = f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
        container_id = f"{number:02d}" * 32 if number < 100 else f"{number:04d}" * 16
        self.join(pid, f"/../../kubepods-burstable.slice/{slice_name}/cri-containerd-{container_id}.scope")
        self.connect(pid, address or f"10.244.1.{number}", listening)
        if name:
            for container in containers:
                (self.pod_logs / f"default_{name}_{uid}" / container).mkdir(parents=True, exist_ok=True)
        return uid

    def join(self, pid: int, cgroup: str) -> None:
        """Put a process into a cgroup of version 2."""
        (self.path / str(pid) / "cgroup").write_text(f"0::{cgroup}\n")

    def connect(self, pid: int, address: str, listening: Sequence[tuple[str, int]]) -> None:
        """Give a process a network with an address, and sockets that listen."""
        net = self.path / str(pid) / "net"
        net.mkdir(exist_ok=True)
        (net / "fib_trie").write_text(f"{FIB_TRIE}        |-- {address}\n           /32 host LOCAL\n")
        (net / "stat").mkdir(exist_ok=True)
        (net / "tcp").write_text(
            TCP_HEAD + "".join(write_listening(*bound) for bound in listening) + write_listening(address, 41000, "01")
        )
