"""The state of the engine and its runs, across restarts."""

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import product
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.life.case import Case, build_ending, describe_gpus, update_case
from vllm_headroom.derive.life.judge import find_reason, is_shutting_down
from vllm_headroom.derive.life.signs import (
    Answer,
    EngineRun,
    EngineRuns,
    Labels,
    Movement,
    Signs,
    collect_signs,
    find_progress_age,
    find_stranded,
    has_worked,
    is_starved,
    update_movements,
)
from vllm_headroom.derive.readings import (
    RESTART_SHARE,
    is_new_run,
    is_page_awake,
    limit_remembered,
    sum_known,
)
from vllm_headroom.model import (
    SAME_START_SECONDS,
    Ending,
    EngineProcess,
    EngineStatus,
    HangSign,
    ProcessName,
    Snapshot,
)
from vllm_headroom.vocabulary import EngineState, ExitReason, IncidentKind, Role

LOOP_SECONDS: Final = 90 * 60.0
"""How far back exits are counted, as in HeadroomEngineCrashLoop."""

MOST_ENDS: Final = 64

VITAL: Final = (Role.ENGINE_CORE, Role.WORKER)
"""A server without one of these processes serves nobody, though its page may answer for half a minute, or for ever."""


def advance(
    runs: EngineRuns, seen: Signs, case: Case, now: float
) -> tuple[EngineRuns, Ending | None]:
    """Return the runs after one more sample, at `now` seconds since the epoch, and the exit that it shows.

    An exit dated in the future is dropped: the clock was set.
    """
    ending = None
    ends = tuple(seconds for seconds in runs.ends_seconds if 0 <= now - seconds < LOOP_SECONDS)
    run, restarts, exits = runs.newest, runs.restarts, runs.exits
    if (
        run is not None
        and not run.ready
        and not run.ended
        and _is_among(run.processes, seen.snapshot.neighbours)
    ):
        run = None  # another engine was mistaken for this one, and still runs
    is_gone = seen.answer is not Answer.GIVEN and seen.alive is False
    if (
        run is not None
        and not run.ended
        and (is_gone or _is_over(run, seen, answered_before=case.answered))
    ):
        gpus = describe_gpus(case, run, seen.snapshot)
        reason = find_reason(run, seen, gpus, replaced=case.answered and not is_gone)
        ending = build_ending(
            case, run, seen.snapshot, IncidentKind.ENDED, reason=reason, gpus=gpus
        )
        if reason is ExitReason.GONE and is_shutting_down(ending):
            reason = ExitReason.STOPPED
            ending = replace(ending, reason=reason)
        run = replace(run, ended=True)
        exits = {**exits, reason: exits.get(reason, 0) + 1}
        ends = (*ends, now)[-MOST_ENDS:]
    if run is not None and not run.ended:
        run = _update_seen(run, seen)
    elif seen.answer is Answer.GIVEN or seen.alive:
        restarts += run is not None
        run = _update_seen(EngineRun(), seen)
    return EngineRuns(
        newest=run, restarts=restarts, exits=exits, ends_seconds=ends, sighted=seen.sighted
    ), ending


def _is_over(run: EngineRun, seen: Signs, *, answered_before: bool) -> bool:
    """Return whether another run answers: start, processes or counter are not this one's.

    A lower counter alone may come from another of several servers that answer in turn: it counts if it fell far, or if
    the page was unavailable before.
    """
    if run.page_run_id is not None and seen.page_run_id is not None:
        return is_new_run(
            run.page_run_id, seen.page_run_id, run.finished_total, seen.finished_total
        )
    if run.processes and seen.names:
        return not _is_among(run.processes, seen.names)
    if run.finished_total is None or seen.finished_total is None:
        return False
    return seen.finished_total < run.finished_total * (RESTART_SHARE if answered_before else 1.0)


def _is_among(known: Collection[ProcessName], processes: Collection[ProcessName]) -> bool:
    """Return whether any known process is among these; in a trace without pids all have the same one."""
    pairs = product(known, processes)
    return any(
        pid == now and abs(started - began) <= SAME_START_SECONDS
        for (pid, started), (now, began) in pairs
    )


def _update_seen(run: EngineRun, seen: Signs) -> EngineRun:
    now, kills = Counter(process.role for process in seen.processes or ()), seen.host.oom_kills
    lost = (
        tuple(role for role, most in run.vital.items() if now[role] < most)
        if seen.processes
        else run.lost
    )
    run = replace(
        run,
        began_seconds=run.began_seconds
        if run.began_seconds is not None
        else seen.started_at_seconds,
        processes=seen.names or run.processes,
        lost=lost,
    )
    if seen.page is None:
        return run
    return replace(
        run,
        page_run_id=run.page_run_id or seen.page_run_id,
        finished_total=run.finished_total if seen.finished_total is None else seen.finished_total,
        ready=True,
        worked=run.worked or has_worked(seen.page),
        vital={role: max(now[role], run.vital.get(role, 0)) for role in VITAL},
        top_bytes=max(run.top_bytes, sum(seen.held.values())),
        rooms=run.rooms or seen.rooms,
        host_room_bytes=seen.host.room_bytes
        if run.host_room_bytes is None
        else run.host_room_bytes,
        asleep=is_page_awake(seen.page) is False,
        oom_kills=run.oom_kills if kills is None or lost else kills,
    )


ENOUGH_SECONDS: Final = 1.0
"""CPU time that proves a server runs. One that is stopped, or waits for what never comes, uses almost none; one that
competes for cores still gets its share: ten seconds a minute of two cores at a load of 42."""


Computing = tuple[float, float]
"""The CPU time of all API servers when they last used enough of it, and the time of that, both in seconds."""


def update_computing(
    before: Computing | None, processes: tuple[EngineProcess, ...] | None, now: float
) -> Computing | None:
    """Return when the API servers last used enough CPU time; None while that has never been seen.

    Only they explain a silent page: the core and its workers spin while they wait for a hung GPU (NCCL does), but then
    the page answers and shows no progress.
    """
    taken = sum_known(each.cpu_seconds for each in processes or () if each.role is Role.API_SERVER)
    if taken is None:
        return before
    if before is None or taken >= before[0] + ENOUGH_SECONDS:
        return taken, now
    return min(before[0], taken), before[1]  # less: one of several has ended


Hint = tuple[HangSign, ProcessName | None]
Span = tuple[float, float]
"""The time in which a hint has shown without a break, on the monotonic clock."""


def update_hints(
    before: Mapping[Hint, Span], seen: Signs, movements: Mapping[Labels, Movement], now: float
) -> dict[Hint, Span]:
    """Return what suggests a hang although the page shows no work; what it was while /proc cannot be read.

    - The main thread of a core or worker is stopped (T, t: by a signal, a debugger) or blocked (D: in a driver).
    - The probe in the core is silent, and another process's writes.
    - A request has had no answer since the engine was last seen to work. An older one proves nothing: its client may
      never have sent the rest. A connection that is kept alive is no request.
    """
    if seen.processes is None:
        return dict(before)
    stuck = [
        each for each in seen.processes if each.role in VITAL and each.state in {"T", "t", "D"}
    ]
    hints: dict[Hint, float] = {
        (HangSign.STUCK, (each.pid, each.started_at_seconds)): now for each in stuck
    }
    hints |= {(HangSign.MUTE, None): now} if seen.silent else {}
    idle_seconds = min((now - each.done_seconds for each in movements.values()), default=0.0)
    for wait_seconds in (
        each.wait_seconds for each in seen.processes if each.wait_seconds is not None
    ):
        if idle_seconds >= max(STALLED_SECONDS, wait_seconds - STALLED_SECONDS):
            hints[HangSign.UNANSWERED, None] = now - wait_seconds
    return {hint: (before.get(hint, (began, now))[0], now) for hint, began in hints.items()}


ENGINE_RUN: Final = "engine_life"
"""The name of this state among those of the derivations, which depend on it."""

STALLED_SECONDS: Final = 60.0
"""Longest time without progress while there is work, and without a page while its processes are alive. A step takes
less: a chunk of a prefill, 8192 tokens by default, takes seconds on the slowest cards. vLLM itself aborts a step
after 300 s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)."""

LEFT_SECONDS: Final = 30.0
"""Time in which left-over processes may still exit: a worker took up to 9 s after its core (vLLM 0.32)."""

SILENT_SECONDS: Final = 20.0
"""Longest time without progress once the probe in the core is silent too: a process that hangs writes nothing. Also
how long a sign of a hang must show: five readings by default, two at least."""

SPINNING_SECONDS: Final = 180.0
"""Longest silence of a server that computes, unless CPU is short, or its port closed to finish the last requests."""


class RunState(Struct, frozen=True, kw_only=True):
    """The runs so far, and the state of the current one on the monotonic clock.

    `silent_seconds` is when the page first failed since it last answered, None while it answers: a sample that was not
    taken is no failure. `blind_seconds` is since when it is unknown whether its processes exist. `served_bytes` is the
    most memory held per GPU, by UUID, while serving, since the start or the last wake. `left` is since when each pid
    has been left over. `known` is the last state that was not unknown, `case` the file of the current run. `hints` are
    kept by `update_hints`.
    """

    runs: EngineRuns = field(default_factory=EngineRuns)
    movements: dict[Labels, Movement] = field(default_factory=dict)
    silent_seconds: float | None = None
    blind_seconds: float | None = None
    computing: Computing | None = None
    state: EngineState = EngineState.UNKNOWN
    served_bytes: dict[str, int] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)
    known: EngineState = EngineState.UNKNOWN
    case: Case = field(default_factory=Case)
    hints: dict[Hint, Span] = field(default_factory=dict)

    @property
    def hang_signs(self) -> tuple[HangSign, ...]:
        """The signs of a hang that have shown for long enough."""
        long = {
            sign
            for (sign, _), (since, until) in self.hints.items()
            if until - since >= SILENT_SECONDS
        }
        return tuple(sign for sign in HangSign if sign in long)


def forget_run(state: RunState) -> RunState:
    """Return the state without the current run, whose data may have made a sample fail; the counts stay."""
    return RunState(runs=replace(state.runs, newest=None))


def update_run(state: RunState, snapshot: Snapshot) -> tuple[RunState, Snapshot]:
    """Return the state after one more snapshot, and the snapshot with the engine's status.

    Left-over processes that exit within seconds are removed from it. DESIGN.md, 38 has the table of states.
    """
    before, now = state, snapshot.monotonic_seconds
    seen = collect_signs(snapshot, before.runs)
    runs, event = advance(before.runs, seen, before.case, snapshot.time_seconds)
    goes_on, answered = runs.restarts == before.runs.restarts, seen.answer is Answer.GIVEN
    movements = before.movements if goes_on else {}
    movements = movements if seen.page is None else update_movements(movements, seen.page, now)
    state = replace(
        before,
        runs=runs,
        movements=movements,
        hints=update_hints(before.hints if goes_on else {}, seen, movements, now),
        silent_seconds=None
        if answered
        else now
        if before.silent_seconds is None
        else before.silent_seconds,
        blind_seconds=None
        if not seen.blind
        else now
        if before.blind_seconds is None
        else before.blind_seconds,
        computing=update_computing(before.computing, seen.processes, now),
        served_bytes=before.served_bytes if goes_on else {},
        left={pid: before.left.get(pid, now) for pid in snapshot.left_behind},
    )
    age = (
        None
        if seen.page is None
        else find_progress_age(movements, now, snapshot.unanswered_since_seconds)
    )
    doing, served = _judge_state(state, seen, age, now), state.served_bytes
    if doing is EngineState.SERVING:
        least = {} if before.runs.present.asleep else served
        most = {uuid: max(n_bytes, least.get(uuid, 0)) for uuid, n_bytes in seen.held.items()}
        served = limit_remembered(least | most, most)
    is_stalled = doing is EngineState.STALLED
    if event is None and is_stalled and before.known is not doing:
        case, kind = before.case, IncidentKind.STALLED
        gpus = describe_gpus(case, runs.present, snapshot)
        event = build_ending(
            case, runs.present, snapshot, kind, reason=None, gpus=gpus, age_seconds=age
        )
    case = before.case if goes_on else Case(was_read=before.case.was_read)
    if runs.newest is None or runs.newest.ended:
        case = Case(was_read=case.was_read)
    else:
        case = update_case(case, snapshot, runs.newest, stalled=is_stalled)
    known = before.known if doing is EngineState.UNKNOWN else doing
    state = replace(state, state=doing, served_bytes=served, known=known, case=case)
    stays = frozenset(pid for pid, since in state.left.items() if now - since >= LEFT_SECONDS)
    return state, replace(
        snapshot, engine_status=_describe_run(state, seen, age, now, event), left_behind=stays
    )


def _judge_state(state: RunState, seen: Signs, age: float | None, now: float) -> EngineState:
    """Return the engine's state, given a state that holds the previous one.

    While it is unknown whether its processes exist, nothing ends: the state is held, and then unknown. An engine that
    ended stays down behind a closed port, since nothing shows that another began.
    """
    run = state.runs.newest
    if seen.page is not None:
        return _judge_answering(state, seen, age)
    may_be_alive = seen.answer is not Answer.REFUSED or (
        seen.blind and (run is None or not run.ended)
    )
    if seen.alive is False or (seen.alive is None and not may_be_alive):
        return EngineState.DOWN
    if not seen.blind:
        if run is None or run.ended or (seen.answer is Answer.UNREADABLE and not run.ready):
            return EngineState.UNKNOWN
        if not run.ready:
            return EngineState.STARTING
    since = state.blind_seconds if seen.blind else state.silent_seconds
    if since is not None and now - since < STALLED_SECONDS:
        return state.state
    computes = state.computing is not None and now - state.computing[1] < STALLED_SECONDS
    is_late = since is not None and now - since < SPINNING_SECONDS
    may_serve = computes and (
        is_late or is_starved(seen.snapshot.processes) or seen.answer is not Answer.SILENT
    )
    is_unknown = seen.blind or may_serve or seen.answer is Answer.UNREADABLE
    return EngineState.UNKNOWN if is_unknown else EngineState.STALLED


def _judge_answering(state: RunState, seen: Signs, age: float | None) -> EngineState:
    run = state.runs.present
    is_known = (
        run.page_run_id is not None or run.finished_total is not None
    )  # of itself: a page does not forget that
    if seen.page is None or not (seen.page.engines or (seen.processes and not is_known)):
        return EngineState.UNKNOWN
    if run.lost:
        return EngineState.STALLED
    if is_page_awake(seen.page) is False:
        return EngineState.ASLEEP
    if age is None and state.hang_signs:
        is_sure = len(state.hang_signs) > 1 or state.state is EngineState.STALLED
        return EngineState.STALLED if is_sure else EngineState.UNKNOWN
    most = SILENT_SECONDS if seen.silent else STALLED_SECONDS
    return EngineState.STALLED if age is not None and age >= most else EngineState.SERVING


def _describe_run(
    state: RunState, seen: Signs, age: float | None, now: float, event: Ending | None
) -> EngineStatus:
    run = state.runs.present
    is_lost = state.state is EngineState.DOWN or bool(run.lost)
    return EngineStatus(
        state=state.state,
        in_service=False if is_lost else run.worked,
        was_seen=state.runs.newest is not None,
        began_seconds=run.began_seconds,
        restarts=state.runs.restarts,
        exits=tuple([(reason, state.runs.exits.get(reason, 0)) for reason in ExitReason]),
        event=event,
        recent_ends=len(state.runs.ends_seconds),
        progress_age_seconds=None if state.state is EngineState.ASLEEP else age,
        stranded=() if seen.page is None else find_stranded(state.movements, now),
        first_rooms=tuple(run.rooms.items()),
        first_host_room_bytes=run.host_room_bytes,
        hang_signs=state.hang_signs if seen.page is not None and age is None else (),
        to_wake=tuple(
            (uuid, max(0, state.served_bytes[uuid] - n_bytes))
            for uuid, n_bytes in seen.held.items()
            if state.state is EngineState.ASLEEP and uuid in state.served_bytes
        ),
    )
