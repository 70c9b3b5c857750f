"""What the engine uses its memory on a GPU for."""

from typing import Final, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.readings import label_gpu, limit_remembered, sum_known
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
"""What may be freed between the probe's reading and NVML's: an engine that seems to hold less than torch has
reserved, by up to this much, holds nothing outside torch; a larger gap is unexplained."""


_HOMES: Final = (MemoryPart.CACHED, MemoryPart.FRAGMENTED, MemoryPart.OUTSIDE_TORCH)
"""The parts that contain captured graphs: their private pools are mostly whole free segments."""


class Sums(Struct, frozen=True, kw_only=True):
    """Sums over the processes on one GPU; None where one of them does not report the value."""

    allocated: int | None
    reserved: int | None
    split: int | None
    weights: int | None
    kv_cache: int | None
    graphs: int | None


def add_inside(
    gpus: tuple[Gpu, ...] | Failure, probe: ProbeReadings | Failure | None
) -> tuple[Gpu, ...] | Failure:
    """Add to each GPU what the engine's running processes report about it."""
    if isinstance(gpus, Failure) or not isinstance(probe, ProbeReadings):
        return gpus
    return tuple(replace(gpu, inside=_find_inside(gpu, probe)) for gpu in gpus)


def _find_inside(gpu: Gpu, probe: ProbeReadings) -> Inside | None:
    """Return None for a GPU that is not the engine's, or when the figures exceed the device's memory."""
    uuid, memory = gpu.reading.uuid.casefold(), gpu.reading.memory
    found = [
        (device, each.parts if len(each.devices) == 1 else None)
        for each in probe.present
        for device in each.devices
        if device.uuid.casefold() == uuid
    ]
    if not found or gpu.attribution is None:
        return None
    sums = Sums(
        allocated=sum_known(device.allocated_bytes for device, _ in found),
        reserved=sum_known(device.reserved_bytes for device, _ in found),
        split=sum_known(device.inactive_split_bytes for device, _ in found),
        weights=sum_known(_find_current(parts, "weights_bytes") for _, parts in found),
        kv_cache=sum_known(_find_current(parts, "kv_cache_bytes") for _, parts in found),
        graphs=sum_known(None if parts is None else parts.cuda_graphs_bytes for _, parts in found),
    )
    if (
        memory is not None
        and max(sums.reserved or 0, sums.kv_cache or 0, sums.weights or 0) > memory.total_bytes
    ):
        return None
    parts = build_ledger(sums, gpu.held_bytes)
    return Inside(
        granted_bytes=min(
            (device.total_bytes for device, _ in found if device.total_bytes is not None),
            default=None,
        ),
        allocated_bytes=sums.allocated,
        reserved_bytes=sums.reserved,
        parts=tuple((part, parts[part]) for part in MemoryPart if part in parts),
    )


def _find_current(
    parts: EngineParts | None, name: Literal["weights_bytes", "kv_cache_bytes"]
) -> int | None:
    """Return a part's current size: from the pool, else as measured at start, unless the engine sleeps."""
    if parts is None or (parts.pool is None and parts.asleep):
        return None
    n_bytes: int | None = getattr(parts if parts.pool is None else parts.pool, name)
    return n_bytes


def build_ledger(sums: Sums, held_bytes: int | None) -> dict[MemoryPart, int]:
    """Return the known parts; with all of torch's figures they sum to what the engine holds.

    Nothing is returned where weights and KV cache exceed what the engine holds: the probe, which looks every five
    seconds, saw them before the engine fell asleep.

    Allocated memory is weights, KV cache and other tensors; reserved memory beyond that is fragmented or cached; held
    memory beyond that is outside torch. A remainder is present only if all its terms are known. A captured graph keeps
    free blocks of a private pool and driver memory: vLLM's figure for graphs is subtracted from these, so that every
    byte counts once.
    """
    known = {MemoryPart.WEIGHTS: sums.weights, MemoryPart.KV_CACHE: sums.kv_cache}
    parts = {part: n_bytes for part, n_bytes in known.items() if n_bytes is not None}
    used = sum(parts.values())
    if held_bytes is not None and used > held_bytes + RACE_BYTES:
        return {}
    if sums.allocated is not None and len(parts) == len(known) and sums.allocated >= used:
        parts[MemoryPart.OTHER_TENSORS] = sums.allocated - used
    free = {} if sums.split is None else {MemoryPart.FRAGMENTED: sums.split}
    if sums.split is not None and sums.allocated is not None and sums.reserved is not None:
        cached = sums.reserved - sums.allocated - sums.split
        free = {**free, MemoryPart.CACHED: cached} if cached >= 0 else {}
    if (
        sums.reserved is not None
        and held_bytes is not None
        and held_bytes >= sums.reserved - RACE_BYTES
    ):
        free[MemoryPart.OUTSIDE_TORCH] = max(0, held_bytes - sums.reserved)
    left = sums.graphs
    if left is None or len(free) < len(_HOMES) or left > sum(free.values()):
        return parts | free
    parts[MemoryPart.CUDA_GRAPHS] = left
    for part in _HOMES:
        taken = min(left, free[part])
        free[part], left = free[part] - taken, left - taken
    return parts | free


MOST_COUNTS: Final = 512
"""Processes whose counters are kept: four times the files that are read at once."""

Key = tuple[str, str, int, float]
"""A counter by GPU UUID, metric and process."""

_METRICS: Final[tuple[Metric, ...]] = (catalog.ALLOCATOR_RETRIES, catalog.ALLOCATOR_OOMS)


class Counts(Struct, frozen=True, kw_only=True):
    """The last count of each process, oldest first, and the sums over all processes, by UUID and metric."""

    last: dict[Key, int] = field(default_factory=dict)
    sums: dict[tuple[str, str], int] = field(default_factory=dict)


def derive_counters(state: Counts, snapshot: Snapshot) -> tuple[Counts, tuple[Sample, ...]]:
    """Return the allocator counters per GPU of the engine; an exited process counts with its last file."""
    probe, gpus = snapshot.probe, snapshot.owned_gpus
    if not isinstance(probe, ProbeReadings) or not gpus:
        return state, ()
    uuids = {gpu.reading.uuid.casefold() for gpu in gpus}
    last, present = dict(state.last), {(uuid, metric.name) for uuid in uuids for metric in _METRICS}
    sums = limit_remembered(state.sums, present)
    for process in (*probe.others, *probe.silent, *probe.present):
        for device in process.devices:
            if device.uuid.casefold() in uuids:
                _count(last, sums, process, device)
    state = Counts(last=dict(tuple(last.items())[-MOST_COUNTS:]), sums=sums)
    return state, tuple(
        Sample(metric, label_gpu(gpu), float(sums[key]))
        for gpu in gpus
        for metric in _METRICS
        if (key := (gpu.reading.uuid.casefold(), metric.name)) in sums
    )


def _count(
    last: dict[Key, int],
    sums: dict[tuple[str, str], int],
    process: ProbedProcess,
    device: AllocatorReading,
) -> None:
    """Add the errors on a device: at least those the probe's observer saw, as the allocator's count may be older."""
    uuid, oom, ooms = device.uuid.casefold(), process.oom, device.ooms
    if oom is not None and oom.uuid is not None and oom.uuid.casefold() == uuid:
        ooms = max(ooms or 0, oom.seen or 1)
    for metric, count in zip(_METRICS, (device.retries, ooms), strict=True):
        if count is not None:
            key = (uuid, metric.name, process.pid, process.started_at_seconds)
            before = last.pop(key, 0)
            last[key] = max(before, count)
            sums[uuid, metric.name] = sums.get((uuid, metric.name), 0) + last[key] - before


INTERVALS: Final = 3
LEAST_SECONDS: Final = 10.0
MOST_SECONDS: Final = 300.0
"""A file is fresh for three of its intervals, within these bounds."""

AHEAD_SECONDS: Final = 60.0
"""Files share the machine's clock: one dated further ahead is ignored."""


def classify_probe(
    files: tuple[ProbedProcess, ...] | Failure | None,
    processes: tuple[EngineProcess, ...] | Failure,
    now: float,
) -> ProbeReadings | Failure | None:
    """Sort the probe's files into present, silent and others, at `now` in seconds since the epoch.

    Where /proc shows engine processes, a file belongs to this run if one of them started when its process did; pids may
    be of another namespace, and setting the clock changes a start time. Otherwise only the file's date counts.
    """
    if files is None or isinstance(files, Failure):
        return files
    shown = () if isinstance(processes, Failure) else processes
    present, silent, others = [], [], []
    dated = sorted(
        files, key=lambda each: each.written_at_seconds
    )  # names are not trusted: the newest file counts
    dated = [each for each in dated if each.written_at_seconds <= now + AHEAD_SECONDS]
    for each in {(each.pid, each.started_at_seconds): each for each in dated}.values():
        alive = any(
            each.since_boot_seconds == process.since_boot_seconds is not None
            or abs(each.started_at_seconds - process.started_at_seconds) <= SAME_START_SECONDS
            for process in shown
        )
        lasts = min(max(LEAST_SECONDS, INTERVALS * each.interval_seconds), MOST_SECONDS)
        if each.stopped is None and (alive or not shown) and now - each.written_at_seconds <= lasts:
            present.append(each)
        elif each.stopped is None and alive:
            silent.append(each)
        else:
            others.append(each)
    return ProbeReadings(present=tuple(present), silent=tuple(silent), others=tuple(others))
