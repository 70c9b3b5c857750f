"""Limits on how many streams this process can keep open at the same time."""

import contextlib
import resource
from pathlib import Path
from typing import Final

from vllm_headroom.scrape.proc.files import read_own_pid
from vllm_headroom.scrape.proc.host import read_host
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.cli import write_note

OWN_DESCRIPTORS: Final = 64
"""The number of file descriptors reserved for everything except streams. These are the sampler's
files, /proc and the trace.
"""

STREAM_BYTES: Final = 16 * 2**10
"""The memory reserved per stream over http. This is twice the actual amount. A stream takes 6 KiB
in this process (measured). Its socket takes further memory in the kernel.
"""

TLS_STREAM_BYTES: Final = 128 * 2**10
"""The memory reserved per stream over https. This is twice the actual amount. A stream takes 47 KiB
in this process (measured). Its socket takes further memory in the kernel. Each connection has
encryption buffers.
"""

UNLIMITED_DESCRIPTORS: Final = 2**31
"""The number of descriptors that is assumed if there is no limit."""


def raise_descriptors() -> int:
    """Raise the soft limit on open files to the hard limit.

    Returns the resulting soft limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # if the kernel's own limit is lower, setrlimit fails and changes nothing
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def list_limits(
    descriptors: int, *, uses_tls: bool, proc: Path = Path("/proc")
) -> list[tuple[int, str]]:
    """Return the limits, lowest first.

    A limit is a number of streams to one address, and a name. Limits that cannot be read are
    omitted. The limit on open files is always included.
    """
    # Descriptors that are already open: standard streams, the trace and libraries.
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
            stream_bytes = TLS_STREAM_BYTES if uses_tls else STREAM_BYTES
            limits.append((free_bytes // stream_bytes, "memory"))
    return sorted(limits)


def _read_free_memory(proc: Path) -> int | None:
    """Return how many more bytes of memory this process may use.

    The result is the machine's available memory or the unused part of the container's limit,
    whichever is smaller. Returns None if both figures are unknown. May raise OSError.
    """
    reading = read_host(proc, read_own_pid(proc))
    free_bytes = []
    if reading.machine is not None:
        free_bytes.append(reading.machine.available_bytes)
    cgroup = reading.cgroup
    if cgroup is not None and cgroup.limit_bytes is not None:
        # the kernel drops the page cache before it refuses to allocate memory
        used_bytes = cgroup.used_bytes - cgroup.cache_bytes
        free_bytes.append(max(0, cgroup.limit_bytes - used_bytes))
    return min(free_bytes, default=None)


def check_capacity(concurrency: int, streams: int, *, uses_tls: bool) -> None:
    """Report on standard error how many streams this process can keep open at once.

    `streams` is the number of streams that `--concurrency` needs. Raises BadInput if this process
    cannot keep that many open.
    """
    # The usual limit of 1,024 open files is too low for most loads. Raise it first.
    held_streams, limit_name = list_limits(raise_descriptors(), uses_tls=uses_tls)[0]
    if streams > held_streams:
        raise BadInput(
            f"--concurrency {concurrency} needs {streams} streams at once, "
            f"and {limit_name} allows {held_streams} in this process"
        )
    write_note(
        f"up to {streams} streams at once; {limit_name} allows {held_streams} in this process"
    )
