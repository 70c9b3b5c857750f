"""How many streams this process can hold at once."""

import contextlib
import resource
from pathlib import Path
from typing import Final

from vllm_headroom.scrape.proc.files import read_own_pid
from vllm_headroom.scrape.proc.host import read_host
from vllm_headroom_tools.cli import write_note
from vllm_headroom_tools.trace import BadInput

OWN_DESCRIPTORS: Final = 64
"""For what is opened besides streams: the sampler's files, /proc, the trace."""

STREAM_BYTES: Final = 16 * 2**10
"""Memory of a stream over http: 6 KiB in this process (measured) and what the kernel keeps of a
socket, doubled."""

TLS_STREAM_BYTES: Final = 128 * 2**10
"""The same over https, with 47 KiB in this process (measured): each connection has buffers for
encryption."""

UNLIMITED_DESCRIPTORS: Final = 2**31
"""Counts for no limit."""


def raise_descriptors() -> int:
    """Raise the soft limit of open files to the hard one, and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # a kernel whose own limit is lower keeps the soft one
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def list_limits(
    descriptors: int, *, tls: bool, proc: Path = Path("/proc")
) -> list[tuple[int, str]]:
    """Return how many streams to one address each limit allows, and its name, the lowest first.

    What cannot be read is left out.
    """
    open_descriptors = sum(1 for _ in Path("/proc/self/fd").iterdir())
    free_descriptors = max(0, descriptors - open_descriptors - OWN_DESCRIPTORS)
    limits = [(free_descriptors, f"ulimit -n {descriptors}")]
    # each connection to one address needs its own local port
    with contextlib.suppress(OSError, ValueError):
        first_port, last_port = (proc / "sys/net/ipv4/ip_local_port_range").read_text().split()
        ports = int(last_port) - int(first_port) + 1
        limits.append((ports, f"{ports} local ports (net.ipv4.ip_local_port_range)"))
    with contextlib.suppress(OSError):
        free_bytes = _read_free_memory(proc)
        if free_bytes is not None:
            stream_bytes = TLS_STREAM_BYTES if tls else STREAM_BYTES
            limits.append((free_bytes // stream_bytes, "memory"))
    return sorted(limits)


def _read_free_memory(proc: Path) -> int | None:
    """Return what the machine calls available, or what the container's limit leaves if less.

    None where neither is known; raises OSError.
    """
    reading = read_host(proc, read_own_pid(proc))
    free_bytes = []
    if reading.machine is not None:
        free_bytes.append(reading.machine.available_bytes)
    cgroup = reading.cgroup
    if cgroup is not None and cgroup.limit_bytes is not None:
        used_bytes = cgroup.used_bytes - cgroup.cache_bytes
        free_bytes.append(max(0, cgroup.limit_bytes - used_bytes))
    return min(free_bytes, default=None)


def check_capacity(concurrency: int, streams: int, *, tls: bool) -> None:
    """Note how many streams this process can hold; raises BadInput where they are too few."""
    held_streams, limit_name = list_limits(raise_descriptors(), tls=tls)[0]
    if streams > held_streams:
        raise BadInput(
            f"--concurrency {concurrency} needs {streams} streams at once, "
            f"and this process can hold {held_streams}: {limit_name} ends first"
        )
    write_note(
        f"{streams} streams at most; this process can hold {held_streams}, {limit_name} ends first"
    )
