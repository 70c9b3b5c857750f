"""What a snapshot shows of the engine being there: its page, its processes, its memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from vllm_headroom.derive.page_facts import finished
from vllm_headroom.derive.page_facts import life as page_life
from vllm_headroom.model import (
    EnginePage,
    EngineProcess,
    Failure,
    Gpu,
    HostMemory,
    ProbeReadings,
    ProcessName,
    Snapshot,
)
from vllm_headroom.vocabulary import Reason

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
