"""What does the engine use its memory on a GPU for?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.readings import gpu_labels, remembered, together
from vllm_headroom.model import (
    SAME_START_SECONDS,
    AllocatorReading,
    EngineParts,
    EngineProcess,
    Failure,
    Gpu,
    Inside,
    Metric,
    ProbedProcess,
    ProbeReadings,
    Sample,
    Snapshot,
)
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


MOST_COUNTS: Final = 512
"""Counts of processes that are remembered: four times the files that are read at once."""

Key = tuple[str, str, int, float]
"""A count by the UUID of its GPU, its metric and its process."""

_METRICS: Final[tuple[Metric, ...]] = (catalog.ALLOCATOR_RETRIES, catalog.ALLOCATOR_OOMS)


class Counts(Struct, frozen=True, kw_only=True):
    """What each process last counted, oldest first, and the sum over all processes there ever were, by UUID and metric.

    A process counts from 0 at its start, the sums go on.
    """

    last: dict[Key, int] = field(default_factory=dict)
    sums: dict[tuple[str, str], int] = field(default_factory=dict)


def counters(state: Counts, snapshot: Snapshot) -> tuple[Counts, tuple[Sample, ...]]:
    """Return the counters of each GPU of the engine; what a process counted before it died is in its last file."""
    probe, gpus = snapshot.probe, snapshot.owned
    if not isinstance(probe, ProbeReadings) or not gpus:
        return state, ()
    uuids = {gpu.reading.uuid.casefold() for gpu in gpus}
    last, present = dict(state.last), {(uuid, metric.name) for uuid in uuids for metric in _METRICS}
    sums = remembered(state.sums, present)
    for process in (*probe.others, *probe.silent, *probe.present):
        for device in process.devices:
            if device.uuid.casefold() in uuids:
                _count(last, sums, process, device)
    state = Counts(last=dict(tuple(last.items())[-MOST_COUNTS:]), sums=sums)
    return state, tuple(_samples(state, gpus))


def _count(
    last: dict[Key, int], sums: dict[tuple[str, str], int], process: ProbedProcess, device: AllocatorReading
) -> None:
    uuid = device.uuid.casefold()
    for metric, count in zip(_METRICS, (device.retries, _ooms(process, device)), strict=True):
        if count is not None:
            key = (uuid, metric.name, process.pid, process.started_at_seconds)
            before = last.pop(key, 0)
            last[key] = max(before, count)
            sums[uuid, metric.name] = sums.get((uuid, metric.name), 0) + last[key] - before


def _ooms(process: ProbedProcess, device: AllocatorReading) -> int | None:
    """Return the errors on a device; that the observer saw one is enough where the allocator's own count is older."""
    oom = process.oom
    if oom is None or oom.uuid is None or oom.uuid.casefold() != device.uuid.casefold():
        return device.ooms
    return max(device.ooms or 0, oom.seen or 1)


def _samples(state: Counts, gpus: tuple[Gpu, ...]) -> Iterator[Sample]:
    for gpu in gpus:
        for metric in _METRICS:
            total = state.sums.get((gpu.reading.uuid.casefold(), metric.name))
            if total is not None:
                yield Sample(metric, gpu_labels(gpu), float(total))


INTERVALS: Final = 3
LEAST_SECONDS: Final = 10.0
MOST_SECONDS: Final = 300.0
"""A file is fresh for three of its own intervals, which it may state as it likes."""

AHEAD_SECONDS: Final = 60.0
"""The clock is the same machine's: what is dated further ahead is not believed, and stands for nothing."""


def told(
    files: tuple[ProbedProcess, ...] | Failure | None, processes: tuple[EngineProcess, ...] | Failure, now: float
) -> ProbeReadings | Failure | None:
    """Return what the probe says at `now`, in seconds since the epoch.

    Where the engine's processes show in /proc, a file is of this life if one of them began when its process did; pids
    may be those of another namespace, and a clock that was set between two looks at it dates a start anew. Where none
    shows, only its date can tell.
    """
    if files is None or isinstance(files, Failure):
        return files
    shown = () if isinstance(processes, Failure) else processes
    present, silent, others = [], [], []
    for each in _newest_of_each(each for each in files if each.written_at_seconds <= now + AHEAD_SECONDS):
        alive = any(_is_of(each, process) for process in shown)
        if each.stopped is None and (alive or not shown) and _is_fresh(each, now):
            present.append(each)
        elif each.stopped is None and alive:
            silent.append(each)
        else:
            others.append(each)
    return ProbeReadings(present=tuple(present), silent=tuple(silent), others=tuple(others))


def _is_of(file: ProbedProcess, process: EngineProcess) -> bool:
    if file.since_boot_seconds is not None and file.since_boot_seconds == process.since_boot_seconds:
        return True
    return abs(file.started_at_seconds - process.started_at_seconds) <= SAME_START_SECONDS


def _is_fresh(process: ProbedProcess, now: float) -> bool:
    lasts = min(max(LEAST_SECONDS, INTERVALS * process.interval_seconds), MOST_SECONDS)
    return now - process.written_at_seconds <= lasts


def _newest_of_each(files: Iterable[ProbedProcess]) -> tuple[ProbedProcess, ...]:
    """Return one file of each process: a name does not have to be true."""
    newest: dict[tuple[int, float], ProbedProcess] = {}
    for each in sorted(files, key=lambda each: each.written_at_seconds):
        newest[each.pid, each.started_at_seconds] = each
    return tuple(newest.values())
