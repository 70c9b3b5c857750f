"""Rules on engines that end before they serve."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor, inf
from statistics import median
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.attribution import described
from vllm_headroom.derive.verdicts import LOW_BYTES, NEIGHBOUR_BYTES
from vllm_headroom.model import HostMemory
from vllm_headroom.units import instant, size
from vllm_headroom_tools.advise.facts import (
    AIM_BYTES,
    FAILED_STARTS,
    HIGHEST_UTILIZATION,
    HOST_LOW_RATIO,
    LESS_CACHE_GB,
    Ending,
    Extent,
    Facts,
    GpuFacts,
    Origin,
    Start,
)
from vllm_headroom_tools.advise.finding import Advice, Cause, Change, Evidence, count, lowered, several
from vllm_headroom_tools.advise.rules.capacity import ran_short, split, take_less
from vllm_headroom_tools.advise.settings import Flag

LOADED_RATIO: Final = 0.5
"""Ours: an engine that held half of the GPU before it gave up had loaded its model."""


def failing_starts(facts: Facts) -> Advice | None:
    """Fit where FAILED_STARTS and more ended before the engine served.

    With less than LOW_BYTES left, or on a GPU that others held already, the changes are those of the runbooks' README,
    branch A. With room left after the model was loaded, vLLM found none for its KV cache: "No available memory for the
    cache blocks", or a cache too small for one request of the longest kind.
    """
    starts = facts.failed_starts
    if len(starts) < FAILED_STARTS:
        return None
    taken = median(start.most_others_bytes for start in starts) > NEIGHBOUR_BYTES
    if not taken and all(start.least_room_bytes is None or start.least_room_bytes >= LOW_BYTES for start in starts):
        return _no_cache(facts, starts)
    return Advice(
        cause=Cause.START_UP,
        summary="The engine runs out of GPU memory while it starts."
        if not taken
        else "The engine ends while it starts, on a GPU that others hold already.",
        evidence=tuple(_starting_evidence(starts)),
        changes=_beside_others(facts) if taken else _smaller(facts),
        remark='vLLM\'s log says at which step: look for "memory" in it.',
    )


def _no_cache(facts: Facts, starts: tuple[Start, ...]) -> Advice | None:
    usable = min((gpu.usable_bytes for gpu in facts.gpus if gpu.usable_bytes), default=inf)
    loaded = tuple(start for start in starts if start.most_held_bytes >= LOADED_RATIO * usable)
    if len(loaded) < FAILED_STARTS:
        return None
    return Advice(
        cause=Cause.MODEL_DOES_NOT_FIT,
        summary="The engine loads its model and ends before it serves, with GPU memory left.",
        evidence=tuple(_starting_evidence(loaded)),
        changes=several(_larger(facts, loaded), split(facts)),
        remark="vllm-headroom plan says what fits; a shorter longest request is enough where vLLM's log says so.",
    )


def _beside_others(facts: Facts) -> tuple[Change, ...]:
    move = Change(
        text="Find them with nvidia-smi on the node, and have their owner move or stop them; a left-over of this engine"
        " is ended with kill",
        cost="none to this engine",
    )
    rooms = [start.room_before_bytes for start in facts.failed_starts if start.room_before_bytes is not None]
    usable = [gpu.usable_bytes for gpu in facts.gpus if gpu.usable_bytes]
    if not rooms or not usable or facts.settings.sizes_cache_in_bytes:
        return (move,)
    value = floor((min(rooms) - AIM_BYTES) / max(usable) * 100) / 100
    if facts.settings.gpu_memory_utilization is None and value >= HIGHEST_UTILIZATION:
        return (move,)
    share = lowered(
        facts,
        Flag.GPU_MEMORY_UTILIZATION,
        value,
        text=f"{size(min(rooms))} were free before the start, and vLLM refuses to start with less than its share",
        cost="a smaller KV cache, or none at all if the model does not fit; a restart",
    )
    return several(move, share)


def _smaller(facts: Facts) -> tuple[Change, ...]:
    rooms = [start.least_room_bytes for start in facts.failed_starts if start.least_room_bytes is not None]
    lower = take_less(facts, facts.gpus[0], AIM_BYTES - min(rooms)) if rooms and facts.gpus else None
    fewer = lowered(
        facts,
        Flag.MAX_NUM_SEQS,
        (facts.settings.max_num_seqs or 0) // 2,
        text="warming up the sampler and the graphs take less",
        cost="in a burst requests wait in the queue; a restart",
    )
    eager = Change(
        flag=Flag.ENFORCE_EAGER,
        text="captures no CUDA graphs, if it ends while it does",
        cost="every token comes slower; a restart",
    )
    wider = split(facts)
    if wider is not None:
        wider = replace(wider, text="if it ends while it loads the weights, which do not fit then")
    return several(lower, fewer, eager, wider)


def _larger(facts: Facts, starts: tuple[Start, ...]) -> Change | None:
    """Return a larger share where the GPU had more than AIM_BYTES left at all of these starts."""
    rooms = [start.least_room_bytes for start in starts if start.least_room_bytes is not None]
    now = facts.settings.gpu_memory_utilization
    if not rooms or min(rooms) <= AIM_BYTES or facts.settings.sizes_cache_in_bytes or now is None or ran_short(facts):
        return None
    usable = max(gpu.usable_bytes or 0.0 for gpu in facts.gpus)
    spare = (min(rooms) - AIM_BYTES) / usable
    value = floor(min(HIGHEST_UTILIZATION, now + spare) * 100) / 100
    if value <= now:
        return None
    return Change(
        flag=Flag.GPU_MEMORY_UTILIZATION,
        value=value,
        now=now,
        text=f"{size(min(rooms))} were left when it ended",
        cost="less room for bursts; a restart",
    )


def _starting_evidence(starts: tuple[Start, ...]) -> Iterator[Evidence]:
    yield Evidence("failed_starts", len(starts), f"{len(starts)} starts ended before it served")
    held = max(start.most_held_bytes for start in starts)
    yield Evidence("most_held_bytes", held, f"it held {size(held)} of a GPU at the most")
    rooms = [start.least_room_bytes for start in starts if start.least_room_bytes is not None]
    if rooms:
        yield Evidence("least_room_bytes", min(rooms), f"{size(min(rooms))} were left at the least")
    others = max(start.most_others_bytes for start in starts)
    if others > 0:
        yield Evidence("most_others_bytes", others, f"others held {size(others)}")


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
        evidence=tuple(_crash_evidence(found)),
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


def _crash_evidence(found: tuple[Ending, ...]) -> Iterator[Evidence]:
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


def another_tenant(facts: Facts) -> Advice | None:
    """Fit where others hold more than NEIGHBOUR_BYTES and took it meanwhile, or leave less than AIM_BYTES.

    On a page nothing is known of before, so that what they hold now is said. What others have held all the time beside
    an engine that has room belongs there (runbook HeadroomNeighbourGrowing, "Do nothing when").
    """
    known = ((gpu, gpu.others) for gpu in facts.gpus if gpu.others is not None)
    found = [(gpu, others) for gpu, others in known if _matters(gpu, others, facts.origin)]
    if not found:
        return None
    gpu, others = max(found, key=lambda each: each[1].most)
    share = _both_stay(facts, gpu, others)
    now = " now" if facts.origin is Origin.PAGE else ""
    return Advice(
        cause=Cause.ANOTHER_TENANT,
        summary=f"Another process takes memory of {gpu.called}{now}.",
        evidence=tuple(_tenant_evidence(gpu, others, facts.origin)),
        changes=several(
            Change(
                text="Find it with nvidia-smi on the node, and have its owner move it to another GPU or stop it",
                cost="none to this engine",
            ),
            share,
        ),
        remark=None if share is None else "A smaller share for vLLM is right only where both have to stay on this GPU.",
    )


def _both_stay(facts: Facts, gpu: GpuFacts, others: Extent) -> Change | None:
    """Return the smaller share with which both have room: AIM_BYTES at peaks, and what vLLM wants free to start.

    vLLM refuses to start with less free than its share of the GPU (vllm/v1/worker/utils.py).
    """
    needs = [0.0]
    if gpu.least_room_bytes is not None:
        needs.append(AIM_BYTES - gpu.least_room_bytes)
    utilization = facts.settings.gpu_memory_utilization
    if utilization is not None and gpu.usable_bytes is not None:
        needs.append(others.most - (1.0 - utilization) * gpu.usable_bytes)
    return take_less(facts, gpu, max(needs)) if max(needs) > 0 else None


def _matters(gpu: GpuFacts, others: Extent, origin: Origin) -> bool:
    takes = origin is Origin.PAGE or others.most - others.least > NEIGHBOUR_BYTES
    short = gpu.least_room_bytes is not None and gpu.least_room_bytes < AIM_BYTES
    return others.most > NEIGHBOUR_BYTES and (takes or short)


def _tenant_evidence(gpu: GpuFacts, others: Extent, origin: Origin) -> Iterator[Evidence]:
    text = f"processes that are not the engine's hold {size(others.now)} of {gpu.called}"
    yield Evidence("others_bytes", others.now, text)
    if origin is Origin.TRACE:
        most = f"{size(others.most)} at the most, {size(others.least)} at the least"
        yield Evidence("most_others_bytes", others.most, most)
    if gpu.least_room_bytes is not None:
        left = size(gpu.least_room_bytes)
        yield Evidence("least_room_bytes", gpu.least_room_bytes, f"{left} were left at the highest peak")


def left_behind(facts: Facts) -> Advice | None:
    """Fit where at the end of a trace processes on the engine's GPUs serve no engine any more; a page names none."""
    evidence = tuple(_left(facts))
    if not evidence:
        return None
    return Advice(
        cause=Cause.LEFT_BEHIND,
        summary="What is left of an engine that has ended holds GPU memory.",
        evidence=evidence,
        changes=(
            Change(
                text="End it, or where nothing runs any more reset the GPU: vllm-headroom doctor names its pid",
                cost="none to this engine; a reset needs a GPU that nothing else has open",
            ),
        ),
    )


def _left(facts: Facts) -> Iterator[Evidence]:
    for gpu in facts.gpus:
        for leftover in gpu.leftovers:
            known = "unknown" if leftover.used_bytes is None else leftover.used_bytes
            yield Evidence("left_behind_bytes", known, f"{gpu.called}: {described(leftover)}")
