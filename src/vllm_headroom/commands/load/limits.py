"""How many streams this process can hold, and what it runs out of first."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from typing import Final

from vllm_headroom.scrape.proc.files import own_pid
from vllm_headroom.scrape.proc.host import reading_of

OWN_DESCRIPTORS: Final = 64
"""For what is opened besides streams: the sampler's files, /proc, the trace."""

STREAM_BYTES: Final = 16 * 2**10
"""Memory of a stream over http: 6 KiB in this process (measured) and what the kernel keeps of a socket, doubled."""

TLS_STREAM_BYTES: Final = 128 * 2**10
"""The same over https, with 47 KiB in this process (measured): each connection has buffers for encryption."""

MOST: Final = 2**31


Limit = tuple[int, str]
"""How many streams something is enough for, and its name."""


def raise_descriptors() -> int:
    """Raise the soft limit of open files to the hard one, and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a kernel whose own limit is lower keeps the soft one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft


def limits(descriptors: int, *, tls: bool, proc: Path = Path("/proc")) -> list[Limit]:
    """Return what limits the streams to one address, the first to end first; what cannot be read is left out."""
    open_now = sum(1 for _ in Path("/proc/self/fd").iterdir())
    ports = _local_ports(proc)
    memory = _free_bytes(proc)
    found = (
        (max(0, descriptors - open_now - OWN_DESCRIPTORS), f"ulimit -n {descriptors}"),
        None if ports is None else (ports, f"{ports} local ports (net.ipv4.ip_local_port_range)"),
        None if memory is None else (memory // (TLS_STREAM_BYTES if tls else STREAM_BYTES), "memory"),
    )
    return sorted(limit for limit in found if limit)


def _local_ports(proc: Path) -> int | None:
    try:
        first, last = (proc / "sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(last) - int(first) + 1
    except (OSError, ValueError):
        return None


def _free_bytes(proc: Path) -> int | None:
    """Return what the machine calls available, or what is left of the container's limit where that is less."""
    try:
        here = reading_of(proc, own_pid(proc))
    except OSError:
        return None
    found = [] if here.machine is None else [here.machine.available_bytes]
    if here.cgroup is not None and here.cgroup.limit_bytes is not None:
        found.append(max(0, here.cgroup.limit_bytes - here.cgroup.used_bytes + here.cgroup.cache_bytes))
    return min(found, default=None)
