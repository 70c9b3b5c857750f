"""What the engine's memory on a GPU is used for."""

from typing import Final, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.derive.sums import sum_known
from vllm_headroom.model import (
    AllocatorReading,
    Failure,
    Gpu,
    Inside,
    ProbeReadings,
    WorkerMeasurements,
)
from vllm_headroom.units import MIB
from vllm_headroom.vocabulary import MemoryPart

PROBE_RACE_BYTES: Final = 64 * MIB
"""This much memory may be freed between the probe's reading and NVML's. If reserved memory exceeds
the engine's by at most this much, nothing is outside torch. A larger difference has no explanation,
so it makes the memory outside torch unknown.
"""

_GRAPH_HOMES: Final = (MemoryPart.CACHED, MemoryPart.FRAGMENTED, MemoryPart.OUTSIDE_TORCH)
"""The parts that include captured graphs. The size of the graphs is subtracted from these parts in
this order. The cached part comes first. The graphs' private pools are mostly whole free segments of
torch.
"""


class Sums(Struct, frozen=True, kw_only=True):
    """Sums in bytes over the processes on one GPU.

    A sum is None if any process does not report the value.
    """

    allocated: int | None
    reserved: int | None
    split: int | None
    """Unused memory that torch cannot release, because the rest of its segment is in use."""
    weights: int | None
    kv_cache: int | None
    graphs: int | None


def add_inside(
    gpus: tuple[Gpu, ...] | Failure, probe: ProbeReadings | Failure | None
) -> tuple[Gpu, ...] | Failure:
    """Return the GPUs, adding what the probe reports about the engine's running processes.

    The GPUs are returned unchanged if they or the probe's files could not be read.
    """
    if isinstance(gpus, Failure) or not isinstance(probe, ProbeReadings):
        return gpus
    return tuple(replace(gpu, inside=_find_inside(gpu, probe)) for gpu in gpus)


def _find_inside(gpu: Gpu, probe: ProbeReadings) -> Inside | None:
    """Return what the engine's processes report about a GPU.

    Returns None if:

    - the GPU is not the engine's
    - no process reports about it
    - the reported memory exceeds the GPU's memory
    """
    if gpu.attribution is None:
        return None
    reports = _list_reports(gpu, probe)
    if not reports:
        return None
    sums = _sum_up(reports)
    if _exceeds_device(sums, gpu):
        return None
    sizes = [report.allocator.total_bytes for report in reports]
    ledger = build_ledger(sums, gpu.held_bytes)
    return Inside(
        # The process with the smallest granted memory limits the engine.
        granted_bytes=min((size for size in sizes if size is not None), default=None),
        allocated_bytes=sums.allocated,
        reserved_bytes=sums.reserved,
        parts=tuple((part, ledger[part]) for part in MemoryPart if part in ledger),
    )


def _exceeds_device(sums: Sums, gpu: Gpu) -> bool:
    """Return whether the processes report more than the GPU's memory, or False if unknown."""
    if gpu.reading.memory is None:
        return False
    largest_bytes = max(sums.reserved or 0, sums.kv_cache or 0, sums.weights or 0)
    return largest_bytes > gpu.reading.memory.total_bytes


class ProbedDevice(NamedTuple):
    """What one process reports about one GPU."""

    allocator: AllocatorReading
    parts: WorkerMeasurements | None
    """vLLM's own measurements, or None if they may belong to another GPU."""

    @property
    def graphs_bytes(self) -> int | None:
        """The size of captured graphs, or None if unknown."""
        return None if self.parts is None else self.parts.cuda_graphs_bytes


def _list_reports(gpu: Gpu, probe: ProbeReadings) -> list[ProbedDevice]:
    """Return each running process's report about this GPU."""
    uuid = gpu.reading.uuid.casefold()
    reports = []
    for process in probe.present:
        # A process on several devices does not report which device it measured.
        parts = process.parts if len(process.devices) == 1 else None
        reports += [
            ProbedDevice(device, parts)
            for device in process.devices
            if device.uuid.casefold() == uuid
        ]
    return reports


def _sum_up(reports: list[ProbedDevice]) -> Sums:
    """Return the sums over the processes on one GPU.

    A sum is None if any value is unknown.
    """
    allocators = [report.allocator for report in reports]
    return Sums(
        allocated=sum_known(allocator.allocated_bytes for allocator in allocators),
        reserved=sum_known(allocator.reserved_bytes for allocator in allocators),
        split=sum_known(allocator.inactive_split_bytes for allocator in allocators),
        weights=sum_known(_find_current(report.parts, "weights_bytes") for report in reports),
        kv_cache=sum_known(_find_current(report.parts, "kv_cache_bytes") for report in reports),
        graphs=sum_known(report.graphs_bytes for report in reports),
    )


def _find_current(
    parts: WorkerMeasurements | None, name: Literal["weights_bytes", "kv_cache_bytes"]
) -> int | None:
    """Return the current size of one process's weights or KV cache, or None.

    If vLLM uses its own memory pool, the result is the size in that pool. If it does not, the
    result is the size measured at startup, or None while the engine sleeps.
    """
    if parts is None:
        return None
    n_bytes: int | None
    if parts.pool is not None:
        n_bytes = getattr(parts.pool, name)
        return n_bytes
    if parts.asleep:
        return None
    n_bytes = getattr(parts, name)
    return n_bytes


def build_ledger(sums: Sums, held_bytes: int | None) -> dict[MemoryPart, int]:
    """Return the sizes of the known parts of the engine's memory on one GPU.

    Allocated memory consists of weights, KV cache and other tensors. Reserved memory that is not
    allocated is fragmented or cached. Held memory that torch has not reserved is outside torch. A
    part computed as a difference is present only if all its terms are known. If all of torch's
    figures are known, the parts add up to `held_bytes`.

    Captured graphs occupy free blocks in torch's private pools and memory in the driver. Captured
    graphs are therefore contained in other parts. The size that vLLM reports for graphs is
    subtracted from those parts. Every byte thus counts once.

    The result is empty if weights and KV cache exceed what the engine holds. The probe writes only
    every five seconds. The last values of weights and cache may date from before the engine fell
    asleep.
    """
    parts = {}
    if sums.weights is not None:
        parts[MemoryPart.WEIGHTS] = sums.weights
    if sums.kv_cache is not None:
        parts[MemoryPart.KV_CACHE] = sums.kv_cache
    known_bytes = sum(parts.values())
    if held_bytes is not None and known_bytes > held_bytes + PROBE_RACE_BYTES:
        return {}
    # If weights and cache together exceed the allocated memory, the readings are from different
    # moments.
    are_both_known = sums.weights is not None and sums.kv_cache is not None
    if are_both_known and sums.allocated is not None and sums.allocated >= known_bytes:
        parts[MemoryPart.OTHER_TENSORS] = sums.allocated - known_bytes

    remainders = _list_remainders(sums, held_bytes)
    # vLLM's figure can be subtracted only if every part that contains it is known.
    can_subtract = all(part in remainders for part in _GRAPH_HOMES)
    if sums.graphs is None or not can_subtract or sums.graphs > sum(remainders.values()):
        return parts | remainders
    parts[MemoryPart.CUDA_GRAPHS] = sums.graphs
    return parts | _subtract_graphs(remainders, sums.graphs)


def _list_remainders(sums: Sums, held_bytes: int | None) -> dict[MemoryPart, int]:
    """Return the known parts that are not allocated: fragmented, cached and outside torch.

    A part whose figures contradict each other is omitted.
    """
    remainders = {}
    if sums.split is not None:
        remainders[MemoryPart.FRAGMENTED] = sums.split
        if sums.allocated is not None and sums.reserved is not None:
            cached_bytes = sums.reserved - sums.allocated - sums.split
            if cached_bytes >= 0:
                remainders[MemoryPart.CACHED] = cached_bytes
            else:
                # The figures contradict each other.
                del remainders[MemoryPart.FRAGMENTED]
    if sums.reserved is not None and held_bytes is not None:
        outside_bytes = held_bytes - sums.reserved
        if outside_bytes >= -PROBE_RACE_BYTES:
            remainders[MemoryPart.OUTSIDE_TORCH] = max(0, outside_bytes)
    return remainders


def _subtract_graphs(remainders: dict[MemoryPart, int], graphs_bytes: int) -> dict[MemoryPart, int]:
    """Return the parts after captured graphs are subtracted from each of _GRAPH_HOMES in turn."""
    remainders = dict(remainders)
    for part in _GRAPH_HOMES:
        part_bytes = min(graphs_bytes, remainders[part])
        remainders[part] -= part_bytes
        graphs_bytes -= part_bytes
    return remainders
