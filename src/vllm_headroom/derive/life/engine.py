"""Follow one engine: its status, its runs, its exits and its stalls."""

from statistics import median
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.life.budget import describe_excess
from vllm_headroom.derive.life.causes import (
    FULL_REASONS,
    is_gpu_full,
    is_over_budget,
    is_shutdown,
)
from vllm_headroom.derive.life.progress import (
    EngineLabels,
    Progress,
    find_stranded,
)
from vllm_headroom.derive.life.record import (
    BURST_SECONDS,
    END_SECONDS,
    GpuRecord,
    PageRecord,
    RunRecord,
    list_lost_at_end,
    update_record,
)
from vllm_headroom.derive.life.states import (
    Absence,
    EngineRun,
    EngineRuns,
    Evidence,
    PageAnswer,
    Presence,
    Symptom,
    update_state,
)
from vllm_headroom.derive.series import limit_remembered, make_states
from vllm_headroom.derive.sums import find_least_known, find_most_known
from vllm_headroom.model import (
    BudgetExcess,
    Ending,
    EngineStatus,
    GpuAtEnd,
    HangSign,
    LogEnding,
    LogReading,
    ProbeReadings,
    Sample,
    Snapshot,
    StraightGrowth,
    find_log_ending,
)
from vllm_headroom.units import GIB
from vllm_headroom.vocabulary import EngineState, ExitReason, IncidentKind, LogFailureKind

LEFTOVER_SECONDS: Final = 30.0
"""Processes left behind by an exited engine are reported only after this time. They may still exit
by themselves. With vLLM 0.32, a worker exited up to 9 s after its core.
"""

ENGINE_RUN: Final = "engine_life"
"""The name under which this state is saved together with the states of the derivations."""

OUTLIVED_SECONDS: Final = 60.0
"""vLLM's engine exits within seconds of an OutOfMemoryError. If its probe is still writing after
this time, the engine has survived the error.
"""

LOADED_SHARE: Final = 0.5
"""An engine had loaded its model if its first sample shows enough memory. The minimum is this share
of the newest sample's memory.
"""

CONTEXT_BYTES: Final = GIB
"""All CUDA contexts together take less than this. An engine that holds less has not loaded
anything.
"""

UNLOADED_SECONDS: Final = 15.0
"""An engine younger than this at its first sample cannot have loaded its model. LOADED_SHARE is not
applied to an engine that young.
"""

LONGEST_LOAD_SECONDS: Final = 2400.0
"""Our choice: an engine younger than this at its first sample may have been loading. It was loading
if its memory has since grown by more than contexts take. Loading a large model took 33 minutes.
"""

SAME_END_SECONDS: Final = 15.0
"""A stall and an exit at most this far apart are a single event. Without its core, a server keeps
serving pages for 2 to 3 s. A tick takes 5 s.
"""

STRAIGHT_SECONDS: Final = 90.0
"""Our choice: growth in a straight line for this long is not a burst. A burst is caused by a single
batch.
"""

STRAIGHT_POINTS: Final = 4
"""Our choice: with fewer points, growth is not considered a straight line."""

STRAIGHT_TOLERANCE: Final = 0.1
"""Our choice: a point may be off the line by this share of the growth. Memory is allocated in
segments.
"""

LEVEL_LOAD_RATIO: Final = 0.25
"""Our choice: load is level within this share of the usual load."""

LEVEL_LOAD_REQUESTS: Final = 2.0
"""Our choice: load is also level within this many requests of the usual load."""

MEMORY_REASONS: Final = (
    ExitReason.OUT_OF_MEMORY,
    ExitReason.OVER_BUDGET,
    ExitReason.OOM_KILLED,
)
"""The exit reasons that also explain a stall shortly before the exit."""


class EngineMemory(Struct, frozen=True, kw_only=True):
    """Everything that is remembered about one engine.

    Times are on the monotonic clock.
    """

    runs: EngineRuns = field(default_factory=EngineRuns)
    """The part that is kept in the state file."""
    state: EngineState = EngineState.UNKNOWN
    known_state: EngineState = EngineState.UNKNOWN
    """The last state that was not UNKNOWN. The last known state is kept so that an interrupted
    stall is counted once.
    """
    progress: Progress = field(default_factory=Progress)
    record: RunRecord = field(default_factory=RunRecord)
    """What has been observed in the current run."""
    absence: Absence = field(default_factory=Absence)
    served_bytes: dict[str, int] = field(default_factory=dict)
    """The most GPU memory held while serving, by UUID. The maximum starts over at a start or
    wake-up.
    """
    leftover_since_seconds: dict[int, float] = field(default_factory=dict)
    """When each leftover process was first seen, by pid."""


def forget_run(memory: EngineMemory) -> EngineMemory:
    """Return what is remembered, with the current run removed.

    The data of the current run may have caused an error. The counts over all runs are kept.
    """
    return EngineMemory(runs=replace(memory.runs, newest=None))


def update_engine(
    memory: EngineMemory, snapshot: Snapshot, *, configured_bytes: float | None = None
) -> tuple[EngineMemory, Snapshot]:
    """Return what is remembered after this snapshot, and the snapshot with the status added.

    In the returned snapshot, `left_behind` has only lasting leftovers. Lasting leftovers are
    processes that were left behind at least LEFTOVER_SECONDS ago. `configured_bytes` is the
    operator's figure for the memory that the engine uses on each GPU.
    """
    now = snapshot.monotonic_seconds
    # An exit is described by the earlier record. The current sample may be from the next run.
    was_answering = memory.record.page.is_answering
    update = update_state(
        snapshot,
        memory.runs,
        memory.state,
        memory.progress,
        memory.absence,
        was_answering=was_answering,
    )
    evidence = update.evidence
    runs = update.runs
    event = None
    if update.exited_run is not None:
        event = _build_exit(update.exited_run, evidence, memory.record)
        runs = _count_exit(runs, event)
    # Values of the previous run must not be compared with those of this run.
    if runs.restarts != memory.runs.restarts:
        memory = _start_over(memory)
    # A stall that ends with this exit is not reported separately. A stall that continues is
    # reported only once.
    state = update.state
    is_stalled = state is EngineState.STALLED
    if event is None and is_stalled and memory.known_state is not EngineState.STALLED:
        age_seconds = update.progress.age_seconds
        event = _build_stall(memory.record, runs.present, snapshot, age_seconds)
    new_memory = EngineMemory(
        runs=runs,
        state=state,
        # While the state is unknown, the last known state decides whether a stall is new.
        known_state=memory.known_state if state is EngineState.UNKNOWN else state,
        progress=update.progress,
        record=_update_run_record(
            memory.record,
            evidence,
            runs,
            is_stalled=is_stalled,
            configured_bytes=configured_bytes,
        ),
        absence=update.absence,
        served_bytes=_update_served_bytes(memory, evidence, state),
        leftover_since_seconds={
            pid: memory.leftover_since_seconds.get(pid, now) for pid in snapshot.left_behind
        },
    )
    lasting_leftovers = frozenset(
        pid
        for pid, since_seconds in new_memory.leftover_since_seconds.items()
        if now - since_seconds >= LEFTOVER_SECONDS
    )
    status = _describe_engine(new_memory, evidence, event, update.symptom)
    return new_memory, replace(snapshot, engine_status=status, left_behind=lasting_leftovers)


def _start_over(memory: EngineMemory) -> EngineMemory:
    """Return what is remembered, without anything about the run before a restart."""
    return replace(
        memory,
        record=RunRecord(was_page_ever_read=memory.record.was_page_ever_read, follows_absence=True),
        served_bytes={},
    )


def _build_exit(run: EngineRun, evidence: Evidence, record: RunRecord) -> Ending:
    """Return the ending of a run that has exited according to the newest sample."""
    snapshot = evidence.snapshot
    gpus = describe_gpus(record, run, snapshot)
    # If there is no page, the run is not considered replaced. The next run is still loading, and
    # clients have lost this one. A kubelet may restart a container within a second. After so fast a
    # restart, no sample shows an engine without processes.
    is_replaced = record.page.is_answering and evidence.answer is PageAnswer.GIVEN
    reason = _find_exit_reason(run, evidence, gpus, is_replaced=is_replaced)
    ending = build_ending(record, run, snapshot, IncidentKind.ENDED, reason=reason, gpus=gpus)
    if isinstance(snapshot.log, LogReading):
        now = snapshot.time_seconds
        ending = replace(ending, log=find_log_ending(snapshot.log, now, now))
    ending = replace(ending, reason=_refine_reason(ending))
    if ending.reason not in FULL_REASONS:
        return ending
    # If memory ran out, the ending is built again. The reason affects whether the engine is
    # considered to have hung.
    rebuilt = build_ending(
        record, run, snapshot, IncidentKind.ENDED, reason=ending.reason, gpus=gpus
    )
    return replace(rebuilt, log=ending.log)


def _find_exit_reason(
    run: EngineRun, evidence: Evidence, gpus: tuple[GpuAtEnd, ...], *, is_replaced: bool
) -> ExitReason:
    """Return the reason for an exit, based on all evidence except the engine's log.

    `is_replaced` is whether the page was served before and now shows another run.
    """
    oom_kills = evidence.host.oom_kills
    if oom_kills is not None and oom_kills > run.oom_kills:
        return ExitReason.OOM_KILLED
    if _was_out_of_memory(run, evidence.snapshot, gpus):
        return ExitReason.OUT_OF_MEMORY
    return ExitReason.REPLACED if is_replaced else ExitReason.GONE


def _refine_reason(ending: Ending) -> ExitReason | None:
    """Return the reason for an exit, using its whole ending and the log.

    Only the whole ending shows whether a shutdown was requested, or whether the engine was over its
    budget from the start. In all other cases, a reason that the log states replaces GONE. Returns
    None for a stall, which has no reason.
    """
    # A reason in the engine's log is better evidence than the memory.
    if ending.reason is ExitReason.GONE and ending.log is not None:
        ending = replace(ending, reason=_find_logged_reason(ending.log))
    if ending.reason is ExitReason.GONE and is_shutdown(ending):
        return ExitReason.STOPPED
    # A run that was replaced between two samples may have been restarted on purpose.
    may_be_death = ending.reason in (ExitReason.GONE, ExitReason.OUT_OF_MEMORY)
    if may_be_death and is_over_budget(ending):
        return ExitReason.OVER_BUDGET
    return ending.reason


def _find_logged_reason(log: LogEnding) -> ExitReason:
    """Return the exit reason in the engine's log, or GONE if there is none."""
    if log.failure is None:
        return ExitReason.STOPPED if log.is_stopped else ExitReason.GONE
    if log.failure.kind is LogFailureKind.GPU_OUT_OF_MEMORY:
        return ExitReason.OUT_OF_MEMORY
    return ExitReason.GONE


def _was_out_of_memory(run: EngineRun, snapshot: Snapshot, gpus: tuple[GpuAtEnd, ...]) -> bool:
    """Return whether a GPU was full, or torch raised a fatal OutOfMemoryError in this run."""
    if any(is_gpu_full(gpu) for gpu in gpus):
        return True
    oom_seconds = _find_oom_seconds(snapshot)
    return oom_seconds is not None and oom_seconds >= (run.began_seconds or 0.0)


def _find_oom_seconds(snapshot: Snapshot) -> float | None:
    """Return when an OutOfMemoryError last ended a process, according to the probe.

    The time is in seconds since the epoch. Returns None if there was no OutOfMemoryError.
    """
    if not isinstance(snapshot.probe, ProbeReadings):
        return None
    fatal_seconds = []
    for process in snapshot.probe.processes:
        oom = process.oom
        # A process that kept writing its file survived the error.
        if oom is not None and process.written_at_seconds - oom.at_seconds <= OUTLIVED_SECONDS:
            fatal_seconds.append(oom.at_seconds)
    return max(fatal_seconds, default=None)


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
    """Return the exit or stall, with what happened before it.

    `run` is the run that ended or stalled. `record` is the record of this run up to, but excluding,
    this sample.
    """
    now = snapshot.monotonic_seconds
    is_exit = kind is IncidentKind.ENDED
    lost_processes = list_lost_at_end(record.processes, run, snapshot, kind)
    # Without a necessary process, there is no progress either. In that case, the cause is a crash
    # and not a hang.
    hung_seconds = None
    if not lost_processes and (not is_exit or _has_hung(record, reason, now)):
        # At an exit, the time of the last progress is unknown. The last sign of work is used
        # instead.
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
    """Return the median of the running requests before the end, or None if unknown."""
    loads = [running for at_seconds, running in page.loads if at_seconds < now - END_SECONDS]
    return median(loads) if loads else None


def _has_hung(record: RunRecord, reason: ExitReason | None, now: float) -> bool:
    """Return whether the engine had stalled before its exit.

    A stall that is part of the exit does not count.
    """
    if record.stalled_since_seconds is None:
        return False
    # If memory ran out, a stall in the last seconds is part of the exit.
    return reason not in MEMORY_REASONS or now - record.stalled_since_seconds > SAME_END_SECONDS


def _find_silence(record: RunRecord) -> float:
    """Return when the engine last showed any sign of work, on the monotonic clock."""
    if record.stalled_since_seconds is None:
        return record.page.newest_seconds
    return min(record.page.newest_seconds, record.stalled_since_seconds)


def _has_loaded_unseen(record: RunRecord) -> bool:
    """Return whether an engine without a page had loaded its model before its first sample."""
    if record.was_page_ever_read or record.follows_absence:
        return False
    age_seconds = record.first_age_seconds
    # An engine this young cannot have loaded its model before the first sample.
    if age_seconds is not None and age_seconds < UNLOADED_SECONDS:
        return False
    # While the memory of so young an engine keeps growing, the engine is still loading.
    may_have_loaded = age_seconds is not None and age_seconds < LONGEST_LOAD_SECONDS
    for gpu in record.gpus.values():
        first_held_bytes = gpu.first.most_held_bytes or 0
        newest_held_bytes = gpu.newest.held_bytes or 0
        if may_have_loaded and newest_held_bytes - first_held_bytes > CONTEXT_BYTES:
            return False
        if first_held_bytes >= max(CONTEXT_BYTES, LOADED_SHARE * newest_held_bytes):
            return True
    return False


def describe_gpus(record: RunRecord, run: EngineRun, snapshot: Snapshot) -> tuple[GpuAtEnd, ...]:
    """Describe each GPU of a run that ended with this snapshot.

    Only the snapshot's peaks may be those of the ended run.
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
    """Describe a GPU's memory at the start, in the last minutes, and at the end."""
    reading = gpu.newest.reading
    total_bytes = None
    usable_bytes = None
    used_bytes = None
    if reading.memory is not None:
        total_bytes = reading.memory.total_bytes
        usable_bytes = reading.memory.usable_bytes
        used_bytes = reading.memory.used_bytes
    # The time of the newest sample is used as the end. Samples may be missing for some time before
    # an exit.
    end_begin_seconds = gpu.slots[-1].newest_seconds - END_SECONDS
    end_slots = [slot for slot in gpu.slots if slot.newest_seconds >= end_begin_seconds]
    room_bytes = find_least_known(slot.least_room_at_peak_bytes for slot in end_slots)
    sampled_room_bytes = find_least_known(slot.least_room_bytes for slot in end_slots)
    # Without the number at the start, it is unknown whether a process is new.
    first_processes = gpu.first.most_processes or 0
    end_processes = find_most_known(slot.most_processes for slot in end_slots) or 0
    return GpuAtEnd(
        index=reading.index,
        uuid=reading.uuid,
        total_bytes=total_bytes,
        usable_bytes=usable_bytes,
        first_room_bytes=first_room_bytes,
        last_room_bytes=room_bytes,
        first_held_bytes=gpu.first.most_held_bytes,
        earlier_held_bytes=_find_earlier_held(gpu, now),
        last_engine_bytes=find_most_known(slot.most_held_at_peak_bytes for slot in end_slots),
        first_other_bytes=gpu.first.most_other_bytes,
        last_other_bytes=find_most_known(slot.most_other_bytes for slot in end_slots),
        has_new_process=0 < first_processes < end_processes,
        is_peak_unattributed=room_bytes != sampled_room_bytes,
        newest_seconds=gpu.newest_seconds,
        newest_used_bytes=used_bytes,
        newest_held_bytes=gpu.newest.held_bytes,
    )


def _find_earlier_held(gpu: GpuRecord, now: float) -> int | None:
    """Return the most memory held in the minutes before the end, or None if unknown."""
    end_begin_seconds = now - END_SECONDS
    oldest_seconds = end_begin_seconds - BURST_SECONDS
    earlier_slots = [
        slot
        for slot in (gpu.first, *gpu.slots)
        if oldest_seconds <= slot.newest_seconds < end_begin_seconds
    ]
    # If a record is shorter than END_SECONDS, only its first sample is old enough.
    if not earlier_slots and gpu.first.newest_seconds >= oldest_seconds:
        earlier_slots = [gpu.first]
    return find_most_known(slot.most_held_bytes for slot in earlier_slots)


def _find_straight_growth(gpu: GpuRecord, page: PageRecord) -> StraightGrowth | None:
    """Return the longest growth in a straight line that ends with the newest sample.

    Returns None if memory did not grow straight. Also returns None if the load is unknown or was
    not level. Memory grows with the number of requests.
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
        # The loop starts with the oldest point. The first line that fits is therefore the longest.
        if _is_straight(points[begin:]) and _is_load_level(page, begin_seconds):
            return StraightGrowth(grown_bytes=end_bytes - begin_bytes, seconds=seconds)
    return None


def _is_straight(points: list[tuple[float, int]]) -> bool:
    """Return whether all points are close to the line between the end points."""
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
    """Return whether load has stayed close to the usual load since `begin_seconds`.

    Returns False if no load was recorded in that time.
    """
    earlier_loads = [running for at_seconds, running in page.loads if at_seconds < begin_seconds]
    loads = [running for at_seconds, running in page.loads if at_seconds >= begin_seconds]
    if not loads:
        return False
    # The halves are compared separately. The median of a steadily rising load may equal the usual
    # load.
    half = len(loads) // 2
    usual_running = median(earlier_loads or loads)
    tolerance = max(LEVEL_LOAD_REQUESTS, LEVEL_LOAD_RATIO * usual_running)
    parts = [part for part in (loads[:half], loads[half:]) if part]
    return all(abs(median(part) - usual_running) <= tolerance for part in parts)


def _count_exit(runs: EngineRuns, ending: Ending) -> EngineRuns:
    """Return the runs with one more exit, counted under its reason.

    A stall does not change the runs.
    """
    if ending.reason is None:
        return runs
    exits = {**runs.exits, ending.reason: runs.exits.get(ending.reason, 0) + 1}
    return replace(runs, exits=exits, exit_requests=ending.requests)


def _build_stall(
    record: RunRecord, run: EngineRun, snapshot: Snapshot, age_seconds: float | None
) -> Ending:
    """Return the ending of an engine that has stalled.

    The ending has no reason, because the run continues.
    """
    return build_ending(
        record,
        run,
        snapshot,
        IncidentKind.STALLED,
        reason=None,
        gpus=describe_gpus(record, run, snapshot),
        progress_age_seconds=age_seconds,
    )


def _update_run_record(
    record: RunRecord,
    evidence: Evidence,
    runs: EngineRuns,
    *,
    is_stalled: bool,
    configured_bytes: float | None,
) -> RunRecord:
    """Return the record of the current run, or an empty record without a run."""
    run = runs.newest
    if run is None or run.has_ended:
        return RunRecord(
            was_page_ever_read=record.was_page_ever_read,
            follows_absence=run is not None or evidence.presence is Presence.GONE,
        )
    return update_record(
        record, evidence.snapshot, run, is_stalled=is_stalled, configured_bytes=configured_bytes
    )


def _update_served_bytes(
    memory: EngineMemory, evidence: Evidence, state: EngineState
) -> dict[str, int]:
    """Return the most memory held on each GPU while serving.

    The maximum starts over at a start or wake-up.
    """
    if state is not EngineState.SERVING:
        return memory.served_bytes
    previous_bytes = {} if memory.runs.present.was_asleep else memory.served_bytes
    most_bytes = {
        uuid: max(held_bytes, previous_bytes.get(uuid, 0))
        for uuid, held_bytes in evidence.held_bytes.items()
    }
    return limit_remembered(previous_bytes | most_bytes, most_bytes)


def _describe_engine(
    memory: EngineMemory, evidence: Evidence, event: Ending | None, symptom: Symptom
) -> EngineStatus:
    """Return what the snapshot shows about the engine's state and its runs."""
    runs = memory.runs
    age_seconds = memory.progress.age_seconds
    run = runs.present
    state = memory.state
    # The leak detector must not see the memory that is released when a run ends.
    is_over = state is EngineState.DOWN or bool(run.lost_roles)
    is_asleep = state is EngineState.ASLEEP
    # If the gauges are stale, no progress is expected.
    is_nothing_due = is_asleep or symptom is Symptom.STALE_GAUGES
    hang_signs: tuple[HangSign, ...] = ()
    stranded: tuple[tuple[EngineLabels, float], ...] = ()
    if evidence.page is not None:
        stranded = find_stranded(memory.progress.engines, evidence.snapshot.monotonic_seconds)
        if age_seconds is None:
            hang_signs = memory.progress.hang_signs
    return EngineStatus(
        state=state,
        is_in_service=False if is_over else run.has_worked,
        was_seen=runs.newest is not None,
        began_seconds=run.began_seconds,
        restarts=runs.restarts,
        exits=tuple((reason, runs.exits.get(reason, 0)) for reason in ExitReason),
        exit_requests=runs.exit_requests,
        event=event,
        log=_find_log(runs, evidence.snapshot, state),
        recent_exits=len(runs.ends_seconds),
        progress_age_seconds=None if is_nothing_due else age_seconds,
        stranded_ratios=stranded,
        wake_bytes=_list_bytes_to_wake(memory, evidence) if is_asleep else (),
        first_room_bytes=tuple(run.first_room_bytes.items()),
        first_host_room_bytes=run.first_host_room_bytes,
        excesses=_list_excesses(memory.record, evidence.snapshot),
        hang_signs=hang_signs,
        are_gauges_doubted=symptom in {Symptom.STALE_GAUGES, Symptom.GAUGES_DOUBTED},
    )


def _find_log(runs: EngineRuns, snapshot: Snapshot, state: EngineState) -> LogEnding | None:
    """Return what the log reports about the last exit.

    Returns None once the engine serves again.
    """
    if state is EngineState.SERVING or not runs.ends_seconds:
        return None
    if not isinstance(snapshot.log, LogReading):
        return None
    return find_log_ending(snapshot.log, runs.ends_seconds[-1], snapshot.time_seconds)


def _list_excesses(record: RunRecord, snapshot: Snapshot) -> tuple[tuple[str, BudgetExcess], ...]:
    """Return the excess on each GPU where the engine is over its budget, by UUID."""
    excesses = []
    for gpu in snapshot.owned_gpus:
        budget = record.budgets.get(gpu.reading.uuid)
        if budget is None:
            continue
        excess = describe_excess(budget, gpu, snapshot.monotonic_seconds)
        if excess is not None:
            excesses.append((gpu.reading.uuid, excess))
    return tuple(excesses)


def _list_bytes_to_wake(memory: EngineMemory, evidence: Evidence) -> tuple[tuple[str, int], ...]:
    """Return the bytes that a sleeping engine needs to wake up, by GPU UUID.

    The need is the most memory held while serving, minus the memory held now. A GPU is omitted if
    either value is unknown.
    """
    needs = []
    for uuid, held_bytes in evidence.held_bytes.items():
        if uuid in memory.served_bytes:
            needs.append((uuid, max(0, memory.served_bytes[uuid] - held_bytes)))
    return tuple(needs)


def derive_engine_state(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the samples of the engine's status, or none while the status is unknown.

    The samples show:

    - the state
    - the start of the run
    - the restarts and exits
    - the progress
    - how much of the KV cache is held by no request
    """
    status = snapshot.engine_status
    if status is None:
        return ()
    samples = [*make_states(catalog.ENGINE_STATE, (), status.state)]
    if status.began_seconds is not None:
        samples.append(Sample(catalog.ENGINE_START, (), status.began_seconds))
    samples.append(Sample(catalog.ENGINE_RESTARTS, (), float(status.restarts)))
    for reason, count in status.exits:
        samples.append(Sample(catalog.ENGINE_EXITS, (str(reason),), float(count)))
    if status.exit_requests is not None:
        samples.append(Sample(catalog.ENGINE_EXIT_REQUESTS, (), status.exit_requests))
    if status.progress_age_seconds is not None:
        samples.append(Sample(catalog.ENGINE_PROGRESS_AGE, (), status.progress_age_seconds))
    for labels, ratio in status.stranded_ratios:
        samples.append(Sample(catalog.ENGINE_KV_STRANDED, labels, ratio))
    return tuple(samples)
