"""What a snapshot shows of the engine being there: its page, its processes, its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.readings import engine_labels, finished, gpu_labels, named, states
from vllm_headroom.derive.readings import life as page_life
from vllm_headroom.model import (
    EnginePage,
    EngineProcess,
    EngineReading,
    Failure,
    Gpu,
    HostMemory,
    ProbeReadings,
    ProcessName,
    Sample,
    Snapshot,
)
from vllm_headroom.vocabulary import EngineState, LeakState, Reason, Role, Source

OCCUPIED_RATIO: Final = 0.05
"""A GPU on which less than this share is held runs no model: CUDA contexts take half a gigabyte."""

KEPT_RATIO: Final = 0.5
"""An engine whose memory fell below this share of the most it held while it served has let go of its weights."""

OUTLIVED_SECONDS: Final = 60.0
"""vLLM's engine dies of an OutOfMemoryError within seconds; one that still writes after this long has survived it."""

_SILENT: Final = frozenset({Reason.TIMEOUT, Reason.INCOMPLETE, Reason.HTTP_STATUS})


class Answer(Enum):
    """How the server took the question for its page."""

    GIVEN = auto()
    REFUSED = auto()
    """Nobody listens: vLLM does so until it is ready, and from the moment its server ends."""
    SILENT = auto()
    """Something is there that does not come up with a page, be it vLLM or a proxy before it."""
    UNREADABLE = auto()
    """The answer says nothing of the engine: a login, a wrong address, another server."""


class Signs(Struct, frozen=True, kw_only=True):
    """What one snapshot shows; None where it cannot tell.

    `alive` is whether processes of the engine exist, be it by what they hold on the GPUs where they cannot be seen.
    `sighted` is whether the engine's processes can be seen from here at all: not where its page answers and none shows.
    `silent` is whether the probe in a core that lives no longer writes, `oom_seconds` when, in seconds since the epoch,
    a process last ran out of GPU memory that did not outlive it. `held` is by UUID what the engine holds of its GPUs,
    `rooms` the least that was free on each in the last minute.
    """

    snapshot: Snapshot
    host: HostMemory
    answer: Answer
    alive: bool | None
    sighted: bool | None
    page: EnginePage | None
    page_life: str | None
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
        """When the server was started, by its page or else by its oldest process."""
        told = [engine.started_at_seconds for engine in self.page.engines] if self.page else []
        seen = [started for _, started in self.names if started > 0]
        return min((at for at in told if at is not None), default=None) or min(seen, default=None)


def signs(snapshot: Snapshot, *, sighted: bool | None, top_bytes: int, asleep: bool) -> Signs:
    """Return what the snapshot shows, given what was known of the sight and the most this life held while it served.

    That an engine which was `asleep` holds little tells nothing of its end, nor does the rest where one of its GPUs
    cannot be read.
    """
    page = snapshot.page
    processes = None if snapshot.ambiguous or isinstance(snapshot.processes, Failure) else snapshot.processes
    if processes or (processes is not None and page is not None):
        sighted = bool(processes)
    gpus = snapshot.owned
    held = {gpu.reading.uuid: gpu.held_bytes for gpu in gpus if gpu.held_bytes is not None}
    alive = sum(held.values()) > _least(gpus, top_bytes) if held else None
    alive = alive or None if asleep or len(held) < len(gpus) else alive
    if processes or (processes is not None and sighted is not False):
        alive = bool(processes)
    return Signs(
        snapshot=snapshot,
        host=snapshot.host or HostMemory(),
        answer=_answer(snapshot.engines),
        alive=alive,
        sighted=sighted,
        page=page,
        page_life=page_life(page),
        finished_total=finished(page),
        processes=processes,
        held=held,
        rooms={gpu.reading.uuid: room for gpu in gpus if (room := _room(gpu)) is not None},
        silent=isinstance(snapshot.probe, ProbeReadings) and any(each.scheduler for each in snapshot.probe.silent),
        oom_seconds=_oom_seconds(snapshot.probe),
    )


def _oom_seconds(probe: ProbeReadings | Failure | None) -> float | None:
    if not isinstance(probe, ProbeReadings):
        return None
    return max(
        (
            each.oom.at_seconds
            for each in (*probe.present, *probe.silent, *probe.others)
            if each.oom is not None and each.written_at_seconds - each.oom.at_seconds <= OUTLIVED_SECONDS
        ),
        default=None,
    )


def _answer(page: EnginePage | Failure) -> Answer:
    if not isinstance(page, Failure):
        return Answer.GIVEN
    if page.reason is Reason.UNREACHABLE:
        return Answer.REFUSED
    return Answer.SILENT if page.reason in _SILENT else Answer.UNREADABLE


def _least(gpus: tuple[Gpu, ...], top_bytes: int) -> float:
    """Return what an engine holds at the least, of the GPUs where that is known."""
    memories = [gpu.reading.memory for gpu in gpus if gpu.held_bytes is not None]
    total_bytes = sum(memory.total_bytes for memory in memories if memory is not None)
    return max(OCCUPIED_RATIO * total_bytes, KEPT_RATIO * top_bytes)


def _room(gpu: Gpu) -> int | None:
    """Return the least that was left in the last minute."""
    memory = gpu.reading.memory
    return None if memory is None else min(memory.left_bytes, memory.usable_bytes - (gpu.reading.used_peak_bytes or 0))


IDLE_SECONDS: Final = 60.0
"""How long no request must have run or waited before what the KV cache holds is called stranded."""

Labels = tuple[str, str]


class Movement(Struct, frozen=True, kw_only=True):
    """What one engine had counted, when that last changed and since when it has been idle, on the monotonic clock.

    `moved_seconds` is of its work, and now while it has none; `done_seconds` is when its tokens or steps last changed.
    """

    counted: tuple[float | None, ...]
    busy: bool
    moved_seconds: float
    done_seconds: float
    idle_seconds: float | None
    kv_used_ratio: float | None


def moved(before: Mapping[Labels, Movement], page: EnginePage, now: float) -> dict[Labels, Movement]:
    """Return the movement of each engine of the page; one that was idle or slept starts to move when it has work."""
    return {engine_labels(engine): _of(before.get(engine_labels(engine)), engine, now) for engine in named(page)}


def progress_age(movements: Mapping[Labels, Movement], now: float, owed_since: float | None = None) -> float | None:
    """Return the longest time in which an engine that has work has not moved; None where none has work that shows.

    A request of the daemon's own that has waited since `owed_since` is work, be it on the page or not: the gauges of a
    core that hangs show what was there before. It is as old as what was done last, whoever had asked for it.
    """
    ages = [now - each.moved_seconds for each in movements.values() if each.busy and any(map(_is_known, each.counted))]
    if owed_since is not None and movements:
        ages.append(now - max(owed_since, *(each.done_seconds for each in movements.values())))
    return max(ages, default=None)


def stranded(movements: Mapping[Labels, Movement], now: float) -> tuple[tuple[Labels, float], ...]:
    """Return what the KV cache of each engine still holds that has been awake and idle for a minute."""
    return tuple(
        (labels, each.kv_used_ratio)
        for labels, each in movements.items()
        if each.kv_used_ratio is not None and each.idle_seconds is not None and now - each.idle_seconds >= IDLE_SECONDS
    )


def worked(page: EnginePage) -> bool | None:
    """Return whether any engine of the page has ever done something; taken for granted where none shows on it.

    None where they have a name and tell nothing of work, as Dynamo's own series.
    """
    if not page.engines:
        return True
    told = [fact for engine in named(page) for fact in (*_counted(engine)[:-1], engine.running)]
    return None if told and not any(map(_is_known, told)) else any(told)


def _of(before: Movement | None, engine: EngineReading, now: float) -> Movement:
    asleep = engine.awake is False
    counted, busy = _counted(engine), bool(engine.running or engine.waiting) and not asleep
    same = before is not None and before.counted == counted
    done = before is not None and before.counted[_DONE] == counted[_DONE]
    rested = before.idle_seconds if before is not None and before.idle_seconds is not None else now
    return Movement(
        counted=counted,
        busy=busy,
        moved_seconds=before.moved_seconds if before is not None and before.busy and same else now,
        done_seconds=before.done_seconds if before is not None and done else now,
        idle_seconds=None if busy or asleep or engine.running is None else rested,
        kv_used_ratio=engine.kv_used_ratio,
    )


def _is_known(value: float | None) -> bool:
    return value is not None


_DONE: Final = slice(1, 4)
"""Tokens and steps: a request that is given up counts as finished and frees its share of the cache."""


def _counted(engine: EngineReading) -> tuple[float | None, ...]:
    """Return what moves while the engine works.

    A step whose requests all prefill counts nothing (vllm/v1/engine/async_llm.py: no IterationStats without outputs);
    what moves then is the KV cache, which takes up each chunk. Waiting requests do not count: they come from outside.
    """
    return (
        engine.finished_total,
        engine.prompt_tokens_total,
        engine.generation_tokens_total,
        engine.steps_total,
        engine.kv_used_ratio,
    )


_OUT_OF_SERVICE: Final = Failure(
    source=Source.ENGINE, reason=Reason.UNREACHABLE, message="the engine has not worked in this life, or its life ended"
)
_BEFORE_WORK: Final = {
    EngineState.STARTING: LeakState.WARMING_UP,
    EngineState.SERVING: LeakState.WARMING_UP,
    EngineState.ASLEEP: LeakState.ASLEEP,
}
"""What is said of a leak before an engine has worked, by what it does; in any other state nothing is known."""


def of_service(snapshot: Snapshot) -> Snapshot:
    """Return what belongs to a working life: of all else there is no page, no process and no held memory.

    While weights load, memory grows without bound and without work: a leak by all that a detector can tell. What is not
    known to belong to a working life is taken not to.
    """
    if snapshot.in_service:
        return snapshot
    gpus = snapshot.gpus
    if not isinstance(gpus, Failure):
        gpus = tuple(replace(gpu, held_bytes=None, engine_bytes=None, inside=None) for gpu in gpus)
    return replace(snapshot, engines=_OUT_OF_SERVICE, gpus=gpus, processes=())


def out_of_service(snapshot: Snapshot, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """Return what the leak detector says of what is not in service: what state the engine is in, and no leak's."""
    life = snapshot.life
    engine = EngineState.UNKNOWN if life is None or life.in_service is None else life.state
    rest = (sample for sample in samples if sample.metric is not catalog.LEAK_STATE)
    return (*rest, *_states(snapshot, _BEFORE_WORK.get(engine, LeakState.UNKNOWN)))


def _states(snapshot: Snapshot, state: LeakState) -> Iterator[Sample]:
    for gpu in snapshot.owned:
        yield from states(catalog.LEAK_STATE, gpu_labels(gpu), LeakState.UNKNOWN if gpu.held_bytes is None else state)
    processes = () if isinstance(snapshot.processes, Failure) else snapshot.processes
    for role in sorted({process.role for process in processes}, key=list(Role).index):
        yield from states(catalog.HOST_LEAK_STATE, (str(role),), state)
