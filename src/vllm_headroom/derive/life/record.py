"""The record of the present run: what explains its end, collected sample by sample."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.life.budget import GpuBudget, update_budgets
from vllm_headroom.derive.life.states import EngineRun
from vllm_headroom.derive.pages import list_named
from vllm_headroom.derive.series import limit_remembered
from vllm_headroom.derive.sums import find_least_known, find_most_known, sum_known
from vllm_headroom.model import (
    EngineProcess,
    EngineReading,
    Failure,
    Fate,
    Gpu,
    Lost,
    Snapshot,
)
from vllm_headroom.vocabulary import IncidentKind, Reason, Role

SLOT_SECONDS: Final = 30.0
"""Samples so close to each other are recorded as one, by their extremes."""

PEAK_KEPT_SECONDS: Final = 60.0
"""The highest use is reported for this long."""

END_SECONDS: Final = SLOT_SECONDS + PEAK_KEPT_SECONDS
"""Memory at the end is that of this time: a slot, and the minute for which the peak is kept."""

BURST_SECONDS: Final = 300.0
"""Growth within this time before the end is a burst."""

USUAL_LOAD_SECONDS: Final = 900.0
"""The usual load of an engine is that of this time."""


class MemoryExtremes(Struct, frozen=True, gc=False):
    """The extremes of one GPU's memory in a slot of time, at samples and at peaks; None is unknown.

    There are many, and they refer to nothing: gc=False saves the collector's work.
    """

    begin_seconds: float
    newest_seconds: float
    least_room_bytes: int | None = None
    least_room_at_peak_bytes: int | None = None
    most_held_bytes: int | None = None
    most_held_at_peak_bytes: int | None = None
    most_other_bytes: int | None = None
    most_processes: int | None = None


class GpuRecord(Struct, frozen=True, kw_only=True):
    """The memory of one of the engine's GPUs."""

    first: MemoryExtremes
    """When the engine began to serve, or else at the first sample."""
    slots: tuple[MemoryExtremes, ...]
    """Those of the last minutes."""
    newest: Gpu
    newest_seconds: float
    """When `newest` was read, since the epoch."""


class PageRecord(Struct, frozen=True, kw_only=True):
    """What the page of the run has shown, on the monotonic clock."""

    newest_seconds: float = 0.0
    """When it last answered; before the first answer, when the record began."""
    has_answered: bool = False
    """Whether it ever answered while this sidecar looked."""
    is_answering: bool = False
    """Whether it answered at the newest sample."""
    engines: tuple[EngineReading, ...] = ()
    """The engines of the last page that had any."""
    idle_since_seconds: float | None = None
    idle_seconds: float | None = None
    """The idle time at that page; None where it had work, or where that is unknown."""
    loads: tuple[tuple[float, float], ...] = ()
    """The time and the running requests, one pair a slot."""


class ProcessRecord(Struct, frozen=True, kw_only=True):
    """What the processes of the run have shown, on the monotonic clock."""

    complete: tuple[EngineProcess, ...] = ()
    """The processes while none was missing."""
    lost: tuple[Lost, ...] = ()
    """The necessary ones that exited before the rest."""
    orphans: int = 0
    """The number of processes on its GPUs that have lost their server."""
    refused_since_seconds: float | None = None
    """Since when the server refuses its page without its core."""


class RunRecord(Struct, frozen=True, kw_only=True):
    """What was seen of the present run, on the monotonic clock."""

    began_seconds: float | None = None
    """When the run was first seen; None before its first sample."""
    newest_seconds: float = 0.0
    first_age_seconds: float | None = None
    """How old the run was when it was first seen; None where unknown."""
    follows_absence: bool = False
    """Whether the sidecar looked before the run began: then it saw all of its start."""
    was_page_ever_read: bool = False
    """Whether any page was ever read, also of another run."""
    stalled_since_seconds: float | None = None
    page: PageRecord = field(default_factory=PageRecord)
    processes: ProcessRecord = field(default_factory=ProcessRecord)
    gpus: dict[str, GpuRecord] = field(default_factory=dict)
    """By UUID."""
    budgets: dict[str, GpuBudget] = field(default_factory=dict)
    """The same GPUs against the engine's budget, by UUID."""


def update_record(
    record: RunRecord,
    snapshot: Snapshot,
    run: EngineRun,
    *,
    is_stalled: bool,
    configured_bytes: float | None = None,
) -> RunRecord:
    """Return the record with one more sample of its run.

    `configured_bytes` is the operator's figure of what the engine uses of each GPU.
    """
    now = snapshot.monotonic_seconds
    # The first sample of the run.
    if record.began_seconds is None:
        age_seconds = None
        if run.began_seconds is not None:
            age_seconds = snapshot.time_seconds - run.began_seconds
        record = replace(
            record,
            began_seconds=now,
            first_age_seconds=age_seconds,
            page=PageRecord(newest_seconds=now),
        )
    stalled_since_seconds = record.stalled_since_seconds
    if not is_stalled:
        stalled_since_seconds = None
    elif stalled_since_seconds is None:
        stalled_since_seconds = now
    return replace(
        record,
        newest_seconds=now,
        was_page_ever_read=record.was_page_ever_read or snapshot.page is not None,
        stalled_since_seconds=stalled_since_seconds,
        page=_record_page(record.page, snapshot),
        processes=_record_processes(record.processes, snapshot, run),
        gpus=_record_gpus(record, snapshot, run),
        budgets=update_budgets(record.budgets, snapshot, run, configured_bytes),
    )


def _record_gpus(record: RunRecord, snapshot: Snapshot, run: EngineRun) -> dict[str, GpuRecord]:
    """Return the memory of the GPUs with this sample.

    Once a necessary process has exited, the memory that it released is no evidence about the end.
    """
    if run.lost_roles:
        return record.gpus
    # The first page of this record: a sidecar that restarts begins with the next one.
    begins_to_serve = snapshot.page is not None and not record.page.has_answered
    sampled = {}
    for gpu in snapshot.owned_gpus:
        extremes = _read_extremes(gpu, snapshot.monotonic_seconds)
        first_extremes = extremes
        slots: tuple[MemoryExtremes, ...] = ()
        previous = record.gpus.get(gpu.reading.uuid)
        if previous is not None:
            slots = previous.slots
            # While weights load, memory grows: only that of an engine that serves is comparable.
            if not begins_to_serve:
                first_extremes = previous.first
        sampled[gpu.reading.uuid] = GpuRecord(
            first=first_extremes,
            slots=_add_extremes(slots, extremes),
            newest=gpu,
            newest_seconds=snapshot.time_seconds,
        )
    return limit_remembered({**record.gpus, **sampled}, sampled)


def _read_extremes(gpu: Gpu, now: float) -> MemoryExtremes:
    """Return the memory at a sample, and at the peak of use, which may lie between two samples."""
    memory = gpu.reading.memory
    room_bytes = None
    room_at_peak_bytes = None
    held_at_peak_bytes = gpu.held_bytes
    if memory is not None:
        # NVML's peak since the sample before may lie above what is in use now.
        peak_rise_bytes = max(0, (gpu.reading.used_peak_bytes or 0) - memory.used_bytes)
        room_bytes = memory.left_bytes
        room_at_peak_bytes = room_bytes - peak_rise_bytes
        # The driver names nobody for a peak: the engine may have held all of its rise.
        if gpu.held_bytes is not None:
            held_at_peak_bytes = gpu.held_bytes + peak_rise_bytes
    return MemoryExtremes(
        begin_seconds=now,
        newest_seconds=now,
        least_room_bytes=room_bytes,
        least_room_at_peak_bytes=room_at_peak_bytes,
        most_held_bytes=gpu.held_bytes,
        most_held_at_peak_bytes=held_at_peak_bytes,
        most_other_bytes=gpu.other_bytes,
        most_processes=gpu.process_count,
    )


def _add_extremes(
    slots: tuple[MemoryExtremes, ...], sample: MemoryExtremes
) -> tuple[MemoryExtremes, ...]:
    """Return the slots of the last minutes with a sample, which may belong to the last slot."""
    now = sample.newest_seconds
    # Time may step back in a trace: a slot begins then too.
    if slots and 0 <= now - slots[-1].begin_seconds < SLOT_SECONDS:
        return (*slots[:-1], _merge_extremes(slots[-1], sample))
    # Both spans are compared at an exit: the minutes of bursts, then the end.
    oldest_seconds = now - BURST_SECONDS - END_SECONDS
    recent_slots = [slot for slot in slots if slot.newest_seconds >= oldest_seconds]
    return (*recent_slots, sample)


def _merge_extremes(slot: MemoryExtremes, sample: MemoryExtremes) -> MemoryExtremes:
    """Return the extremes over an older slot of time and a newer sample."""
    pair = (slot, sample)
    return MemoryExtremes(
        begin_seconds=slot.begin_seconds,
        newest_seconds=sample.newest_seconds,
        least_room_bytes=find_least_known(part.least_room_bytes for part in pair),
        least_room_at_peak_bytes=find_least_known(part.least_room_at_peak_bytes for part in pair),
        most_held_bytes=find_most_known(part.most_held_bytes for part in pair),
        most_held_at_peak_bytes=find_most_known(part.most_held_at_peak_bytes for part in pair),
        most_other_bytes=find_most_known(part.most_other_bytes for part in pair),
        most_processes=find_most_known(part.most_processes for part in pair),
    )


def _record_processes(previous: ProcessRecord, snapshot: Snapshot, run: EngineRun) -> ProcessRecord:
    """Return the record of the processes with this sample.

    Which necessary processes were lost is recorded only while the page answers.
    """
    complete = previous.complete
    if snapshot.engine_processes and not run.lost_roles:
        complete = snapshot.engine_processes
    refused_since_seconds = None
    if run.lost_roles and _is_page_refused(snapshot):
        refused_since_seconds = previous.refused_since_seconds or snapshot.monotonic_seconds
    processes = replace(previous, complete=complete, refused_since_seconds=refused_since_seconds)
    # Once the page does not answer, the server exits too: which process was first is then unknown.
    if snapshot.page is None:
        return processes
    return replace(
        processes,
        orphans=_count_orphans(snapshot),
        # The first loss stays: what exits after it is a consequence.
        lost=previous.lost or _list_lost(processes, run, snapshot),
    )


def _is_page_refused(snapshot: Snapshot) -> bool:
    engines = snapshot.engines
    return isinstance(engines, Failure) and engines.reason is Reason.UNREACHABLE


def _record_page(previous: PageRecord, snapshot: Snapshot) -> PageRecord:
    """Return the record of the page with this sample; the load is that of the last answer."""
    now = snapshot.monotonic_seconds
    if snapshot.page is None:
        return replace(previous, is_answering=False)
    page = replace(previous, newest_seconds=now, has_answered=True, is_answering=True)
    engines = list_named(snapshot.page)
    if not engines:
        return page
    # Unknown requests prove no idleness.
    requests = sum_known(count for engine in engines for count in (engine.running, engine.waiting))
    idle_since_seconds = None
    idle_seconds = None
    if requests == 0:
        idle_since_seconds = now
        if previous.idle_since_seconds is not None:
            idle_since_seconds = previous.idle_since_seconds
        idle_seconds = now - idle_since_seconds
    return replace(
        page,
        engines=engines,
        idle_since_seconds=idle_since_seconds,
        idle_seconds=idle_seconds,
        loads=_add_load(previous.loads, sum_known(engine.running for engine in engines), now),
    )


def _add_load(
    loads: tuple[tuple[float, float], ...], running: float | None, now: float
) -> tuple[tuple[float, float], ...]:
    """Return the loads with the running requests, where a slot has passed since the last ones."""
    if running is None or (loads and now - loads[-1][0] < SLOT_SECONDS):
        return loads
    recent_loads = [load for load in loads if load[0] >= now - USUAL_LOAD_SECONDS]
    return (*recent_loads, (now, running))


def _list_lost(processes: ProcessRecord, run: EngineRun, snapshot: Snapshot) -> tuple[Lost, ...]:
    """Return the necessary processes that have exited, without those that outlived their server."""
    if not run.lost_roles:
        return ()
    if not processes.complete:
        return tuple(Lost(role) for role in run.lost_roles)
    # A trace has no pids, so that processes of one role can only be counted.
    orphaned_processes = _list_orphaned(processes, snapshot)
    running = Counter(_name_processes((*snapshot.engine_processes, *orphaned_processes)))
    necessary = Counter(
        _name_processes(process for process in processes.complete if process.role in run.lost_roles)
    )
    return tuple(sorted(necessary - running))


def _name_processes(processes: Iterable[EngineProcess]) -> list[Lost]:
    return [Lost(process.role, process.pid or None) for process in processes]


def _list_orphaned(processes: ProcessRecord, snapshot: Snapshot) -> list[EngineProcess]:
    """Return the engine's processes that still hold GPU memory although their server has exited.

    A trace has no pids: there, as many workers are returned as processes were left on the GPUs, or
    cores of an engine without workers.
    """
    pids = [
        leftover.pid
        for gpu in snapshot.owned_gpus
        for leftover in gpu.leftovers
        if leftover.fate is Fate.ORPHANED
    ]
    if any(pids):
        return [process for process in processes.complete if process.pid in pids]
    # Only processes with a CUDA context can be left on a GPU.
    has_workers = any(process.role is Role.WORKER for process in processes.complete)
    # With one GPU vLLM runs the worker inside its core.
    holder_role = Role.WORKER if has_workers else Role.ENGINE_CORE
    holders = [process for process in processes.complete if process.role is holder_role]
    return holders[: len(pids)]


def _count_orphans(snapshot: Snapshot) -> int:
    """Count the orphaned processes on the engine's GPUs: a stopped engine leaves none."""
    fates = [leftover.fate for gpu in snapshot.owned_gpus for leftover in gpu.leftovers]
    return fates.count(Fate.ORPHANED)


def list_lost_at_end(
    processes: ProcessRecord, run: EngineRun, snapshot: Snapshot, kind: IncidentKind
) -> tuple[Lost, ...]:
    """Return the necessary processes that exited before the rest, also at this sample."""
    if processes.lost:
        return processes.lost
    if kind is IncidentKind.STALLED:
        return _list_lost(processes, run, snapshot)
    # Without new orphans, all processes have exited together.
    if _count_orphans(snapshot) <= processes.orphans:
        return ()
    if run.lost_roles:
        return _list_lost(processes, run, snapshot)
    # New orphans: all the other processes have exited, the server among them.
    orphaned_processes = _list_orphaned(processes, snapshot)
    exited_processes = [
        process
        for process in processes.complete
        if process.role is not Role.OTHER and process not in orphaned_processes
    ]
    # Orphans whose parent was never seen: it was the server.
    return tuple(sorted(_name_processes(exited_processes))) or (Lost(Role.API_SERVER),)
