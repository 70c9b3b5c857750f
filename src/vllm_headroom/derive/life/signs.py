"""What a snapshot shows of the engine being there: its page, its processes, its memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from vllm_headroom.derive.page_facts import finished
from vllm_headroom.derive.page_facts import life as page_life
from vllm_headroom.model import EnginePage, EngineProcess, Failure, Gpu, ProbeReadings, Snapshot
from vllm_headroom.vocabulary import Reason

ProcessName = tuple[int, float]
"""A process by its pid and its start, in seconds since the epoch: a pid alone is given to another one later."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What one snapshot shows; None where it cannot tell.

    `alive` is whether processes of the engine exist, be it by what they hold on the GPUs where they cannot be seen.
    `sighted` is whether the engine's processes can be seen from here at all: not where its page answers and none shows.
    `silent` is whether the probe in a core that lives no longer writes, `oom_seconds` when, in seconds since the epoch,
    a process last ran out of GPU memory that did not outlive it.
    `owed_since` is since when a request of the daemon's own has waited.
    """

    answer: Answer
    alive: bool | None
    sighted: bool | None
    page: EnginePage | None
    page_life: str | None
    finished_total: float | None
    processes: tuple[EngineProcess, ...] | None
    held_bytes: int | None
    owed_since: float | None
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
    page = None if isinstance(snapshot.engines, Failure) else snapshot.engines
    processes = None if isinstance(snapshot.processes, Failure) else snapshot.processes
    if processes or (processes is not None and page is not None):
        sighted = bool(processes)
    held_bytes, total_bytes = _held(snapshot)
    whole = all(gpu.held_bytes is not None for gpu in owned(snapshot))
    alive: bool | None = None if held_bytes is None else held_bytes > _least(total_bytes, top_bytes)
    alive = alive or None if asleep or not whole else alive
    if processes or (processes is not None and sighted is not False):
        alive = bool(processes)
    return Signs(
        answer=_answer(snapshot.engines),
        alive=alive,
        sighted=sighted,
        page=page,
        page_life=None if page is None else page_life(page),
        finished_total=None if page is None else finished(page),
        processes=processes,
        held_bytes=held_bytes,
        owed_since=snapshot.unanswered_since_seconds,
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


def owned(snapshot: Snapshot) -> tuple[Gpu, ...]:
    """Return the GPUs that are the engine's."""
    gpus = () if isinstance(snapshot.gpus, Failure) else snapshot.gpus
    return tuple(gpu for gpu in gpus if gpu.attribution is not None)


def _answer(page: EnginePage | Failure) -> Answer:
    if not isinstance(page, Failure):
        return Answer.GIVEN
    if page.reason is Reason.UNREACHABLE:
        return Answer.REFUSED
    return Answer.SILENT if page.reason in _SILENT else Answer.UNREADABLE


def _held(snapshot: Snapshot) -> tuple[int | None, int]:
    """Return what the engine holds on the GPUs where that is known, and their size."""
    known = [
        (gpu.held_bytes, 0 if gpu.reading.memory is None else gpu.reading.memory.total_bytes)
        for gpu in owned(snapshot)
        if gpu.held_bytes is not None
    ]
    return (sum(held for held, _ in known), sum(total for _, total in known)) if known else (None, 0)


def _least(total_bytes: int, top_bytes: int) -> float:
    return max(OCCUPIED_RATIO * total_bytes, KEPT_RATIO * top_bytes)
