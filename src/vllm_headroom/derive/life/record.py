"""The record of the current run, collected sample by sample to explain its end."""

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
"""All samples within this time are recorded as one slot, with their extremes."""

PEAK_KEPT_SECONDS: Final = 60.0
"""A peak of used memory is reported for this long after it occurred."""

END_SECONDS: Final = SLOT_SECONDS + PEAK_KEPT_SECONDS
"""Memory samples from this time before the exit count as the run's end. The time consists of one
slot plus the minute for which a peak is reported.
"""

BURST_SECONDS: Final = 300.0
"""Growth within this time before the exit is treated as a burst."""

USUAL_LOAD_SECONDS: Final = 900.0
"""An engine's usual load is computed over this time."""


class MemoryExtremes(Struct, frozen=True, gc=False):
    """The extremes of one GPU's memory in a time slot.

    The extremes are known both in samples and at peaks between samples. None means unknown.

    There are many of these objects, so gc=False keeps the garbage collector from visiting them.
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
    """The memory on one of the engine's GPUs."""

    first: MemoryExtremes
    """The memory when the engine started to serve. If the start was not observed, this is the first
    sample.
    """
    slots: tuple[MemoryExtremes, ...]
    """The time slots of the last few minutes."""
    newest: Gpu
    newest_seconds: float
    """When `newest` was read, in seconds since the epoch."""


class PageRecord(Struct, frozen=True, kw_only=True):
    """What the page has shown in this run; times are on the monotonic clock."""

    newest_seconds: float = 0.0
    """When the page was last served. Before the first page, this is when the record began."""
    has_answered: bool = False
    """Whether the page has ever been served while this sidecar was running."""
    is_answering: bool = False
    """Whether the page was served at the newest sample."""
    engines: tuple[EngineReading, ...] = ()
    """The engines on the last page that showed any engines."""
    idle_since_seconds: float | None = None
    idle_seconds: float | None = None
    """How long these engines had been idle when that page was read. The time is None if the engines
    had work or their load is unknown.
    """
    loads: tuple[tuple[float, float], ...] = ()
    """Pairs of a time and the requests running at that time, one pair per slot."""


class ProcessRecord(Struct, frozen=True, kw_only=True):
    """What is known about the processes in this run; times are on the monotonic clock."""

    complete: tuple[EngineProcess, ...] = ()
    """All processes in the last sample in which no process was missing."""
    lost: tuple[Lost, ...] = ()
    """The necessary processes that exited before the others."""
    orphans: int = 0
    """The number of processes on the engine's GPUs whose server has exited."""
    refused_since_seconds: float | None = None
    """When the server, without its core, began to refuse connections. It is None if the server does
    not refuse them.
    """


class RunRecord(Struct, frozen=True, kw_only=True):
    """What has been observed of the current run; times are on the monotonic clock."""

    began_seconds: float | None = None
    """When the run was first seen, or None before its first sample."""
    newest_seconds: float = 0.0
    first_age_seconds: float | None = None
    """The age of the run when it was first seen, or None if unknown."""
    follows_absence: bool = False
    """Whether the sidecar was running before this run began. If it was, the whole start of the run
    was observed.
    """
    was_page_ever_read: bool = False
    """Whether any page has ever been read, even from another run."""
    stalled_since_seconds: float | None = None
    page: PageRecord = field(default_factory=PageRecord)
    processes: ProcessRecord = field(default_factory=ProcessRecord)
    gpus: dict[str, GpuRecord] = field(default_factory=dict)
    """The memory of each GPU, by UUID."""
    budgets: dict[str, GpuBudget] = field(default_factory=dict)
    """The memory on the same GPUs compared with the engine's budget, by UUID."""


def update_record(
    record: RunRecord,
    snapshot: Snapshot,
    run: EngineRun,
    *,
    is_stalled: bool,
    configured_bytes: float | None = None,
) -> RunRecord:
    """Return the record with one more sample of its run.

    `configured_bytes` is the operator's figure for the memory that the engine uses on each GPU.
    """
    now = snapshot.monotonic_seconds
    # This is the first sample of the run.
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
    """Return the memory of the GPUs, updated with this sample.

    Once a necessary process has exited, the record is not updated. Memory released by an exiting
    process does not show why the engine ended.
    """
    if run.lost_roles:
        return record.gpus
    # This is the first page that this record contains. If the sidecar was restarted, the record
    # begins with the first page after the restart.
    begins_to_serve = snapshot.page is not None and not record.page.has_answered
    sampled = {}
    for gpu in snapshot.owned_gpus:
        extremes = _read_extremes(gpu, snapshot.monotonic_seconds)
        first_extremes = extremes
        slots: tuple[MemoryExtremes, ...] = ()
        previous = record.gpus.get(gpu.reading.uuid)
        if previous is not None:
            slots = previous.slots
            # Memory grows while weights are loaded. Only the memory of a serving engine is
            # comparable.
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
    """Return the memory at a sample and at the peak since the previous sample."""
    memory = gpu.reading.memory
    room_bytes = None
    room_at_peak_bytes = None
    held_at_peak_bytes = gpu.held_bytes
    if memory is not None:
        # NVML reports the peak since the previous sample. The peak may exceed the current use.
        peak_rise_bytes = max(0, (gpu.reading.used_peak_bytes or 0) - memory.used_bytes)
        room_bytes = memory.left_bytes
        room_at_peak_bytes = room_bytes - peak_rise_bytes
        # The driver does not report which process caused a peak. The whole peak may be the
        # engine's.
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
    """Return the slots of the last minutes after adding one sample.

    The sample may be added to the newest slot.
    """
    now = sample.newest_seconds
    # In a trace, time may jump back. In that case, a new slot starts.
    if slots and 0 <= now - slots[-1].begin_seconds < SLOT_SECONDS:
        return (*slots[:-1], _merge_extremes(slots[-1], sample))
    # To judge an exit, two spans are needed: a burst's minutes and the run's end.
    oldest_seconds = now - BURST_SECONDS - END_SECONDS
    recent_slots = [slot for slot in slots if slot.newest_seconds >= oldest_seconds]
    return (*recent_slots, sample)


def _merge_extremes(slot: MemoryExtremes, sample: MemoryExtremes) -> MemoryExtremes:
    """Return the combined extremes of an older slot and a newer sample."""
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
    """Return the record of the processes, updated with this sample.

    Lost processes are recorded only while the page is served.
    """
    complete = previous.complete
    if snapshot.engine_processes and not run.lost_roles:
        complete = snapshot.engine_processes
    refused_since_seconds = None
    if run.lost_roles and _is_page_refused(snapshot):
        refused_since_seconds = previous.refused_since_seconds or snapshot.monotonic_seconds
    processes = replace(previous, complete=complete, refused_since_seconds=refused_since_seconds)
    # If the page is not served, the server has exited too. In that case, it is unknown which
    # process exited first.
    if snapshot.page is None:
        return processes
    return replace(
        processes,
        orphans=_count_orphans(snapshot),
        # Only the first loss is kept, because later exits are a consequence of it.
        lost=previous.lost or _list_lost(processes, run, snapshot),
    )


def _is_page_refused(snapshot: Snapshot) -> bool:
    engines = snapshot.engines
    return isinstance(engines, Failure) and engines.reason is Reason.UNREACHABLE


def _record_page(previous: PageRecord, snapshot: Snapshot) -> PageRecord:
    """Return the page's record after this sample.

    Without a page, the old load is kept.
    """
    now = snapshot.monotonic_seconds
    if snapshot.page is None:
        return replace(previous, is_answering=False)
    page = replace(previous, newest_seconds=now, has_answered=True, is_answering=True)
    engines = list_named(snapshot.page)
    if not engines:
        return page
    # If the number of requests is unknown, the engine is not proven to be idle.
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
    """Return the loads.

    The number of running requests is added at most once per slot.
    """
    if running is None or (loads and now - loads[-1][0] < SLOT_SECONDS):
        return loads
    recent_loads = [load for load in loads if load[0] >= now - USUAL_LOAD_SECONDS]
    return (*recent_loads, (now, running))


def _list_lost(processes: ProcessRecord, run: EngineRun, snapshot: Snapshot) -> tuple[Lost, ...]:
    """Return the necessary processes that have exited, except any that outlived their server."""
    if not run.lost_roles:
        return ()
    if not processes.complete:
        return tuple(Lost(role) for role in run.lost_roles)
    # A trace has no pids. Only the number of processes per role can be compared.
    orphaned_processes = _list_orphaned(processes, snapshot)
    running = Counter(_name_processes((*snapshot.engine_processes, *orphaned_processes)))
    necessary = Counter(
        _name_processes(process for process in processes.complete if process.role in run.lost_roles)
    )
    return tuple(sorted(necessary - running))


def _name_processes(processes: Iterable[EngineProcess]) -> list[Lost]:
    return [Lost(process.role, process.pid or None) for process in processes]


def _list_orphaned(processes: ProcessRecord, snapshot: Snapshot) -> list[EngineProcess]:
    """Return the engine's processes that hold GPU memory even though their server has exited.

    A trace has no pids. For a trace, the result has as many workers as there are processes
    remaining on the GPUs. If the engine has no workers, cores are returned instead.
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
    # With a single GPU, vLLM runs the worker inside its core.
    holder_role = Role.WORKER if has_workers else Role.ENGINE_CORE
    holders = [process for process in processes.complete if process.role is holder_role]
    return holders[: len(pids)]


def _count_orphans(snapshot: Snapshot) -> int:
    """Count the orphaned processes on the engine's GPUs.

    An engine that was stopped leaves no orphans.
    """
    fates = [leftover.fate for gpu in snapshot.owned_gpus for leftover in gpu.leftovers]
    return fates.count(Fate.ORPHANED)


def list_lost_at_end(
    processes: ProcessRecord, run: EngineRun, snapshot: Snapshot, kind: IncidentKind
) -> tuple[Lost, ...]:
    """Return the necessary processes that, by this sample, had exited before the others."""
    if processes.lost:
        return processes.lost
    if kind is IncidentKind.STALLED:
        return _list_lost(processes, run, snapshot)
    # If there are no new orphans, all processes have exited together.
    if _count_orphans(snapshot) <= processes.orphans:
        return ()
    if run.lost_roles:
        return _list_lost(processes, run, snapshot)
    # There are new orphans, so all other processes, including the server, have exited.
    orphaned_processes = _list_orphaned(processes, snapshot)
    exited_processes = [
        process
        for process in processes.complete
        if process.role is not Role.OTHER and process not in orphaned_processes
    ]
    # If no exited process was ever observed, the server is returned. The orphans were its children.
    return tuple(sorted(_name_processes(exited_processes))) or (Lost(Role.API_SERVER),)
