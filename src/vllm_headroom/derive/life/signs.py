"""The signs of the engine in one snapshot: its page, processes and memory."""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.readings import (
    count_finished,
    identify_run,
    label_engine,
    label_gpu,
    list_named,
    make_states,
)
from vllm_headroom.model import (
    EnginePage,
    EngineProcess,
    EngineReading,
    Failure,
    HostMemory,
    ProbeReadings,
    ProcessName,
    Sample,
    Snapshot,
)
from vllm_headroom.vocabulary import EngineState, ExitReason, LeakState, Reason, Role, Source

OCCUPIED_RATIO: Final = 0.05
"""A GPU with a smaller share held runs no model: CUDA contexts take half a gigabyte."""

KEPT_RATIO: Final = 0.5
"""An engine that holds less than this share of its most while serving has released its weights."""

OUTLIVED_SECONDS: Final = 60.0
"""vLLM's engine exits within seconds of an OutOfMemoryError; one that still writes after this long has recovered."""

STARVED_RATIO: Final = 0.8
"""CPU pressure at which a server may be late for every page: two cores had 0.05 at a load of 2, and 0.95 at 5."""


class EngineRun(Struct, frozen=True, kw_only=True):
    """One run of the engine: what identifies it, and what was seen of it.

    `ready` is whether its page ever answered, `worked` whether it ever processed a request, None where the page does
    not show it. `vital` is the most processes of each vital role seen while the page answered, `top_bytes` the most
    memory it held then; `rooms` is the free memory of its GPUs, by UUID, and `host_room_bytes` that of the host, when
    it became ready. `asleep` and `lost` are as last seen: whether an
    engine on its page slept, and the roles of vital processes that had gone. `oom_kills` is the kernel's count in its
    container when last complete.
    """

    began_seconds: float | None = None
    page_run_id: str | None = field(default=None, name="page_life")  # its name in the state file
    finished_total: float | None = None
    processes: tuple[ProcessName, ...] = ()
    ready: bool = False
    worked: bool | None = False
    ended: bool = False
    vital: dict[Role, int] = field(default_factory=dict)
    top_bytes: int = 0
    rooms: dict[str, int] = field(default_factory=dict)
    host_room_bytes: int | None = None
    asleep: bool = False
    lost: tuple[Role, ...] = ()
    oom_kills: int = 0


class EngineRuns(Struct, frozen=True, kw_only=True):
    """The newest run, the number of restarts and exits, and the last exit times; survives the daemon.

    `sighted` is whether the engine's processes are visible: not if its page answers and none shows.
    """

    newest: EngineRun | None = None
    restarts: int = 0
    exits: dict[ExitReason, int] = field(default_factory=dict)
    ends_seconds: tuple[float, ...] = ()
    sighted: bool | None = None

    @property
    def present(self) -> EngineRun:
        """The current run; an empty one where none is running."""
        return EngineRun() if self.newest is None or self.newest.ended else self.newest


class Answer(Enum):
    """How the server answered the request for its page."""

    GIVEN = auto()
    REFUSED = auto()
    """Nothing listens: so until vLLM is ready, and once its server ends."""
    SILENT = auto()
    """Something accepts the request and returns no page: vLLM, or a proxy in front of it."""
    UNREADABLE = auto()
    """The answer is not the engine's: a login, a wrong address, another server."""


_ANSWERS: Final = {None: Answer.GIVEN, Reason.UNREACHABLE: Answer.REFUSED} | dict.fromkeys(
    (Reason.TIMEOUT, Reason.INCOMPLETE, Reason.HTTP_STATUS), Answer.SILENT
)
"""The answer by the reason of its failure; any other reason is that of an unreadable one."""


class Signs(Struct, frozen=True, kw_only=True):
    """What one snapshot shows; None where unknown.

    `alive` is whether processes of the engine exist, judged by held GPU memory where they are not visible; `blind` is
    whether that is unknown because the source that showed them failed. `silent` is whether the probe in a live core has
    stopped writing, `oom_seconds` when a process last had a fatal out-of-memory error, in seconds since the epoch.
    `held` is the engine's memory per GPU UUID, `rooms` the least free memory of each in the last minute.
    """

    snapshot: Snapshot
    host: HostMemory
    answer: Answer
    alive: bool | None
    blind: bool
    sighted: bool | None
    page: EnginePage | None
    page_run_id: str | None
    finished_total: float | None
    processes: tuple[EngineProcess, ...] | None
    held: dict[str, int]
    rooms: dict[str, int]
    silent: bool
    oom_seconds: float | None

    @property
    def names(self) -> tuple[ProcessName, ...]:
        """The engine's processes by pid and start."""
        return tuple((process.pid, process.started_at_seconds) for process in self.processes or ())

    @property
    def started_at_seconds(self) -> float | None:
        """When the server started, by its page, else by its oldest process."""
        starts = [engine.started_at_seconds for engine in self.page.engines] if self.page else []
        seen = [started for _, started in self.names if started > 0]
        return min((at for at in starts if at is not None), default=None) or min(seen, default=None)


def is_starved(processes: tuple[EngineProcess, ...] | Failure) -> bool:
    """Return whether the engine's machine is known to be short of CPU."""
    shown = () if isinstance(processes, Failure) else processes
    return any((each.cpu_pressure_ratio or 0.0) >= STARVED_RATIO for each in shown)


def collect_signs(snapshot: Snapshot, runs: EngineRuns) -> Signs:
    """Return the signs in a snapshot, given the runs so far; docs/states.md has the table of evidence.

    Little held memory does not prove the end of an engine that was asleep, or of one with an unreadable GPU.
    """
    page, run, gpus = snapshot.page, runs.present, snapshot.owned_gpus
    readings = snapshot.processes
    may_show = snapshot.ambiguous > 0 or (
        isinstance(readings, Failure) and readings.reason is Reason.TIMEOUT
    )
    processes = None if snapshot.ambiguous or isinstance(readings, Failure) else readings
    sighted = runs.sighted
    if processes or (page is not None and not run.processes and not may_show):
        sighted = bool(processes)
    held = {gpu.reading.uuid: gpu.held_bytes for gpu in gpus if gpu.held_bytes is not None}
    is_weighed = 0 < len(held) == len(gpus)
    blind = processes is None and bool(sighted or (may_show and sighted is None))
    alive: bool | None = None
    if processes is not None and sighted is not False:
        alive = bool(processes)
    elif not blind:
        memories = [gpu.reading.memory for gpu in gpus if gpu.held_bytes is not None]
        total_bytes = sum(memory.total_bytes for memory in memories if memory is not None)
        is_heavy = sum(held.values()) > max(
            OCCUPIED_RATIO * total_bytes, KEPT_RATIO * run.top_bytes
        )
        alive = is_heavy or (False if is_weighed and not run.asleep else None)
        was_weighed = run.top_bytes > 0 or (run is runs.newest and not run.ready)
        blind = alive is None and was_weighed and not is_weighed
    probe, failed = snapshot.probe, snapshot.engines
    files = probe.processes if isinstance(probe, ProbeReadings) else ()
    ooms = [
        (each.oom.at_seconds, each.written_at_seconds) for each in files if each.oom is not None
    ]
    peaks = [(gpu.reading, memory) for gpu in gpus if (memory := gpu.reading.memory) is not None]
    return Signs(
        snapshot=snapshot,
        host=snapshot.host or HostMemory(),
        answer=_ANSWERS.get(
            failed.reason if isinstance(failed, Failure) else None, Answer.UNREADABLE
        ),
        alive=alive,
        blind=blind,
        sighted=sighted,
        page=page,
        page_run_id=identify_run(page),
        finished_total=count_finished(page),
        processes=processes,
        held=held,
        rooms={
            reading.uuid: min(
                memory.left_bytes, memory.usable_bytes - (reading.used_peak_bytes or 0)
            )
            for reading, memory in peaks
        },
        silent=snapshot.has_silent_core,
        oom_seconds=max(
            (at for at, written in ooms if written - at <= OUTLIVED_SECONDS), default=None
        ),
    )


IDLE_SECONDS: Final = 60.0
"""Idle time after which KV cache still held counts as stranded."""

COUNTS: Final = 4
"""Readings of stranded blocks of which the lowest counts; the probe writes one in 5 seconds."""

Labels = tuple[str, str]


class Movement(Struct, frozen=True, kw_only=True):
    """The counters of one engine, when they last changed and since when it is idle, on the monotonic clock.

    `moved_seconds` is when work last progressed, or now without work; `done_seconds` when tokens or steps last changed.
    """

    counted: tuple[float | None, ...]
    busy: bool
    moved_seconds: float
    done_seconds: float
    idle_seconds: float | None
    kv_used_ratio: float | None
    kv_stranded_ratios: tuple[float, ...] = ()


def update_movements(
    before: Mapping[Labels, Movement], page: EnginePage, now: float
) -> dict[Labels, Movement]:
    """Return the movement of each engine on the page; an idle or sleeping one starts to move when it gets work."""
    found = {}
    for labels, engine in ((label_engine(engine), engine) for engine in list_named(page)):
        last, asleep = before.get(labels), engine.awake is False
        counted, busy = (
            _list_counters(engine),
            bool(engine.running or engine.waiting) and not asleep,
        )
        same = last is not None and last.counted == counted
        done = last is not None and last.counted[_DONE] == counted[_DONE]
        rested = last.idle_seconds if last is not None and last.idle_seconds is not None else now
        ratio, ratios = (
            engine.kv_stranded_ratio,
            () if last is None else last.kv_stranded_ratios[1 - COUNTS :],
        )
        found[labels] = Movement(
            counted=counted,
            busy=busy,
            moved_seconds=last.moved_seconds if last is not None and last.busy and same else now,
            done_seconds=last.done_seconds if last is not None and done else now,
            idle_seconds=None if busy or asleep or engine.running is None else rested,
            kv_used_ratio=engine.kv_used_ratio,
            kv_stranded_ratios=() if ratio is None else (*ratios, ratio),
        )
    return found


def find_progress_age(
    movements: Mapping[Labels, Movement], now: float, owed_since: float | None = None
) -> float | None:
    """Return the longest time an engine with work has made no progress; None without visible work.

    A request of the daemon that has been pending since `owed_since` is work too: the gauges of a hung core are frozen.
    Its age counts from the last progress of any request.
    """
    ages = [
        now - each.moved_seconds
        for each in movements.values()
        if each.busy and set(each.counted) != {None}
    ]
    if owed_since is not None and movements:
        ages.append(now - max(owed_since, *(each.done_seconds for each in movements.values())))
    return max(ages, default=None)


def find_stranded(
    movements: Mapping[Labels, Movement], now: float
) -> tuple[tuple[Labels, float], ...]:
    """Return the KV-cache share that no request holds: all of it after an idle minute, else what the probe has counted.

    The probe counts while the scheduler works: the lowest of the last readings is the share.
    """
    ratios = []
    for labels, each in movements.items():
        is_idle = each.idle_seconds is not None and now - each.idle_seconds >= IDLE_SECONDS
        counted = min(each.kv_stranded_ratios) if len(each.kv_stranded_ratios) == COUNTS else None
        ratio = each.kv_used_ratio if is_idle else counted
        if ratio is not None:
            ratios.append((labels, ratio))
    return tuple(ratios)


def has_worked(page: EnginePage) -> bool | None:
    """Return whether any engine of the page has ever processed a request; True for a page without engines.

    None where engines have a name but no counters, as in Dynamo's own series.
    """
    if not page.engines:
        return True
    facts = [
        fact
        for engine in list_named(page)
        for fact in (*_list_counters(engine)[:-1], engine.running)
    ]
    return None if facts and set(facts) == {None} else any(facts)


_DONE: Final = slice(1, 4)
"""Tokens and steps: an aborted request counts as finished and frees its share of the cache."""


def _list_counters(engine: EngineReading) -> tuple[float | None, ...]:
    """Return what changes while the engine works.

    A step that only prefills changes no counter (vllm/v1/engine/async_llm.py: no IterationStats without outputs), but
    the KV cache grows with each chunk. Waiting requests are left out: they come from outside.
    """
    return (
        engine.finished_total,
        engine.prompt_tokens_total,
        engine.generation_tokens_total,
        engine.steps_total,
        engine.kv_used_ratio,
    )


_OUT_OF_SERVICE: Final = Failure(
    source=Source.ENGINE,
    reason=Reason.UNREACHABLE,
    message="the engine has not worked in this run, or its run ended",
)
_BEFORE_WORK: Final = {
    EngineState.STARTING: LeakState.WARMING_UP,
    EngineState.SERVING: LeakState.WARMING_UP,
    EngineState.ASLEEP: LeakState.ASLEEP,
}
"""The leak state before an engine has worked, by the engine's state; unknown in any other."""


def keep_service(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot of a run in service; outside one, without page, processes and held memory.

    While weights load, memory grows without bound and without work, like a leak. A run counts as in service only if
    that is known.
    """
    if snapshot.in_service:
        return snapshot
    gpus = snapshot.gpus
    if not isinstance(gpus, Failure):
        gpus = tuple(replace(gpu, held_bytes=None, engine_bytes=None, inside=None) for gpu in gpus)
    return replace(snapshot, engines=_OUT_OF_SERVICE, gpus=gpus, processes=())


def derive_out_of_service(snapshot: Snapshot, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """Return the leak samples of an engine out of service: its state instead of a leak's."""
    engine_status = snapshot.engine_status
    engine = (
        EngineState.UNKNOWN
        if engine_status is None or engine_status.in_service is None
        else engine_status.state
    )
    state = _BEFORE_WORK.get(engine, LeakState.UNKNOWN)
    found = [sample for sample in samples if sample.metric is not catalog.LEAK_STATE]
    for gpu in snapshot.owned_gpus:
        is_in = LeakState.UNKNOWN if gpu.held_bytes is None else state
        found += make_states(catalog.LEAK_STATE, label_gpu(gpu), is_in)
    processes = () if isinstance(snapshot.processes, Failure) else snapshot.processes
    for role in sorted({process.role for process in processes}, key=list(Role).index):
        found += make_states(catalog.HOST_LEAK_STATE, (str(role),), state)
    return tuple(found)
