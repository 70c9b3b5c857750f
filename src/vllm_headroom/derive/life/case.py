"""The case file of a run of the engine: what explains its end, collected sample by sample."""

from collections import Counter
from collections.abc import Iterable
from math import inf
from statistics import median
from typing import Final

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from vllm_headroom.derive.life.signs import EngineRun
from vllm_headroom.derive.readings import limit_remembered, list_named, sum_known
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
)
from vllm_headroom.vocabulary import ExitReason, IncidentKind, Reason, Role

SLOT_SECONDS: Final = 30.0
PEAK_SECONDS: Final = 60.0
LAST_SECONDS: Final = SLOT_SECONDS + PEAK_SECONDS
"""A tick and the minute for which the peak is kept."""

BEFORE_SECONDS: Final = 300.0
"""Growth within this time is a burst."""

USUAL_SECONDS: Final = 900.0
LOADED_SHARE: Final = 0.5
CONTEXT_BYTES: Final = 2**30
YOUNG_SECONDS: Final = 15.0
"""An engine older than this had loaded before if its first sample had this share, and more than CUDA contexts."""

SEQUENCE_SECONDS: Final = 15.0
"""A stall and an exit so close are one end: a server answers for 2 to 3 s without its core, and a tick is 5 s."""
MEMORY_REASONS: Final = (ExitReason.OUT_OF_MEMORY, ExitReason.OOM_KILLED)


class MemoryLevel(Struct, frozen=True, gc=False):
    """The extremes of one GPU's memory in a slot of time, at samples and at peaks, None where unknown.

    `seconds` is its newest sample, on the monotonic clock; `held` is the engine's.
    """

    begun_seconds: float
    seconds: float
    least_room_bytes: int | None = None
    least_room_at_peak_bytes: int | None = None
    most_held_bytes: int | None = None
    most_held_at_peak_bytes: int | None = None
    most_other_bytes: int | None = None
    most_processes: int | None = None


class GpuCase(Struct, frozen=True, kw_only=True):
    """A GPU of the engine: its level when the engine began to serve, those of the last minutes, its newest sample."""

    first: MemoryLevel
    levels: tuple[MemoryLevel, ...]
    newest: Gpu
    newest_seconds: float


class Case(Struct, frozen=True, kw_only=True):
    """What was seen of the present run, on the monotonic clock; `began_seconds` is None before its first sample.

    `page_seconds` is the last page, and before one the begin. `was_read` is whether any page was ever read, also of
    another run. `shut_since` is when the server began to refuse its page without its core. `whole` are its processes
    while none was missing, `first` the necessary ones that exited before the rest. `orphans` are the processes on its
    GPUs that have lost their server.
    """

    began_seconds: float | None = None
    newest_seconds: float = 0.0
    page_seconds: float = 0.0
    is_young: bool = False
    was_read: bool = False
    served: bool = False
    answered: bool = False
    engines: tuple[EngineReading, ...] = ()
    idle_since: float | None = None
    idle_seconds: float | None = None
    running: tuple[tuple[float, float], ...] = ()
    shut_since: float | None = None
    hung_since: float | None = None
    whole: tuple[EngineProcess, ...] = ()
    first: tuple[Lost, ...] = ()
    orphans: int = 0
    gpus: dict[str, GpuCase] = field(default_factory=dict)


def update_case(case: Case, snapshot: Snapshot, run: EngineRun, *, stalled: bool) -> Case:
    """Return the case with one more sample of its run.

    Once a necessary process has gone, the memory that it gave back says nothing about the end.
    """
    now, page = snapshot.monotonic_seconds, snapshot.page
    if case.began_seconds is None:
        started = run.began_seconds
        is_young = started is not None and snapshot.time_seconds - started < YOUNG_SECONDS
        case = replace(case, began_seconds=now, page_seconds=now, is_young=is_young)
    refused = (
        isinstance(snapshot.engines, Failure) and snapshot.engines.reason is Reason.UNREACHABLE
    )
    is_first = page is not None and not case.served
    processes = () if isinstance(snapshot.processes, Failure) else snapshot.processes
    gpus = (
        case.gpus
        if run.lost
        else {
            gpu.reading.uuid: _add_sample(case, gpu, snapshot, is_first)
            for gpu in snapshot.owned_gpus
        }
    )
    case = replace(
        case,
        newest_seconds=now,
        answered=page is not None,
        served=case.served or page is not None,
        was_read=case.was_read or page is not None,
        shut_since=(case.shut_since or now) if refused and run.lost else None,
        hung_since=(case.hung_since if case.hung_since is not None else now) if stalled else None,
        whole=case.whole if run.lost or not processes else processes,
        gpus=limit_remembered({**case.gpus, **gpus}, gpus),
    )
    return case if page is None else _add_page(replace(case, page_seconds=now), snapshot, run)


def _add_page(case: Case, snapshot: Snapshot, run: EngineRun) -> Case:
    """Return the case with a page: the last one that answered shows the load and what was whole."""
    now, engines = snapshot.monotonic_seconds, list_named(snapshot.page)
    case = replace(
        case, orphans=_count_orphans(snapshot), first=case.first or _name_lost(case, run, snapshot)
    )
    if not engines:
        return case
    work = sum_known(value for engine in engines for value in (engine.running, engine.waiting))
    running = sum_known(engine.running for engine in engines)
    idle_since = None if work != 0 else now if case.idle_since is None else case.idle_since
    loads = case.running
    if running is not None and not (loads and now - loads[-1][0] < SLOT_SECONDS):
        loads = (*(each for each in loads if each[0] >= now - USUAL_SECONDS), (now, running))
    return replace(
        case,
        engines=engines,
        idle_since=idle_since,
        idle_seconds=None if idle_since is None else now - idle_since,
        running=loads,
    )


def _name_lost(case: Case, run: EngineRun, snapshot: Snapshot) -> tuple[Lost, ...]:
    """Return the necessary processes that have exited; one that outlives its server has not."""
    if not case.whole:
        return tuple(map(Lost, run.lost))
    processes = () if isinstance(snapshot.processes, Failure) else snapshot.processes
    left = Counter(_list_names((*processes, *_list_orphaned(case, snapshot))))
    gone = Counter(_list_names(each for each in case.whole if each.role in run.lost)) - left
    return tuple(sorted(gone))


def _list_names(processes: Iterable[EngineProcess]) -> list[Lost]:
    return [Lost(each.role, each.pid or None) for each in processes]


def _list_orphaned(case: Case, snapshot: Snapshot) -> list[EngineProcess]:
    """Return the processes that outlive their server on its GPUs.

    In a trace without pids these are workers, or the core of an engine that has no workers.
    """
    pids = [
        left.pid
        for gpu in snapshot.owned_gpus
        for left in gpu.leftovers
        if left.fate is Fate.ORPHANED
    ]
    if any(pids):
        return [each for each in case.whole if each.pid in pids]
    holder = (
        Role.WORKER if any(each.role is Role.WORKER for each in case.whole) else Role.ENGINE_CORE
    )
    return [each for each in case.whole if each.role is holder][: len(pids)]


def _count_orphans(snapshot: Snapshot) -> int:
    """Count the orphaned processes on the engine's GPUs: a stopped engine leaves none."""
    return sum(left.fate is Fate.ORPHANED for gpu in snapshot.owned_gpus for left in gpu.leftovers)


def _add_sample(case: Case, gpu: Gpu, snapshot: Snapshot, is_first: bool) -> GpuCase:  # noqa: FBT001 - private
    before, now = case.gpus.get(gpu.reading.uuid), snapshot.monotonic_seconds
    memory, held = gpu.reading.memory, gpu.held_bytes
    room = None if memory is None else memory.left_bytes
    above = 0 if memory is None else max(0, (gpu.reading.used_peak_bytes or 0) - memory.used_bytes)
    level = MemoryLevel(
        now,
        now,
        least_room_bytes=room,
        least_room_at_peak_bytes=None if room is None else room - above,
        most_held_bytes=held,
        most_held_at_peak_bytes=None if held is None else held + above,
        most_other_bytes=gpu.other_bytes,
        most_processes=gpu.process_count,
    )
    first, levels = (
        level if before is None or is_first else before.first,
        () if before is None else before.levels,
    )
    if levels and 0 <= now - levels[-1].begun_seconds < SLOT_SECONDS:
        extremes = {
            name: (_find_least if name.startswith("least") else _find_most)(
                (getattr(levels[-1], name), value)
            )
            for name, value in asdict(level).items()
            if not name.endswith("seconds")
        }
        levels, level = levels[:-1], MemoryLevel(levels[-1].begun_seconds, now, **extremes)
    else:
        levels = tuple(
            each for each in levels if now - BEFORE_SECONDS - LAST_SECONDS <= each.seconds
        )
    return GpuCase(
        first=first, levels=(*levels, level), newest=gpu, newest_seconds=snapshot.time_seconds
    )


def _find_least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _find_most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def describe_gpus(case: Case, run: EngineRun, snapshot: Snapshot) -> tuple[GpuAtEnd, ...]:
    """Return each GPU of a run that has ended with this snapshot, whose peaks may still be the run's."""
    now, found = snapshot.monotonic_seconds, []
    peaks = {gpu.reading.uuid: gpu.reading.used_peak_bytes or 0 for gpu in snapshot.owned_gpus}
    recent = now - BEFORE_SECONDS - LAST_SECONDS
    for uuid, gpu in case.gpus.items():
        first, reading, memory = gpu.first, gpu.newest.reading, gpu.newest.reading.memory
        last = [
            level for level in gpu.levels if level.seconds >= gpu.levels[-1].seconds - LAST_SECONDS
        ]
        before = [
            level for level in (first, *gpu.levels) if recent <= level.seconds < now - LAST_SECONDS
        ]
        if not before and first.seconds >= recent:
            before = [first]
        room = _find_least(level.least_room_at_peak_bytes for level in last)
        at_end = GpuAtEnd(
            index=reading.index,
            uuid=uuid,
            total_bytes=None if memory is None else memory.total_bytes,
            usable_bytes=None if memory is None else memory.usable_bytes,
            first_room_bytes=run.rooms.get(uuid, first.least_room_at_peak_bytes),
            last_room_bytes=room,
            first_held_bytes=first.most_held_bytes,
            before_held_bytes=_find_most(level.most_held_bytes for level in before),
            last_engine_bytes=_find_most(level.most_held_at_peak_bytes for level in last),
            first_other_bytes=first.most_other_bytes,
            last_other_bytes=_find_most(level.most_other_bytes for level in last),
            joined=(_find_most(level.most_processes for level in last) or 0)
            > (first.most_processes or inf),
            between=room != _find_least(level.least_room_bytes for level in last),
            newest_seconds=gpu.newest_seconds,
            newest_used_bytes=None if memory is None else memory.used_bytes,
            newest_held_bytes=gpu.newest.held_bytes,
        )
        found.append(at_end.raise_peak(peaks.get(uuid, 0)))
    return tuple(found)


def build_ending(
    case: Case,
    run: EngineRun,
    snapshot: Snapshot,
    what: IncidentKind,
    *,
    reason: ExitReason | None,
    gpus: tuple[GpuAtEnd, ...],
    age_seconds: float | None = None,
) -> Ending:
    """Return the event with what preceded it; `run` is the one that ended or stalled, the case without this sample."""
    now, is_end = snapshot.monotonic_seconds, what is IncidentKind.ENDED
    hung = case.hung_since is not None and (
        reason not in MEMORY_REASONS or now - case.hung_since > SEQUENCE_SECONDS
    )
    first = case.first
    if not first and is_end and _count_orphans(snapshot) > case.orphans:
        orphaned = _list_orphaned(case, snapshot)
        gone = [each for each in case.whole if each.role is not Role.OTHER and each not in orphaned]
        whole = tuple(sorted(_list_names(gone))) or (Lost(Role.API_SERVER),)
        first = _name_lost(case, run, snapshot) if run.lost else whole
    elif not first and not is_end and run.lost:
        first = _name_lost(case, run, snapshot)
    usual = [running for at, running in case.running if at < now - LAST_SECONDS]
    loaded = any(
        (each.first.most_held_bytes or 0)
        >= max(CONTEXT_BYTES, LOADED_SHARE * (each.newest.held_bytes or 0))
        for each in case.gpus.values()
    )
    silent_since = (
        case.page_seconds if case.hung_since is None else min(case.page_seconds, case.hung_since)
    )
    return Ending(
        what=what,
        seconds=snapshot.time_seconds,
        reason=reason,
        began_seconds=run.began_seconds,
        seen_seconds=0.0 if case.began_seconds is None else now - case.began_seconds,
        unseen_seconds=None if case.began_seconds is None else now - case.newest_seconds,
        served=case.served or run.ready or (loaded and not case.was_read and not case.is_young),
        hung_seconds=(age_seconds or now - silent_since)
        if (not is_end or hung) and not first
        else None,
        answered=case.answered if is_end else snapshot.page is not None,
        first=first,
        shut_seconds=None if case.shut_since is None else now - case.shut_since,
        engines=case.engines,
        idle_seconds=case.idle_seconds,
        usual_running=median(usual) if usual else None,
        gpus=gpus,
        orphan_bytes=sum(
            left.used_bytes or 0 for gpu in snapshot.devices for left in gpu.leftovers
        ),
    )
