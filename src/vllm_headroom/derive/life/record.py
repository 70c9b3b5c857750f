"""The record of the present run: what explains its end, collected sample by sample."""

from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.life.budget import GpuBudget, describe_excess, update_budgets
from vllm_headroom.derive.life.states import EngineRun
from vllm_headroom.derive.pages import list_named
from vllm_headroom.derive.series import limit_remembered
from vllm_headroom.derive.sums import sum_known
from vllm_headroom.model import (
    Ending,
    EngineProcess,
    EngineReading,
    Failure,
    Fate,
    Gpu,
    GpuAtEnd,
    Lost,
    Snapshot,
    StraightGrowth,
)
from vllm_headroom.units import GIB
from vllm_headroom.vocabulary import ExitReason, IncidentKind, Reason, Role

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

LOADED_SHARE: Final = 0.5
"""An engine whose first sample had this share of its newest memory had loaded before."""

CONTEXT_BYTES: Final = GIB
"""CUDA contexts take less: an engine that holds less has loaded nothing."""

YOUNG_SECONDS: Final = 15.0
"""An engine that is younger at its first sample may have loaded since, so LOADED_SHARE proves
nothing."""

LONGEST_LOAD_SECONDS: Final = 2400.0
"""Our choice: an engine that is younger at its first sample, and grew since by more than contexts
take, was still loading: a large model loads for 33 minutes."""

SAME_END_SECONDS: Final = 15.0
"""A stall and an exit so close are one end: a server answers for 2 to 3 s without its core, and a
tick is 5 s."""

STRAIGHT_SECONDS: Final = 90.0
"""Our choice: growth in a straight line for so long is no burst, which comes with one batch."""

STRAIGHT_POINTS: Final = 4
"""Our choice: fewer points make no line."""

STRAIGHT_TOLERANCE: Final = 0.1
"""Our choice: how far a point may be from the line, as a share of the growth: torch allocates in
segments."""

LEVEL_LOAD_RATIO: Final = 0.25
"""Our choice: a load is level while it stays within this share of the usual one."""

LEVEL_LOAD_REQUESTS: Final = 2.0
"""Our choice: or within so many running requests of it."""

MEMORY_REASONS: Final = (
    ExitReason.OUT_OF_MEMORY,
    ExitReason.OVER_BUDGET,
    ExitReason.OOM_KILLED,
)
"""The reasons of an exit that also explain a stall just before it."""


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
        least_room_bytes=_find_least(part.least_room_bytes for part in pair),
        least_room_at_peak_bytes=_find_least(part.least_room_at_peak_bytes for part in pair),
        most_held_bytes=_find_most(part.most_held_bytes for part in pair),
        most_held_at_peak_bytes=_find_most(part.most_held_at_peak_bytes for part in pair),
        most_other_bytes=_find_most(part.most_other_bytes for part in pair),
        most_processes=_find_most(part.most_processes for part in pair),
    )


def _find_least(values: Iterable[int | None]) -> int | None:
    """Return the least known value; None where none is known."""
    return min((value for value in values if value is not None), default=None)


def _find_most(values: Iterable[int | None]) -> int | None:
    """Return the highest known value; None where none is known."""
    return max((value for value in values if value is not None), default=None)


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


def describe_gpus(record: RunRecord, run: EngineRun, snapshot: Snapshot) -> tuple[GpuAtEnd, ...]:
    """Return each GPU of a run that has ended with this snapshot.

    The peaks of the snapshot may still be of the run, though its samples are not.
    """
    peak_bytes = {gpu.reading.uuid: gpu.reading.used_peak_bytes or 0 for gpu in snapshot.owned_gpus}
    gpus = []
    for uuid, gpu in record.gpus.items():
        first_room_bytes = run.first_room_bytes.get(uuid, gpu.first.least_room_at_peak_bytes)
        at_end = _describe_gpu(gpu, first_room_bytes, snapshot.monotonic_seconds)
        budget = record.budgets.get(uuid)
        if budget is not None:
            excess = describe_excess(budget, gpu.newest, record.newest_seconds)
            at_end = replace(at_end, excess=excess)
        at_end = replace(at_end, straight_growth=_find_straight_growth(gpu, record.page))
        gpus.append(at_end.raise_peak(peak_bytes.get(uuid, 0)))
    return tuple(gpus)


def _describe_gpu(gpu: GpuRecord, first_room_bytes: int | None, now: float) -> GpuAtEnd:
    """Return the memory of a GPU at the end, in the minutes before it, and at first."""
    reading = gpu.newest.reading
    total_bytes = None
    usable_bytes = None
    used_bytes = None
    if reading.memory is not None:
        total_bytes = reading.memory.total_bytes
        usable_bytes = reading.memory.usable_bytes
        used_bytes = reading.memory.used_bytes
    # The end is that of the samples: before an exit they may have been missing for some time.
    end_begin_seconds = gpu.slots[-1].newest_seconds - END_SECONDS
    end_slots = [slot for slot in gpu.slots if slot.newest_seconds >= end_begin_seconds]
    room_bytes = _find_least(slot.least_room_at_peak_bytes for slot in end_slots)
    sampled_room_bytes = _find_least(slot.least_room_bytes for slot in end_slots)
    # Without a first count it cannot be known which process is new.
    first_processes = gpu.first.most_processes or 0
    end_processes = _find_most(slot.most_processes for slot in end_slots) or 0
    return GpuAtEnd(
        index=reading.index,
        uuid=reading.uuid,
        total_bytes=total_bytes,
        usable_bytes=usable_bytes,
        first_room_bytes=first_room_bytes,
        last_room_bytes=room_bytes,
        first_held_bytes=gpu.first.most_held_bytes,
        earlier_held_bytes=_find_earlier_held(gpu, now),
        last_engine_bytes=_find_most(slot.most_held_at_peak_bytes for slot in end_slots),
        first_other_bytes=gpu.first.most_other_bytes,
        last_other_bytes=_find_most(slot.most_other_bytes for slot in end_slots),
        has_new_process=0 < first_processes < end_processes,
        is_peak_unattributed=room_bytes != sampled_room_bytes,
        newest_seconds=gpu.newest_seconds,
        newest_used_bytes=used_bytes,
        newest_held_bytes=gpu.newest.held_bytes,
    )


def _find_earlier_held(gpu: GpuRecord, now: float) -> int | None:
    """Return the most that the engine held in the minutes before the end, None where unknown."""
    end_begin_seconds = now - END_SECONDS
    oldest_seconds = end_begin_seconds - BURST_SECONDS
    earlier_slots = [
        slot
        for slot in (gpu.first, *gpu.slots)
        if oldest_seconds <= slot.newest_seconds < end_begin_seconds
    ]
    # A record that began in the last minute and a half has its first sample only.
    if not earlier_slots and gpu.first.newest_seconds >= oldest_seconds:
        earlier_slots = [gpu.first]
    return _find_most(slot.most_held_bytes for slot in earlier_slots)


def _find_straight_growth(gpu: GpuRecord, page: PageRecord) -> StraightGrowth | None:
    """Return the longest growth in a straight line that ends with the newest sample.

    None without one, and where the load was not level or is not known: more requests take more
    memory.
    """
    points = [
        (slot.newest_seconds, slot.most_held_bytes)
        for slot in gpu.slots
        if slot.most_held_bytes is not None
    ]
    for begin in range(len(points) - STRAIGHT_POINTS + 1):
        begin_seconds, begin_bytes = points[begin]
        end_seconds, end_bytes = points[-1]
        seconds = end_seconds - begin_seconds
        if seconds < STRAIGHT_SECONDS or end_bytes <= begin_bytes:
            continue
        # From the oldest point on, so that the first line that fits is the longest.
        if _is_straight(points[begin:]) and _is_load_level(page, begin_seconds):
            return StraightGrowth(grown_bytes=end_bytes - begin_bytes, seconds=seconds)
    return None


def _is_straight(points: list[tuple[float, int]]) -> bool:
    """Return whether all points are close to the line from the first to the last."""
    begin_seconds, begin_bytes = points[0]
    end_seconds, end_bytes = points[-1]
    grown_bytes = end_bytes - begin_bytes
    bytes_per_second = grown_bytes / (end_seconds - begin_seconds)
    for at_seconds, held_bytes in points:
        line_bytes = begin_bytes + bytes_per_second * (at_seconds - begin_seconds)
        if abs(held_bytes - line_bytes) > STRAIGHT_TOLERANCE * grown_bytes:
            return False
    return True


def _is_load_level(page: PageRecord, begin_seconds: float) -> bool:
    """Return whether load was level from `begin_seconds` on: as before, and in both halves.

    False where no load was recorded in that time.
    """
    earlier_loads = [running for at_seconds, running in page.loads if at_seconds < begin_seconds]
    loads = [running for at_seconds, running in page.loads if at_seconds >= begin_seconds]
    if not loads:
        return False
    # In both halves, because load that only rises has the usual median in the middle.
    half = len(loads) // 2
    usual_running = median(earlier_loads or loads)
    tolerance = max(LEVEL_LOAD_REQUESTS, LEVEL_LOAD_RATIO * usual_running)
    parts = [part for part in (loads[:half], loads[half:]) if part]
    return all(abs(median(part) - usual_running) <= tolerance for part in parts)


def build_ending(
    record: RunRecord,
    run: EngineRun,
    snapshot: Snapshot,
    kind: IncidentKind,
    *,
    reason: ExitReason | None,
    gpus: tuple[GpuAtEnd, ...],
    progress_age_seconds: float | None = None,
) -> Ending:
    """Return the event with what preceded it.

    `run` is the one that ended or stalled, `record` is its record without this sample.
    """
    now = snapshot.monotonic_seconds
    is_exit = kind is IncidentKind.ENDED
    lost_processes = _list_lost_at_end(record, run, snapshot, kind)
    # Without a necessary process there is no progress either: that is a crash, and no hang.
    hung_seconds = None
    if not lost_processes and (not is_exit or _has_hung(record, reason, now)):
        # An exit has no age of its progress: the time since the last sign of work counts.
        hung_seconds = progress_age_seconds or now - _find_silence(record)
    observed_seconds = 0.0
    unobserved_seconds = None
    if record.began_seconds is not None:
        observed_seconds = now - record.began_seconds
        unobserved_seconds = now - record.newest_seconds
    refused_seconds = None
    if record.processes.refused_since_seconds is not None:
        refused_seconds = now - record.processes.refused_since_seconds
    return Ending(
        kind=kind,
        seconds=snapshot.time_seconds,
        reason=reason,
        began_seconds=run.began_seconds,
        observed_seconds=observed_seconds,
        unobserved_seconds=unobserved_seconds,
        has_served=record.page.has_answered or run.is_ready or _has_loaded_unseen(record),
        hung_seconds=hung_seconds,
        is_page_answering=record.page.is_answering if is_exit else snapshot.page is not None,
        lost_processes=lost_processes,
        refused_seconds=refused_seconds,
        engines=record.page.engines,
        idle_seconds=record.page.idle_seconds,
        usual_running=_find_usual_running(record.page, now),
        gpus=gpus,
        orphan_bytes=sum(
            leftover.used_bytes or 0 for gpu in snapshot.devices for leftover in gpu.leftovers
        ),
    )


def _find_usual_running(page: PageRecord, now: float) -> float | None:
    """Return the median of the running requests in the minutes before the end; None without any."""
    loads = [running for at_seconds, running in page.loads if at_seconds < now - END_SECONDS]
    return median(loads) if loads else None


def _list_lost_at_end(
    record: RunRecord, run: EngineRun, snapshot: Snapshot, kind: IncidentKind
) -> tuple[Lost, ...]:
    """Return the necessary processes that exited before the rest, also at this sample."""
    processes = record.processes
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


def _has_hung(record: RunRecord, reason: ExitReason | None, now: float) -> bool:
    """Return whether the engine was stalled before its exit, and not by the exit itself."""
    if record.stalled_since_seconds is None:
        return False
    # A stall of seconds before an exit for lack of memory is part of that exit.
    return reason not in MEMORY_REASONS or now - record.stalled_since_seconds > SAME_END_SECONDS


def _find_silence(record: RunRecord) -> float:
    """Return when the engine last showed that it works, on the monotonic clock."""
    if record.stalled_since_seconds is None:
        return record.page.newest_seconds
    return min(record.page.newest_seconds, record.stalled_since_seconds)


def _has_loaded_unseen(record: RunRecord) -> bool:
    """Return whether an engine whose page was never read held its model from the beginning."""
    if record.was_page_ever_read or record.follows_absence:
        return False
    age_seconds = record.first_age_seconds
    # An engine so young cannot have loaded before the first sample.
    if age_seconds is not None and age_seconds < YOUNG_SECONDS:
        return False
    # Of an engine this young, memory that still grows is a load in progress.
    may_have_loaded = age_seconds is not None and age_seconds < LONGEST_LOAD_SECONDS
    for gpu in record.gpus.values():
        first_held_bytes = gpu.first.most_held_bytes or 0
        newest_held_bytes = gpu.newest.held_bytes or 0
        if may_have_loaded and newest_held_bytes - first_held_bytes > CONTEXT_BYTES:
            return False
        if first_held_bytes >= max(CONTEXT_BYTES, LOADED_SHARE * newest_held_bytes):
            return True
    return False
