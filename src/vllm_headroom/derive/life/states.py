"""The engine's state: what a snapshot shows, which run it shows, and the transition tables.

docs/states.md explains each row.
"""

from collections import Counter
from collections.abc import Collection
from enum import Enum, auto
from itertools import product
from typing import Final, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.life.progress import (
    SIGN_SECONDS,
    STALLED_SECONDS,
    Activity,
    Progress,
    has_worked,
    sum_waiting_requests,
    update_progress,
)
from vllm_headroom.derive.pages import count_finished, is_page_awake, list_engines
from vllm_headroom.derive.run_identity import RESTART_SHARE, identify_run, is_new_run
from vllm_headroom.model import (
    SAME_START_SECONDS,
    EnginePage,
    EngineProcess,
    Failure,
    HangSign,
    HostMemory,
    ProcessName,
    Snapshot,
)
from vllm_headroom.vocabulary import (
    NECESSARY_ROLES,
    EngineState,
    ExitReason,
    Reason,
    Role,
    ServerAnswer,
)

OCCUPIED_RATIO: Final = 0.05
"""If the engine holds less than this share of its GPUs' memory, nothing is loaded. CUDA contexts
alone take half a gigabyte.
"""

LOADED_RATIO: Final = 0.5
"""Below this share of its highest memory while serving, an engine has released its weights."""

STARVED_RATIO: Final = 0.8
"""If the CPU pressure exceeds this, a server may deliver every page late. On two cores, the CPU
pressure was 0.05 at a load average of 2, and 0.95 at a load average of 5.
"""

SPINNING_SECONDS: Final = 180.0
"""A server that uses CPU time without answering for longer than this is spinning. A server is not
considered spinning while the machine is short of CPU, or while the server finishes its last
requests.
"""

CRASH_LOOP_SECONDS: Final = 90 * 60.0
"""The time over which exits are counted, as in HeadroomEngineCrashLoop."""

MOST_ENDS: Final = 64
"""Only the newest exit times are kept, at most this many. Keeping more would not change any
verdict.
"""

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
"""The fields' names in lives.json, as in files from older versions."""


class EngineRun(Struct, frozen=True, kw_only=True, rename=_STATE_FILE_NAMES):
    """One run of the engine: its identity, and its last observed state."""

    began_seconds: float | None = None
    """When the run began, in seconds since the epoch."""
    page_run_id: str | None = None
    """The start times on the engine's page, which identify the run."""
    finished_total: float | None = None
    process_names: tuple[ProcessName, ...] = ()
    is_ready: bool = False
    """Whether the engine's page has ever been served in this run."""
    has_worked: bool | None = False
    """Whether the engine has ever processed a request. It is None if the engine's page does not
    show work.
    """
    has_ended: bool = False
    necessary_counts: dict[Role, int] = field(default_factory=dict)
    """For each necessary role, the highest number of its processes. Only samples with a served page
    count.
    """
    most_held_bytes: int = 0
    """The most GPU memory that was held in this run while the page was served."""
    first_room_bytes: dict[str, int] = field(default_factory=dict)
    """The free memory on each of the engine's GPUs when it became ready, by UUID."""
    first_host_room_bytes: int | None = None
    """The host memory that was free when the engine became ready."""
    was_asleep: bool = False
    """Whether any engine was asleep according to the newest page."""
    lost_roles: tuple[Role, ...] = ()
    """The necessary roles in which at least one process has exited."""
    oom_kills: int = 0
    """The kernel's count of OOM kills in the engine's container. The count is from the last sample
    in which no process was missing.
    """


class EngineRuns(Struct, frozen=True, kw_only=True, rename={"are_processes_visible": "sighted"}):
    """The newest run, and the counts over all runs.

    Both runs survive restarts of the sidecar, because they are saved in the state file.
    """

    newest: EngineRun | None = None
    restarts: int = 0
    exits: dict[ExitReason, int] = field(default_factory=dict)
    exit_requests: float | None = None
    """The requests on the last page before the last exit, or None if unknown."""
    ends_seconds: tuple[float, ...] = ()
    """When the newest runs ended, in seconds since the epoch."""
    are_processes_visible: bool | None = None
    """Whether this sidecar can see the engine's processes, or None until that is known."""

    @property
    def present(self) -> EngineRun:
        """Return the current run, or an empty run if there is none."""
        if self.newest is None or self.newest.has_ended:
            return EngineRun()
        return self.newest


class PageAnswer(Enum):
    """How the server answered when its page was requested."""

    GIVEN = auto()
    REFUSED = auto()
    """Nothing listens on the port. Connections are refused before vLLM is ready and after its
    server has exited.
    """
    SILENT = auto()
    """vLLM, or a proxy in front of it, accepts the request but returns no page."""
    ERROR = auto()
    """A running server answers with an error, which says nothing about the engine behind it."""
    UNREADABLE = auto()
    """The answer is not from the engine. The answer may come from a login page, a wrong address or
    another server.
    """


_FAILED_ANSWERS: Final = {
    Reason.UNREACHABLE: PageAnswer.REFUSED,
    Reason.TIMEOUT: PageAnswer.SILENT,
    Reason.INCOMPLETE: PageAnswer.SILENT,
    Reason.HTTP_STATUS: PageAnswer.ERROR,
}
"""The kind of answer that follows from each failure reason. Any other reason means UNREADABLE."""

_GATEWAY_STATUSES: Final = frozenset({502, 503, 504})
"""With these HTTP statuses, a proxy reports that no server behind it responds."""


class Presence(Enum):
    """Whether processes of the engine exist."""

    THERE = auto()
    GONE = auto()
    OUT_OF_SIGHT = auto()
    """The source that used to show the processes has failed. The failure of the source does not end
    a run.
    """
    NEVER_SHOWN = auto()
    """No source has shown the processes in this run. The page is the only evidence."""


class Evidence(Struct, frozen=True, kw_only=True):
    """What one snapshot shows about the engine, as listed in the table in docs/states.md."""

    snapshot: Snapshot
    answer: PageAnswer
    processes: tuple[EngineProcess, ...] | None
    """The engine's processes. The processes are None if /proc cannot be read or several servers may
    be the engine.
    """
    are_processes_visible: bool | None
    """Whether this sidecar can see the engine's processes, as in EngineRuns."""
    presence: Presence
    held_bytes: dict[str, int]
    """The engine's memory on each GPU for which it is known, by UUID."""
    page_run_id: str | None
    finished_total: float | None

    @property
    def page(self) -> EnginePage | None:
        """Return the engine's page, or None if it could not be read."""
        return self.snapshot.page

    @property
    def host(self) -> HostMemory:
        """Return the host's memory; a figure is None if it is unknown."""
        return self.snapshot.host or HostMemory()

    @property
    def process_names(self) -> tuple[ProcessName, ...]:
        """Return the pids and start times of the engine's processes."""
        return tuple((process.pid, process.started_at_seconds) for process in self.processes or ())

    @property
    def started_at_seconds(self) -> float | None:
        """Return when the server started, by its page or processes, or None if unknown."""
        page_starts = [
            engine.started_at_seconds
            for engine in list_engines(self.page)
            if engine.started_at_seconds is not None
        ]
        # A start time of 0 means that the time could not be read.
        process_starts = [started for _, started in self.process_names if started > 0]
        return min(page_starts, default=None) or min(process_starts, default=None)


def read_evidence(snapshot: Snapshot, runs: EngineRuns) -> Evidence:
    """Return what a snapshot shows about the engine, given the runs so far."""
    answer = PageAnswer.GIVEN
    if isinstance(snapshot.engines, Failure):
        answer = _read_failure(snapshot.engines)
    # If several servers may be the engine, no server's processes are attributed to the engine.
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
    # The processes can be read, and none of them is the engine's.
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
    """Return whether the engine's processes are visible.

    Returns False if a page is served even though no process is visible. Returns None while it is
    unknown whether the processes are visible. An earlier result in the same run is kept.
    """
    if processes:
        return True
    # If a page is served, there must be processes behind it. If none of these processes is visible
    # now, none will become visible to this sidecar later.
    has_shown_none = snapshot.page is not None and not runs.present.process_names
    if has_shown_none and not _may_show_processes_later(snapshot):
        return False
    return runs.are_processes_visible


def _may_show_processes_later(snapshot: Snapshot) -> bool:
    """Return whether /proc was only late, or whether several servers may be the engine."""
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
    """Return whether GPU memory shows that processes of the engine exist.

    A small amount of held memory does not prove an exit in two cases:

    - The engine was asleep.
    - One of its GPUs cannot be read.
    """
    gpus = snapshot.owned_gpus
    run = runs.present
    total_bytes = 0
    for gpu in gpus:
        if gpu.held_bytes is not None and gpu.reading.memory is not None:
            total_bytes += gpu.reading.memory.total_bytes
    # It is unknown which process holds the GPU memory. An amount that a CUDA context or leftover
    # weights might take proves nothing.
    empty_bytes = max(OCCUPIED_RATIO * total_bytes, LOADED_RATIO * run.most_held_bytes)
    if sum(held_bytes.values()) > empty_bytes:
        return Presence.THERE
    # The engine's memory may be on exactly the GPU that could not be read.
    are_all_gpus_read = 0 < len(held_bytes) == len(gpus)
    if are_all_gpus_read and not run.was_asleep:
        return Presence.GONE
    # A run that is still loading also held memory. The page of that run has not been served yet.
    is_loading = run is runs.newest and not run.is_ready
    if not are_all_gpus_read and (run.most_held_bytes > 0 or is_loading):
        return Presence.OUT_OF_SIGHT
    return Presence.NEVER_SHOWN


def update_runs(
    runs: EngineRuns, evidence: Evidence, *, was_answering: bool
) -> tuple[EngineRuns, EngineRun | None]:
    """Return the runs after one more sample, and the run that has exited.

    The exited run is returned as it was before the sample. The exited run is None if no run exited.
    `was_answering` is whether the page was served at the previous sample. If the clock was set
    back, exits that now lie in the future are dropped.
    """
    now = evidence.snapshot.time_seconds
    run = runs.newest
    if run is not None and _was_mistaken(run, evidence):
        run = None  # The run is forgotten, and no exit is counted.
    ends_seconds = tuple(
        seconds for seconds in runs.ends_seconds if 0 <= now - seconds < CRASH_LOOP_SECONDS
    )
    exited_run = None
    if run is not None and _has_exited(run, evidence, was_answering=was_answering):
        exited_run = run
        run = replace(run, has_ended=True)
        ends_seconds = (*ends_seconds, now)[-MOST_ENDS:]
    runs = replace(
        runs, ends_seconds=ends_seconds, are_processes_visible=evidence.are_processes_visible
    )
    if run is not None and not run.has_ended:
        return replace(runs, newest=_update_run(run, evidence)), None
    # Another run has begun only if there is a page or a process.
    if evidence.answer is not PageAnswer.GIVEN and evidence.presence is not Presence.THERE:
        return replace(runs, newest=run), exited_run
    if run is not None:
        runs = replace(runs, restarts=runs.restarts + 1)
    # If a container outlives its engines, its count of kills is not reset. A systemd unit is an
    # example of a container that outlives its engines.
    new_run = EngineRun(oom_kills=evidence.host.oom_kills or 0)
    return replace(runs, newest=_update_run(new_run, evidence)), exited_run


def _was_mistaken(run: EngineRun, evidence: Evidence) -> bool:
    """Return whether the run belongs to another engine, which is still running."""
    if run.is_ready or run.has_ended:
        return False
    return _is_any_among(run.process_names, evidence.snapshot.neighbours)


def _has_exited(run: EngineRun, evidence: Evidence, *, was_answering: bool) -> bool:
    """Return whether a run has ended or been replaced, according to a sample."""
    if run.has_ended:
        return False
    if evidence.answer is not PageAnswer.GIVEN and evidence.presence is Presence.GONE:
        return True
    return _is_replaced(run, evidence, was_answering=was_answering)


def _is_replaced(run: EngineRun, evidence: Evidence, *, was_answering: bool) -> bool:
    """Return whether the start time, the processes or the request counter show another run.

    If both start times are known, they are compared. If a start time is unknown, the processes are
    compared. If the processes are unknown too, the request counters are compared. If several
    servers answer in turn, a lower counter may be from another server. A lower counter is therefore
    evidence only if it has more than halved, or if the page was not served before.
    """
    finished_total = evidence.finished_total
    if run.page_run_id is not None and evidence.page_run_id is not None:
        return is_new_run(run.page_run_id, evidence.page_run_id, run.finished_total, finished_total)
    if run.process_names and evidence.process_names:
        return not _is_any_among(run.process_names, evidence.process_names)
    if run.finished_total is None or finished_total is None:
        return False
    restart_share = RESTART_SHARE if was_answering else 1.0
    return finished_total < run.finished_total * restart_share


def _is_any_among(names: Collection[ProcessName], processes: Collection[ProcessName]) -> bool:
    """Return whether any process has the same pid as an entry in `names`.

    The start times must also be nearly equal. A trace has no pids, so all its processes have the
    same pid here.
    """
    return any(
        pid == other_pid and abs(started_seconds - other_started_seconds) <= SAME_START_SECONDS
        for (pid, started_seconds), (other_pid, other_started_seconds) in product(names, processes)
    )


def _update_run(run: EngineRun, evidence: Evidence) -> EngineRun:
    """Return the run, updated with the newest sample."""
    counts = Counter(process.role for process in evidence.processes or ())
    # A lost process is considered lost until /proc shows it again.
    lost_roles = run.lost_roles
    if evidence.processes:
        lost_roles = tuple(
            role for role, most in run.necessary_counts.items() if counts[role] < most
        )
    began_seconds = run.began_seconds
    if began_seconds is None:
        began_seconds = evidence.started_at_seconds
    run = replace(
        run,
        began_seconds=began_seconds,
        process_names=evidence.process_names or run.process_names,
        lost_roles=lost_roles,
    )
    if evidence.page is None:
        return run
    finished_total = evidence.finished_total
    if finished_total is None:
        finished_total = run.finished_total
    first_host_room_bytes = run.first_host_room_bytes
    if first_host_room_bytes is None:
        first_host_room_bytes = evidence.host.room_bytes
    # A kill may be the reason for an exit that is observed several samples later. Once a process is
    # lost, the count from before the loss is therefore kept.
    oom_kills = evidence.host.oom_kills
    if oom_kills is None or lost_roles:
        oom_kills = run.oom_kills
    return replace(
        run,
        # The id from the first page is kept, because several servers may answer in turn.
        page_run_id=run.page_run_id or evidence.page_run_id,
        finished_total=finished_total,
        is_ready=True,
        has_worked=run.has_worked or has_worked(evidence.page),
        # The necessary number of processes is the highest number that has ever been running.
        necessary_counts={
            role: max(counts[role], run.necessary_counts.get(role, 0)) for role in NECESSARY_ROLES
        },
        most_held_bytes=max(run.most_held_bytes, sum(evidence.held_bytes.values())),
        # The first room is measured only once, when the run's first page is read.
        first_room_bytes=run.first_room_bytes or _find_room_bytes(evidence.snapshot),
        first_host_room_bytes=first_host_room_bytes,
        was_asleep=is_page_awake(evidence.page) is False,
        oom_kills=oom_kills,
    )


def _find_room_bytes(snapshot: Snapshot) -> dict[str, int]:
    """Return the last minute's least free memory on the engine's GPUs, by UUID."""
    rooms = {}
    for gpu in snapshot.owned_gpus:
        memory = gpu.reading.memory
        if memory is not None:
            # The engine will reach its peak again. More memory may be free in this sample than at
            # the peak.
            peak_bytes = gpu.reading.used_peak_bytes or 0
            rooms[gpu.reading.uuid] = min(memory.left_bytes, memory.usable_bytes - peak_bytes)
    return rooms


def is_error_answer(failure: Failure) -> bool:
    """Return whether the failure is an error from a running server."""
    return _read_failure(failure) is PageAnswer.ERROR


def is_starved(processes: tuple[EngineProcess, ...] | Failure) -> bool:
    """Return whether the engine's machine is known to be short of CPU."""
    if isinstance(processes, Failure):
        return False
    return any((process.cpu_pressure_ratio or 0.0) >= STARVED_RATIO for process in processes)


class Symptom(Enum):
    """What a sample shows about the engine."""

    PAGE_ANSWERS = auto()
    OTHER_PAGE = auto()
    """A page is served but shows no engine."""
    PROCESS_LOST = auto()
    """The page is served, but a core or worker of this run has exited."""
    ASLEEP = auto()
    NO_PROGRESS = auto()
    """The page is served and shows work, but no progress."""
    HANG_SIGN = auto()
    """The page is served and shows no work. One sign of a hang has been present for long enough."""
    HANG_SIGNS = auto()
    """The page is served and shows no work. Several signs of a hang have been present for long
    enough.
    """
    NO_PROCESSES = auto()
    """There is no page, and there are no processes. The row also matches if a closed port is all
    that is known.
    """
    NO_RUN = auto()
    """There is no page. Processes exist, but nothing shows that they are part of a run of this
    engine.
    """
    NEVER_READY = auto()
    """There is no page. There are processes of a run whose page has never been served."""
    AWAY_BRIEFLY = auto()
    """There is no page. The page or the source of the processes has been missing. The time is still
    less than STALLED_SECONDS.
    """
    PROCESSES_OUT_OF_SIGHT = auto()
    """There is no page, and the source that used to show the processes has failed."""
    PAGE_UNREADABLE = auto()
    """The page used to be served. The answer is now a login page or another server's."""
    STALE_GAUGES = auto()
    """The page is served and shows work without progress. All other evidence shows that there is no
    work.
    """
    GAUGES_DOUBTED = auto()
    """The page is served and shows work without progress. The evidence that is visible shows no
    work, but some evidence is not visible.
    """
    SERVER_ANSWERS = auto()
    """There is no page, but the server answers other requests, so it is running."""
    SERVER_COMPUTES = auto()
    """The page used to be served but is missing now. Its server uses CPU time."""
    PAGE_AWAY = auto()
    """The page used to be served but is missing now. Its server either uses no CPU time or is
    spinning.
    """


class Transition(NamedTuple):
    """A row of the table: a state, a symptom, the next state, and the reason."""

    state: EngineState | None
    """The state before the sample, or None for any state."""
    symptom: Symptom
    next_state: EngineState | None
    """The state after the sample, or None if the state does not change."""
    why: str


TRANSITIONS: Final = (
    Transition(None, Symptom.PAGE_ANSWERS, EngineState.SERVING, "nothing is wrong"),
    Transition(
        None,
        Symptom.OTHER_PAGE,
        EngineState.UNKNOWN,
        "a page without any engine may be another server's",
    ),
    Transition(
        None,
        Symptom.PROCESS_LOST,
        EngineState.STALLED,
        "without one of its cores or workers a server serves nobody",
    ),
    Transition(None, Symptom.ASLEEP, EngineState.ASLEEP, "a sleeping engine need not progress"),
    Transition(
        None, Symptom.NO_PROGRESS, EngineState.STALLED, "requests wait, and no work is done"
    ),
    Transition(
        None,
        Symptom.STALE_GAUGES,
        EngineState.SERVING,
        "an engine whose gauges stayed when its requests were aborted is idle",
    ),
    Transition(
        None,
        Symptom.GAUGES_DOUBTED,
        EngineState.UNKNOWN,
        "the gauges may be stale, and the engine may hang",
    ),
    Transition(
        EngineState.STALLED,
        Symptom.HANG_SIGN,
        EngineState.STALLED,
        "a stall lasts while one of its signs does",
    ),
    Transition(
        None, Symptom.HANG_SIGN, EngineState.UNKNOWN, "one sign alone has other explanations"
    ),
    Transition(
        None, Symptom.HANG_SIGNS, EngineState.STALLED, "two signs have no other explanation"
    ),
    Transition(
        None, Symptom.NO_PROCESSES, EngineState.DOWN, "no page, and nothing that may be alive"
    ),
    Transition(
        None,
        Symptom.NO_RUN,
        EngineState.UNKNOWN,
        "something is alive, and nothing shows that it is this engine",
    ),
    Transition(
        None, Symptom.NEVER_READY, EngineState.STARTING, "vLLM gives no page until it has loaded"
    ),
    Transition(
        None, Symptom.AWAY_BRIEFLY, None, "a busy server may be late, and a source may fail once"
    ),
    Transition(
        None,
        Symptom.PROCESSES_OUT_OF_SIGHT,
        EngineState.UNKNOWN,
        "a source that fails is no evidence",
    ),
    Transition(
        None, Symptom.PAGE_UNREADABLE, EngineState.UNKNOWN, "the answer is not the engine's"
    ),
    Transition(
        None,
        Symptom.SERVER_ANSWERS,
        EngineState.UNKNOWN,
        "an answer proves that the server runs, and says nothing of the engine",
    ),
    Transition(
        None,
        Symptom.SERVER_COMPUTES,
        EngineState.UNKNOWN,
        "its server is late for every page, or finishes the last requests",
    ),
    Transition(None, Symptom.PAGE_AWAY, EngineState.STALLED, "its processes run and serve nobody"),
)
"""The first matching row decides. Every symptom has one row that matches any state."""


class Requests(Enum):
    """What the connections and `/load` reveal about requests."""

    WAITING = auto()
    """Some requests have been waiting for a while, or `/load` counts requests in the server."""
    NONE = auto()
    """The connections are visible, and no request is waiting."""
    UNKNOWN = auto()


class StandstillRow(NamedTuple):
    """A row of the table that interprets a page with work but without progress.

    A field that is None matches any evidence.
    """

    symptom: Symptom
    why: str
    has_hang_sign: bool | None = None
    """Whether there is a sign of a hang, or an unanswered canary request."""
    requests: Requests | None = None
    activity: Activity | None = None
    servers: tuple[ServerAnswer | None, ...] | None = None
    """The server's answers that the row matches. If None is one of these answers, an unasked server
    also matches.
    """


STANDSTILL: Final = (
    StandstillRow(Symptom.NO_PROGRESS, "a sign of a hang agrees with the page", has_hang_sign=True),
    StandstillRow(Symptom.NO_PROGRESS, "clients wait for answers", requests=Requests.WAITING),
    StandstillRow(
        Symptom.NO_PROGRESS,
        "something computes, and no work gets done: NCCL spins like this",
        activity=Activity.BUSY,
    ),
    StandstillRow(
        Symptom.NO_PROGRESS,
        "its server is not well either",
        servers=(ServerAnswer.UNHEALTHY, ServerAnswer.SILENT),
    ),
    StandstillRow(
        Symptom.NO_PROGRESS,
        "nothing visible contradicts the page",
        activity=Activity.UNKNOWN,
    ),
    StandstillRow(
        Symptom.NO_PROGRESS,
        "an older version's trace shows nothing but the page",
        servers=(None,),
    ),
    StandstillRow(
        Symptom.STALE_GAUGES,
        "nothing supports the gauges: they stayed when all requests were aborted",
        requests=Requests.NONE,
        activity=Activity.IDLE,
        servers=(ServerAnswer.HEALTHY,),
    ),
    StandstillRow(
        Symptom.GAUGES_DOUBTED,
        "nothing visible supports the gauges, and not everything is visible",
    ),
)
"""The first matching row decides."""


class AbsenceRow(NamedTuple):
    """What a missing page means while processes may be running.

    A field that is None matches any evidence.
    """

    symptom: Symptom
    why: str
    was_ready: bool | None = None
    """Whether the page has ever been served in this run."""
    answer: PageAnswer | None = None
    servers: tuple[ServerAnswer | None, ...] | None = None
    """The server's answers that the row matches, as in StandstillRow."""
    is_computing: bool | None = None
    """Whether the API server uses CPU time but is not spinning. If the server answers with an
    error, a busy core, worker or GPU is sufficient.
    """


ABSENCE: Final = (
    AbsenceRow(
        Symptom.PAGE_UNREADABLE,
        "the answer is not the engine's",
        was_ready=True,
        answer=PageAnswer.UNREADABLE,
    ),
    AbsenceRow(
        Symptom.NO_RUN,
        "the answer is not the engine's",
        was_ready=False,
        answer=PageAnswer.UNREADABLE,
    ),
    AbsenceRow(
        Symptom.SERVER_ANSWERS,
        "the server runs, and only its metrics page fails",
        servers=(ServerAnswer.HEALTHY,),
    ),
    AbsenceRow(
        Symptom.PAGE_AWAY,
        "the health check reports an error too, and nothing computes",
        was_ready=True,
        answer=PageAnswer.ERROR,
        servers=(ServerAnswer.UNHEALTHY,),
        is_computing=False,
    ),
    AbsenceRow(
        Symptom.SERVER_ANSWERS,
        "an error is an answer, and vLLM gives none before it has loaded",
        answer=PageAnswer.ERROR,
    ),
    AbsenceRow(Symptom.NEVER_READY, "vLLM gives no page until it has loaded", was_ready=False),
    AbsenceRow(
        Symptom.SERVER_ANSWERS,
        "something answers in its place",
        answer=PageAnswer.SILENT,
        servers=(ServerAnswer.UNCLEAR,),
    ),
    AbsenceRow(
        Symptom.SERVER_COMPUTES,
        "the server is late for every page, or finishes the last requests",
        is_computing=True,
    ),
    AbsenceRow(Symptom.PAGE_AWAY, "the server does not answer, and does nothing or spins"),
)
"""The first matching row decides."""


class Absence(Struct, frozen=True, kw_only=True):
    """When the page or the processes went missing, on the monotonic clock.

    A time is None if nothing is missing.
    """

    page_since_seconds: float | None = None
    """When the page first failed. If no sample was taken, the page is not considered missing."""
    presence_since_seconds: float | None = None
    """When it became unknown whether processes exist."""


def update_absence(previous: Absence, evidence: Evidence) -> Absence:
    """Return when the page or the processes went missing, including this sample."""
    now = evidence.snapshot.monotonic_seconds
    page_since_seconds = None
    if evidence.answer is not PageAnswer.GIVEN:
        page_since_seconds = previous.page_since_seconds
        if page_since_seconds is None:
            page_since_seconds = now
    presence_since_seconds = None
    if evidence.presence is Presence.OUT_OF_SIGHT:
        presence_since_seconds = previous.presence_since_seconds
        if presence_since_seconds is None:
            presence_since_seconds = now
    return Absence(
        page_since_seconds=page_since_seconds, presence_since_seconds=presence_since_seconds
    )


class StateUpdate(Struct, frozen=True, kw_only=True):
    """What one sample shows about the engine.

    All fields except the evidence also depend on earlier samples.
    """

    evidence: Evidence
    exited_run: EngineRun | None
    """The run that exited according to the sample, or None. The exited run is in its state before
    the sample.
    """
    runs: EngineRuns
    """The runs after the sample. The exit is not counted yet. This module does not know the reason
    for the exit.
    """
    progress: Progress
    absence: Absence
    symptom: Symptom
    state: EngineState


def update_state(
    snapshot: Snapshot,
    runs: EngineRuns,
    state: EngineState,
    progress: Progress,
    absence: Absence,
    *,
    was_answering: bool,
) -> StateUpdate:
    """Return what a snapshot shows.

    All arguments apart from `snapshot` are from the previous sample. `was_answering` is whether the
    page was served at that sample.
    """
    evidence = read_evidence(snapshot, runs)
    updated_runs, exited_run = update_runs(runs, evidence, was_answering=was_answering)
    # Values of the previous run must not be compared with those of this run.
    if updated_runs.restarts != runs.restarts:
        progress = Progress(cpu_use=progress.cpu_use)
    progress = update_progress(progress, snapshot, evidence.processes)
    absence = update_absence(absence, evidence)
    symptom = read_symptom(evidence, updated_runs, progress, absence)
    return StateUpdate(
        evidence=evidence,
        exited_run=exited_run,
        runs=updated_runs,
        progress=progress,
        absence=absence,
        symptom=symptom,
        state=find_next_state(state, symptom),
    )


def find_next_state(state: EngineState, symptom: Symptom) -> EngineState:
    """Return the state after a sample, according to the table.

    Raises AssertionError if no row matches. A test ensures that the table has a row for every case.
    """
    for row in TRANSITIONS:
        if row.symptom is symptom and row.state in {None, state}:
            return row.next_state or state
    raise AssertionError(f"the table has no row for {symptom}")


def read_symptom(
    evidence: Evidence, runs: EngineRuns, progress: Progress, absence: Absence
) -> Symptom:
    """Return what a sample shows about the engine.

    `runs`, `progress` and `absence` already include the sample.
    """
    # The page is the best evidence. Everything below handles an engine without a page.
    if evidence.page is not None:
        return _read_page(evidence.page, evidence, runs.present, progress)
    run = runs.newest
    if evidence.presence is Presence.GONE or _is_closed_port_all(evidence, run):
        return Symptom.NO_PROCESSES
    if evidence.presence is Presence.OUT_OF_SIGHT:
        if _measure_absence(absence.presence_since_seconds, evidence) < STALLED_SECONDS:
            return Symptom.AWAY_BRIEFLY
        return Symptom.PROCESSES_OUT_OF_SIGHT
    # From here on, there are processes but no page.
    if run is None or run.has_ended:
        return Symptom.NO_RUN
    away_seconds = _measure_absence(absence.page_since_seconds, evidence)
    if run.is_ready and away_seconds < STALLED_SECONDS:
        return Symptom.AWAY_BRIEFLY
    is_computing = _is_computing(evidence, away_seconds, progress)
    return find_absence_symptom(evidence, was_ready=run.is_ready, is_computing=is_computing)


def _measure_absence(since_seconds: float | None, evidence: Evidence) -> float:
    """Return for how many seconds something has been missing, or 0 while it is present."""
    if since_seconds is None:
        return 0.0
    return evidence.snapshot.monotonic_seconds - since_seconds


def _is_closed_port_all(evidence: Evidence, run: EngineRun | None) -> bool:
    """Return whether nothing but a refused page is known about the engine.

    If the processes are invisible, a run may continue even without a page. If the run has ended,
    nothing shows that another one has begun.
    """
    if evidence.answer is not PageAnswer.REFUSED:
        return False
    if evidence.presence is Presence.OUT_OF_SIGHT:
        return run is not None and run.has_ended
    return evidence.presence is Presence.NEVER_SHOWN


def _read_page(page: EnginePage, evidence: Evidence, run: EngineRun, progress: Progress) -> Symptom:
    """Return what a served page shows, together with the processes behind it."""
    if not page.engines:
        # If one page of a run shows an engine, so do all later pages.
        has_shown_engine = run.page_run_id is not None or run.finished_total is not None
        if has_shown_engine or not evidence.processes:
            return Symptom.OTHER_PAGE
    # A single dead rank is enough for a stall. The page is still served in this case, and shows the
    # old load.
    if run.lost_roles:
        return Symptom.PROCESS_LOST
    if is_page_awake(page) is False:
        return Symptom.ASLEEP
    if progress.age_seconds is None:
        return _read_hang_signs(progress.hang_signs)
    # A hung process also stops writing its probe file. While the probe is silent, a stall is
    # therefore proven after a shorter time.
    longest_seconds = SIGN_SECONDS if evidence.snapshot.has_silent_core else STALLED_SECONDS
    if progress.age_seconds < longest_seconds:
        return Symptom.PAGE_ANSWERS
    return find_standstill_symptom(evidence, progress)


def _read_hang_signs(signs: tuple[HangSign, ...]) -> Symptom:
    """Return what the signs of a hang mean while the page shows no work."""
    if not signs:
        return Symptom.PAGE_ANSWERS
    return Symptom.HANG_SIGN if len(signs) == 1 else Symptom.HANG_SIGNS


def find_standstill_symptom(evidence: Evidence, progress: Progress) -> Symptom:
    """Return what it means if the page shows work without progress, according to the table."""
    has_hang_sign = bool(progress.hang_signs) or _is_canary_unanswered(evidence)
    requests = _find_requests(evidence, progress)
    activity = progress.activity.judge()
    server = _find_server_answer(evidence)
    # The first matching row decides. A None in a row matches any value.
    for row in STANDSTILL:
        if (
            row.has_hang_sign in {None, has_hang_sign}
            and row.requests in {None, requests}
            and row.activity in {None, activity}
            and (row.servers is None or server in row.servers)
        ):
            return row.symptom
    raise AssertionError("the last row fits any evidence")


def find_absence_symptom(evidence: Evidence, *, was_ready: bool, is_computing: bool) -> Symptom:
    """Return what a missing page means, according to the table."""
    server = _find_server_answer(evidence)
    # The first matching row decides. A None in a row matches any value.
    for row in ABSENCE:
        if (
            row.was_ready in {None, was_ready}
            and row.answer in {None, evidence.answer}
            and row.is_computing in {None, is_computing}
            and (row.servers is None or server in row.servers)
        ):
            return row.symptom
    raise AssertionError("the last rows fit any evidence")


def _find_server_answer(evidence: Evidence) -> ServerAnswer | None:
    """Return the server's answer, or None if no request was sent to the server."""
    server = evidence.snapshot.server
    return None if server is None else server.answer


def _is_canary_unanswered(evidence: Evidence) -> bool:
    """Return whether a canary request has waited long enough to show a stall."""
    since_seconds = evidence.snapshot.unanswered_since_seconds
    if since_seconds is None:
        return False
    return evidence.snapshot.monotonic_seconds - since_seconds >= STALLED_SECONDS


def _find_requests(evidence: Evidence, progress: Progress) -> Requests:
    """Return whether requests are waiting, according to the server's count and connections."""
    server = evidence.snapshot.server
    if server is not None and server.requests:
        return Requests.WAITING
    since_seconds = progress.waits_since_seconds
    if since_seconds is not None:
        waited_seconds = evidence.snapshot.monotonic_seconds - since_seconds
        # A request that has only just arrived may be answered at any moment.
        return Requests.WAITING if waited_seconds >= SIGN_SECONDS else Requests.UNKNOWN
    return Requests.UNKNOWN if sum_waiting_requests(evidence.processes) is None else Requests.NONE


def _is_computing(evidence: Evidence, away_seconds: float, progress: Progress) -> bool:
    """Return whether the API server uses CPU time and may still respond.

    If the server answers with an error, the activity of the core, the workers and the GPUs is also
    considered. If the server is silent, this activity proves nothing. Hung processes may spin, as
    in NCCL.
    """
    if evidence.answer is PageAnswer.ERROR and progress.activity.judge() is Activity.BUSY:
        return True
    now = evidence.snapshot.monotonic_seconds
    cpu_use = progress.cpu_use
    if cpu_use is None or now - cpu_use.monotonic_seconds >= STALLED_SECONDS:
        return False
    # A server that is short of CPU may deliver every page late. A server that has closed its port
    # may be finishing its last requests. If neither is the case, a server that does not answer is
    # spinning.
    is_spinning = (
        evidence.answer is PageAnswer.SILENT
        and away_seconds >= SPINNING_SECONDS
        and not is_starved(evidence.snapshot.processes)
    )
    return not is_spinning
