"""A rule on host memory that is nearly full without a leak."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_headroom.commands.advise.facts import Facts
from vllm_headroom.commands.advise.finding import Advice, Cause, Change, Evidence
from vllm_headroom.commands.advise.limits import HOST_LOW_RATIO, LESS_CACHE_GB
from vllm_headroom.commands.advise.settings import Flag
from vllm_headroom.model import HostMemory
from vllm_headroom.units import size


def host_memory_short(facts: Facts) -> Advice | None:
    """Fit where the kernel killed for want of host memory, or little of the limit was left at the most."""
    host = facts.host
    if host is None or not (host.oom_kills or _is_low(host)):
        return None
    return Advice(
        cause=Cause.HOST_MEMORY,
        summary="Host memory, not the GPU's, is too small for this engine.",
        evidence=tuple(_evidence(host)),
        changes=(
            Change(
                text="Keep fewer processed images and videos; without any in the traffic this brings nothing",
                cost="more to process again; the default is 4 for each API server and each data-parallel rank",
                flag=Flag.MM_PROCESSOR_CACHE_GB,
                value=LESS_CACHE_GB,
            ),
            Change(
                text="Keep less on the host where that is asked for: offloaded weights, an offloaded KV cache, adapters"
                " beside those in use",
                cost="more of the GPU's memory, or slower where it is fetched again; a restart",
            ),
            Change(text="Raise the container's memory limit", cost="the node's memory; a restart"),
        ),
        remark="Sleep level 1 keeps the weights in host memory: the limit has to hold them as well.",
    )


def _is_low(host: HostMemory) -> bool:
    room_bytes = host.room_bytes
    return room_bytes is not None and host.limit_bytes is not None and room_bytes < HOST_LOW_RATIO * host.limit_bytes


def _evidence(host: HostMemory) -> Iterator[Evidence]:
    if host.oom_kills:
        text = f"processes that the kernel killed in its container: {host.oom_kills}"
        yield Evidence("oom_kills", host.oom_kills, text)
    if host.used_bytes is not None and host.limit_bytes is not None:
        text = f"at most {size(host.used_bytes)} of {size(host.limit_bytes)} were in use, without the cache of files"
        yield Evidence("host_used_bytes", host.used_bytes, text)
    if host.shm_used_bytes:
        yield Evidence("shm_used_bytes", host.shm_used_bytes, f"{size(host.shm_used_bytes)} of it lay in /dev/shm")
