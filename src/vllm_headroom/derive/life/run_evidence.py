"""What one snapshot proves about the engine and its present run."""

from enum import Enum, auto
from typing import Final

from msgspec import Struct, field

from vllm_headroom.derive.pages import count_finished, list_engines
from vllm_headroom.derive.run_identity import identify_run
from vllm_headroom.model import (
    EnginePage,
    EngineProcess,
    Failure,
    HostMemory,
    ProcessName,
    Snapshot,
)
from vllm_headroom.vocabulary import ExitReason, Reason, Role

OCCUPIED_RATIO: Final = 0.05
"""A GPU with a smaller share held runs no model: CUDA contexts take half a gigabyte."""

LOADED_RATIO: Final = 0.5
"""An engine that holds less than this share of its most while serving has released its weights."""

STARVED_RATIO: Final = 0.8
"""CPU pressure at which a server may be late for every page: two cores had 0.05 at a load of 2, and
0.95 at 5."""

NECESSARY_ROLES: Final = (Role.ENGINE_CORE, Role.WORKER)
"""A server without one of these processes serves nobody. Its page may answer for half a minute, or
forever."""

_STATE_FILE_NAMES: Final = {
    "page_run_id": "page_life",
    "process_names": "processes",
    "is_ready": "ready",
    "has_worked": "worked",
    "has_ended": "ended",
    "necessary_counts": "vital",
    "most_held_bytes": "top_bytes",
    "first_room_bytes": "rooms",
    "first_host_room_bytes": "host_room_bytes",
    "was_asleep": "asleep",
    "lost_roles": "lost",
}
"""The names of the fields in lives.json, which a file of an older version has too."""


class EngineRun(Struct, frozen=True, kw_only=True, rename=_STATE_FILE_NAMES):
    """One run of the engine: what identifies it, and what it was like when last seen."""

    began_seconds: float | None = None
    """Since the epoch."""
    page_run_id: str | None = None
    """The start times on its page."""
    finished_total: float | None = None
    process_names: tuple[ProcessName, ...] = ()
    is_ready: bool = False
    """Whether its page ever answered."""
    has_worked: bool | None = False
    """Whether it ever processed a request; None where its page does not show work."""
    has_ended: bool = False
    necessary_counts: dict[Role, int] = field(default_factory=dict)
    """The most processes of each necessary role that ran while the page answered."""
    most_held_bytes: int = 0
    """The most GPU memory that it held while the page answered."""
    first_room_bytes: dict[str, int] = field(default_factory=dict)
    """The free memory of its GPUs, by UUID, when it became ready."""
    first_host_room_bytes: int | None = None
    """The free memory of the host when it became ready."""
    was_asleep: bool = False
    """Whether an engine on its newest page slept."""
    lost_roles: tuple[Role, ...] = ()
    """The necessary roles of which a process has exited."""
    oom_kills: int = 0
    """The kernel's count in its container while it was last complete."""


class EngineRuns(Struct, frozen=True, kw_only=True, rename={"are_processes_visible": "sighted"}):
    """The newest run, and the counts of all runs; the state file keeps them over a restart."""

    newest: EngineRun | None = None
    restarts: int = 0
    exits: dict[ExitReason, int] = field(default_factory=dict)
    exit_requests: float | None = None
    """The requests on the last page before the last exit; None where unknown."""
    ends_seconds: tuple[float, ...] = ()
    """When the newest runs ended, since the epoch."""
    are_processes_visible: bool | None = None
    """Whether this sidecar can see the engine's processes; None until a reading has shown it."""

    @property
    def present(self) -> EngineRun:
        """The current run; an empty one where none is running."""
        if self.newest is None or self.newest.has_ended:
            return EngineRun()
        return self.newest


class PageAnswer(Enum):
    """How the server answered the request for its page."""

    GIVEN = auto()
    REFUSED = auto()
    """Nothing listens: so until vLLM is ready, and once its server exits."""
    SILENT = auto()
    """Something accepts the request and returns no page: vLLM, or a proxy in front of it."""
    ERROR = auto()
    """A server that runs answers with an error: that says nothing of the engine behind it."""
    UNREADABLE = auto()
    """The answer is not the engine's: a login, a wrong address, another server."""


_FAILED_ANSWERS: Final = {
    Reason.UNREACHABLE: PageAnswer.REFUSED,
    Reason.TIMEOUT: PageAnswer.SILENT,
    Reason.INCOMPLETE: PageAnswer.SILENT,
    Reason.HTTP_STATUS: PageAnswer.ERROR,
}
"""The answer by the reason of its failure; any other reason makes it unreadable."""

_GATEWAY_STATUSES: Final = frozenset({502, 503, 504})
"""With these a proxy reports that nothing answers behind it."""


class Presence(Enum):
    """Whether processes of the engine exist."""

    THERE = auto()
    GONE = auto()
    OUT_OF_SIGHT = auto()
    """A source that showed them before has failed: nothing ends on that."""
    NEVER_SHOWN = auto()
    """No source has ever shown them in this run: only the page is left."""


class Evidence(Struct, frozen=True, kw_only=True):
    """What one snapshot shows of the engine; docs/states.md has the table of evidence."""

    snapshot: Snapshot
    answer: PageAnswer
    processes: tuple[EngineProcess, ...] | None
    """None where /proc cannot be read, or where several servers may be the engine."""
    are_processes_visible: bool | None
    """As in EngineRuns."""
    presence: Presence
    held_bytes: dict[str, int]
    """The engine's GPU memory by UUID, of the GPUs on which it is known."""
    page_run_id: str | None
    finished_total: float | None

    @property
    def page(self) -> EnginePage | None:
        """The engine's page, None where it could not be read."""
        return self.snapshot.page

    @property
    def host(self) -> HostMemory:
        """The host's memory, without figures where it is unknown."""
        return self.snapshot.host or HostMemory()

    @property
    def process_names(self) -> tuple[ProcessName, ...]:
        """The engine's processes by pid and start."""
        return tuple((process.pid, process.started_at_seconds) for process in self.processes or ())

    @property
    def started_at_seconds(self) -> float | None:
        """When the server started, by its page, else its oldest process; None if neither shows."""
        page_starts = [
            engine.started_at_seconds
            for engine in list_engines(self.page)
            if engine.started_at_seconds is not None
        ]
        # 0 is a start that could not be read.
        process_starts = [started for _, started in self.process_names if started > 0]
        return min(page_starts, default=None) or min(process_starts, default=None)


def read_evidence(snapshot: Snapshot, runs: EngineRuns) -> Evidence:
    """Return what a snapshot shows, given the runs so far."""
    answer = PageAnswer.GIVEN
    if isinstance(snapshot.engines, Failure):
        answer = _read_failure(snapshot.engines)
    # While several servers may be the engine, the processes of none of them count.
    processes = None
    if not snapshot.ambiguous_engines and not isinstance(snapshot.processes, Failure):
        processes = snapshot.processes
    are_visible = _judge_visibility(snapshot, runs, processes)
    held_bytes = {
        gpu.reading.uuid: gpu.held_bytes
        for gpu in snapshot.owned_gpus
        if gpu.held_bytes is not None
    }
    if processes and are_visible is not False:
        presence = Presence.THERE
    # The processes can be read, and there are none.
    elif processes is not None and are_visible is not False:
        presence = Presence.GONE
    elif processes is None and _is_sight_lost(snapshot, are_visible):
        presence = Presence.OUT_OF_SIGHT
    else:
        presence = _judge_held_memory(snapshot, runs, held_bytes)
    return Evidence(
        snapshot=snapshot,
        answer=answer,
        processes=processes,
        are_processes_visible=are_visible,
        presence=presence,
        held_bytes=held_bytes,
        page_run_id=identify_run(snapshot.page),
        finished_total=count_finished(snapshot.page),
    )


def _read_failure(failure: Failure) -> PageAnswer:
    if failure.http_status in _GATEWAY_STATUSES:
        return PageAnswer.SILENT
    return _FAILED_ANSWERS.get(failure.reason, PageAnswer.UNREADABLE)


def _judge_visibility(
    snapshot: Snapshot, runs: EngineRuns, processes: tuple[EngineProcess, ...] | None
) -> bool | None:
    """Return whether the engine's processes are visible: not if its page answers and none shows.

    None while it is not known; what was found earlier in the run stays.
    """
    if processes:
        return True
    # A page that answers has processes behind it: if none shows, none ever will from here.
    has_shown_none = snapshot.page is not None and not runs.present.process_names
    if has_shown_none and not _may_show_processes_later(snapshot):
        return False
    return runs.are_processes_visible


def _may_show_processes_later(snapshot: Snapshot) -> bool:
    """Return whether /proc was only late, or showed several servers that may be the engine."""
    readings = snapshot.processes
    is_late = isinstance(readings, Failure) and readings.reason is Reason.TIMEOUT
    return is_late or snapshot.ambiguous_engines > 0


def _is_sight_lost(snapshot: Snapshot, are_visible: bool | None) -> bool:  # noqa: FBT001 - private
    if are_visible is None:
        return _may_show_processes_later(snapshot)
    return are_visible


def _judge_held_memory(
    snapshot: Snapshot, runs: EngineRuns, held_bytes: dict[str, int]
) -> Presence:
    """Return whether processes exist by the GPU memory that they hold.

    Little held memory does not prove the exit of an engine that was asleep, or of one with an
    unreadable GPU.
    """
    gpus = snapshot.owned_gpus
    run = runs.present
    total_bytes = 0
    for gpu in gpus:
        if gpu.held_bytes is not None and gpu.reading.memory is not None:
            total_bytes += gpu.reading.memory.total_bytes
    # Nobody's name is on GPU memory: what a context or the rest of a model takes proves nothing.
    empty_bytes = max(OCCUPIED_RATIO * total_bytes, LOADED_RATIO * run.most_held_bytes)
    if sum(held_bytes.values()) > empty_bytes:
        return Presence.THERE
    # An engine's memory may be on the one GPU that could not be read.
    are_all_gpus_read = 0 < len(held_bytes) == len(gpus)
    if are_all_gpus_read and not run.was_asleep:
        return Presence.GONE
    # A run that loads has shown its memory too, though not while its page answered.
    is_loading = run is runs.newest and not run.is_ready
    if not are_all_gpus_read and (run.most_held_bytes > 0 or is_loading):
        return Presence.OUT_OF_SIGHT
    return Presence.NEVER_SHOWN


def is_error_answer(failure: Failure) -> bool:
    """Return whether a server that runs answers with an error in place of its page."""
    return _read_failure(failure) is PageAnswer.ERROR


def is_starved(processes: tuple[EngineProcess, ...] | Failure) -> bool:
    """Return whether the engine's machine is known to be short of CPU."""
    if isinstance(processes, Failure):
        return False
    return any((process.cpu_pressure_ratio or 0.0) >= STARVED_RATIO for process in processes)
