"""Rules on what is no want of the GPU's memory: ends in the midst of work, and host memory that is nearly full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_headroom.commands.advise.facts import Ending, Facts
from vllm_headroom.commands.advise.finding import Advice, Cause, Change, Evidence, count
from vllm_headroom.commands.advise.limits import FAILED_STARTS, HOST_LOW_RATIO, LESS_CACHE_GB
from vllm_headroom.commands.advise.settings import Flag
from vllm_headroom.derive.verdicts import LOW_BYTES
from vllm_headroom.model import HostMemory
from vllm_headroom.units import instant, size

REMARK: Final = (
    "No option that sizes GPU memory has a part in it. Restarts that were meant, in the midst of requests, look the"
    " same where nothing was left behind."
)


def crash(facts: Facts) -> Advice | None:
    """Fit where an engine left processes behind, or ended FAILED_STARTS times and more while requests ran.

    Only ends count of which it is known that GPU memory was left.
    """
    found = tuple(ending for ending in sudden(facts) if ending.room_bytes is not None)
    if len(found) < FAILED_STARTS and not any(ending.orphan_bytes for ending in found):
        return None
    look = (
        f"Read vLLM's log up to {instant(found[-1].seconds)} (kubectl logs --previous), and the kernel's log for an Xid"
        " or a kill for want of host memory"
    )
    return Advice(
        cause=Cause.CRASH,
        summary="The engine crashed, and not for want of GPU memory.",
        evidence=tuple(_evidence(found)),
        changes=(Change(text=look, cost="none to this engine"),),
        remark=REMARK,
    )


def sudden(facts: Facts) -> tuple[Ending, ...]:
    """Return the ends while requests ran or that left processes behind, with LOW_BYTES or more left."""
    return tuple(
        ending
        for ending in facts.endings
        if (ending.running or ending.orphan_bytes) and (ending.room_bytes is None or ending.room_bytes >= LOW_BYTES)
    )


def _evidence(found: tuple[Ending, ...]) -> Iterator[Evidence]:
    last = found[-1]
    times = "once," if len(found) == 1 else f"{len(found)} times, the last"
    yield Evidence("crashes", len(found), f"it ended {times} at {instant(last.seconds)}")
    if last.running is not None:
        yield Evidence("running", last.running, f"{count(last.running)} requests ran just before")
    if last.room_bytes is not None:
        left = f"{size(last.room_bytes)} were left then"
        yield Evidence("room_bytes", last.room_bytes, left)
    orphans = max(ending.orphan_bytes for ending in found)
    if orphans:
        text = f"processes that it left behind went on to hold {size(orphans)}: not another's"
        yield Evidence("orphan_bytes", orphans, text)


def host_memory_short(facts: Facts) -> Advice | None:
    """Fit where the kernel killed for want of host memory, or little of the limit was left at the most."""
    host = facts.host
    if host is None or not (host.oom_kills or _is_low(host)):
        return None
    return Advice(
        cause=Cause.HOST_MEMORY,
        summary="Host memory, not the GPU's, is too small for this engine.",
        evidence=tuple(_of_host(host)),
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


def _of_host(host: HostMemory) -> Iterator[Evidence]:
    if host.oom_kills:
        text = f"processes that the kernel killed in its container: {host.oom_kills}"
        yield Evidence("oom_kills", host.oom_kills, text)
    if host.used_bytes is not None and host.limit_bytes is not None:
        text = f"at most {size(host.used_bytes)} of {size(host.limit_bytes)} were in use, without the cache of files"
        yield Evidence("host_used_bytes", host.used_bytes, text)
    if host.shm_used_bytes:
        yield Evidence("shm_used_bytes", host.shm_used_bytes, f"{size(host.shm_used_bytes)} of it lay in /dev/shm")
