"""What does the engine use its memory on a GPU for?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.derive.page_facts import together
from vllm_headroom.model import AllocatorReading, EngineParts, Failure, Gpu, Inside, ProbeReadings
from vllm_headroom.vocabulary import MemoryPart

RACE_BYTES: Final = 64 * 2**20
"""What may be freed between the probe's look and NVML's: an engine that seems to hold so much less than torch has
reserved holds nothing outside it; one that holds less still is not understood."""


_HOMES: Final = (MemoryPart.CACHED, MemoryPart.FRAGMENTED, MemoryPart.OUTSIDE_TORCH)
"""Where captured graphs are counted otherwise: their private pools are whole free segments for the most part."""


class Sums(Struct, frozen=True, kw_only=True):
    """What the processes on one GPU say together, None where one of them does not say."""

    allocated: int | None
    reserved: int | None
    split: int | None
    weights: int | None
    kv_cache: int | None
    graphs: int | None


def with_inside(gpus: tuple[Gpu, ...] | Failure, probe: ProbeReadings | Failure | None) -> tuple[Gpu, ...] | Failure:
    """Return the GPUs with what the engine's present processes say of each."""
    if isinstance(gpus, Failure) or not isinstance(probe, ProbeReadings):
        return gpus
    return tuple(replace(gpu, inside=_inside(gpu, probe)) for gpu in gpus)


def _inside(gpu: Gpu, probe: ProbeReadings) -> Inside | None:
    """Return nothing of a GPU that is not the engine's, nor of figures that no device of this size can have."""
    uuid, memory = gpu.reading.uuid.casefold(), gpu.reading.memory
    found = [
        (device, each.parts if len(each.devices) == 1 else None)
        for each in probe.present
        for device in each.devices
        if device.uuid.casefold() == uuid
    ]
    if not found or gpu.attribution is None:
        return None
    sums = _sums(found)
    if memory is not None and max(sums.reserved or 0, sums.kv_cache or 0, sums.weights or 0) > memory.total_bytes:
        return None
    parts = ledger(sums, gpu.held_bytes)
    return Inside(
        granted_bytes=min((device.total_bytes for device, _ in found if device.total_bytes is not None), default=None),
        allocated_bytes=sums.allocated,
        reserved_bytes=sums.reserved,
        parts=tuple((part, parts[part]) for part in MemoryPart if part in parts),
    )


def _sums(found: list[tuple[AllocatorReading, EngineParts | None]]) -> Sums:
    devices, parts = [device for device, _ in found], [part for _, part in found]
    return Sums(
        allocated=_whole(device.allocated_bytes for device in devices),
        reserved=_whole(device.reserved_bytes for device in devices),
        split=_whole(device.inactive_split_bytes for device in devices),
        weights=_whole(_now(part, "weights_bytes") for part in parts),
        kv_cache=_whole(_now(part, "kv_cache_bytes") for part in parts),
        graphs=_whole(None if part is None else part.cuda_graphs_bytes for part in parts),
    )


def _whole(values: Iterable[int | None]) -> int | None:
    total = together(values)
    return None if total is None else int(total)


def _now(parts: EngineParts | None, name: Literal["weights_bytes", "kv_cache_bytes"]) -> int | None:
    """Return what a part takes now: the pool knows it, and what was measured at the start is gone during sleep."""
    if parts is None or (parts.pool is None and parts.asleep):
        return None
    n_bytes: int | None = getattr(parts if parts.pool is None else parts.pool, name)
    return n_bytes


def ledger(sums: Sums, held_bytes: int | None) -> dict[MemoryPart, int]:
    """Return the parts that are known; with all of torch's figures they sum to what the engine holds.

    What torch has allocated is weights, KV cache and other tensors; what it has reserved beyond that is fragmented or
    cached; what the engine holds beyond that is outside torch. Each remainder is there only when all that it is the
    remainder of is known. A captured graph keeps free blocks of a private pool and memory of the driver's: what vLLM
    measured for graphs is taken out of these, so that every byte counts once.
    """
    parts: dict[MemoryPart, int] = {}
    if sums.weights is not None:
        parts[MemoryPart.WEIGHTS] = sums.weights
    if sums.kv_cache is not None:
        parts[MemoryPart.KV_CACHE] = sums.kv_cache
    if sums.allocated is not None and sums.weights is not None and sums.kv_cache is not None:
        other = sums.allocated - sums.weights - sums.kv_cache
        if other >= 0:
            parts[MemoryPart.OTHER_TENSORS] = other
    return parts | _with_graphs(_free(sums), _outside(sums, held_bytes), sums.graphs)


def _free(sums: Sums) -> dict[MemoryPart, int]:
    """Return what torch has reserved and nobody uses."""
    if sums.split is None:
        return {}
    free = {MemoryPart.FRAGMENTED: sums.split}
    if sums.allocated is None or sums.reserved is None:
        return free
    cached = sums.reserved - sums.allocated - sums.split
    return {**free, MemoryPart.CACHED: cached} if cached >= 0 else {}


def _outside(sums: Sums, held_bytes: int | None) -> dict[MemoryPart, int]:
    if sums.reserved is None or held_bytes is None or held_bytes < sums.reserved - RACE_BYTES:
        return {}
    return {MemoryPart.OUTSIDE_TORCH: max(0, held_bytes - sums.reserved)}


def _with_graphs(
    free: dict[MemoryPart, int], outside: dict[MemoryPart, int], graphs: int | None
) -> dict[MemoryPart, int]:
    """Return all three, graphs taken out of them in this order; none if they are larger."""
    rest = free | outside
    if graphs is None or len(rest) < len(_HOMES) or graphs > sum(rest.values()):
        return rest
    left = graphs
    for part in _HOMES:
        taken = min(left, rest[part])
        rest[part], left = rest[part] - taken, left - taken
    return {MemoryPart.CUDA_GRAPHS: graphs, **rest}
