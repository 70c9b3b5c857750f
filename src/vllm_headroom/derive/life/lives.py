"""What does the engine do now, and is what is seen of it fit to be judged?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import product
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.life.signs import (
    Answer,
    Labels,
    Movement,
    Signs,
    moved,
    progress_age,
    signs,
    stranded,
    worked,
)
from vllm_headroom.derive.readings import RESTART_SHARE, awake, begun_anew, remembered, together
from vllm_headroom.model import SAME_START_SECONDS, EngineProcess, Life, ProcessName, Snapshot
from vllm_headroom.vocabulary import EngineState, ExitReason, Role

LOOP_SECONDS: Final = 90 * 60.0
"""How far back ends are told, as the alert HeadroomEngineCrashLoop looks."""

MOST_ENDS: Final = 64

TIGHT_BYTES: Final = 256 * 2**20
SHRUNK_RATIO: Final = 0.5
"""A GPU ran out of memory when the least that was free in the last minute is below both: this much, and this share of
what was free when the engine had just become ready. An engine that was made to leave little is not called so."""

VITAL: Final = (Role.ENGINE_CORE, Role.WORKER)
"""Processes without which a server serves nobody, though its page may answer for half a minute, or for ever."""


class OneLife(Struct, frozen=True, kw_only=True):
    """A life of the engine: by what it is known again, and what it has come to.

    `ready` is whether its page ever answered, `worked` whether it ever did something, None where the page does not
    tell. `vital` is the most processes of each vital role seen while the page answered, `top_bytes` the most it held
    then; `rooms` is what was free on its GPUs, by UUID, and `host_room_bytes` of the host's memory when it became
    ready, `tight` whether a GPU was full when last seen. `oom_kills` is what the kernel had killed in its container
    when it was last whole.
    """

    began_seconds: float | None = None
    page_life: str | None = None
    finished_total: float | None = None
    processes: tuple[ProcessName, ...] = ()
    ready: bool = False
    worked: bool | None = False
    ended: bool = False
    vital: dict[Role, int] = field(default_factory=dict)
    top_bytes: int = 0
    rooms: dict[str, int] = field(default_factory=dict)
    host_room_bytes: int | None = None
    tight: bool = False
    oom_kills: int = 0


class Lives(Struct, frozen=True, kw_only=True):
    """What outlives a life, and the daemon: the newest life, how many came and went, and when the last ones ended."""

    newest: OneLife | None = None
    restarts: int = 0
    exits: dict[ExitReason, int] = field(default_factory=dict)
    ends_seconds: tuple[float, ...] = ()
    sighted: bool | None = None

    @property
    def present(self) -> OneLife:
        """The life that goes on; one of which nothing is known where none does."""
        return OneLife() if self.newest is None or self.newest.ended else self.newest


def advance(lives: Lives, seen: Signs, now: float, *, answered_before: bool) -> Lives:
    """Return the lives with one more look, at `now` seconds since the epoch.

    `answered_before` is whether the page was there at the last look. An end that is dated ahead is forgotten: the clock
    was set.
    """
    ends = tuple(seconds for seconds in lives.ends_seconds if 0 <= now - seconds < LOOP_SECONDS)
    life, restarts, exits = lives.newest, lives.restarts, lives.exits
    if life is not None and not life.ready and not life.ended and _is_among(life.processes, seen.snapshot.neighbours):
        life = None  # another engine was taken for this one: what lives on did not end
    if life is not None and not life.ended and _is_over(life, seen, answered_before=answered_before):
        reason = _cause(life, seen, answered_before=answered_before)
        life = replace(life, ended=True)
        exits = {**exits, reason: exits.get(reason, 0) + 1}
        ends = (*ends, now)[-MOST_ENDS:]
    if life is not None and not life.ended:
        life = _seen(life, seen)
    elif seen.answer is Answer.GIVEN or seen.alive:
        restarts += life is not None
        life = _seen(OneLife(), seen)
    return Lives(newest=life, restarts=restarts, exits=exits, ends_seconds=ends, sighted=seen.sighted)


def is_broken(life: OneLife, processes: tuple[EngineProcess, ...] | None) -> bool:
    """Return whether a process without which this life serves nobody has gone; not where none can be seen."""
    if not processes:
        return False
    now = Counter(process.role for process in processes)
    return any(now[role] < most for role, most in life.vital.items())


def _cause(life: OneLife, seen: Signs, *, answered_before: bool) -> ExitReason:
    """Return why a life ended, the kernel's own word first; what is not known is `gone`."""
    if seen.host.oom_kills is not None and seen.host.oom_kills > life.oom_kills:
        return ExitReason.OOM_KILLED
    if life.tight or _is_tight(life, seen) or _ran_out(life, seen):
        return ExitReason.OUT_OF_MEMORY
    return ExitReason.REPLACED if answered_before and not _is_gone(seen) else ExitReason.GONE


def _is_tight(life: OneLife, seen: Signs) -> bool:
    """Return whether a GPU has run full since the engine became ready."""
    first = life.rooms
    return any(
        uuid in first and room <= min(TIGHT_BYTES, SHRUNK_RATIO * first[uuid]) for uuid, room in seen.rooms.items()
    )


def _ran_out(life: OneLife, seen: Signs) -> bool:
    """Return whether the probe saw an OutOfMemoryError in this life that a process did not outlive."""
    if seen.oom_seconds is None:
        return False
    return life.began_seconds is None or seen.oom_seconds >= life.began_seconds


def _is_gone(seen: Signs) -> bool:
    return seen.answer is not Answer.GIVEN and seen.alive is False


def _is_over(life: OneLife, seen: Signs, *, answered_before: bool) -> bool:
    """Return whether it is gone, or this is another life: its start is another, all its processes are, or its count.

    A count alone is that of another of several servers which answer in turn, unless it has fallen far, or the page was
    away.
    """
    if _is_gone(seen):
        return True
    if life.page_life is not None and seen.page_life is not None:
        return begun_anew(life.page_life, seen.page_life, life.finished_total, seen.finished_total)
    if life.processes and seen.names:
        return not _is_among(life.processes, seen.names)
    if life.finished_total is None or seen.finished_total is None:
        return False
    return seen.finished_total < life.finished_total * (RESTART_SHARE if answered_before else 1.0)


def _is_among(known: Collection[ProcessName], processes: Collection[ProcessName]) -> bool:
    """Return whether any of the known ones is one of these processes, which have one pid where a trace tells none."""
    pairs = product(known, processes)
    return any(pid == now and abs(started - began) <= SAME_START_SECONDS for (pid, started), (now, began) in pairs)


def _seen(life: OneLife, seen: Signs) -> OneLife:
    """Return a life that goes on after one more look at it."""
    began = life.began_seconds if life.began_seconds is not None else seen.started_at_seconds
    processes = seen.names or life.processes
    if seen.page is None:
        is_tight = life.tight or _is_tight(life, seen)
        return replace(life, began_seconds=began, processes=processes, tight=is_tight)
    now, kills = Counter(process.role for process in seen.processes or ()), seen.host.oom_kills
    return OneLife(
        began_seconds=began,
        page_life=life.page_life or seen.page_life,
        finished_total=life.finished_total if seen.finished_total is None else seen.finished_total,
        processes=processes,
        ready=True,
        worked=life.worked or worked(seen.page),
        vital={role: max(now[role], life.vital.get(role, 0)) for role in VITAL},
        top_bytes=max(life.top_bytes, sum(seen.held.values())),
        rooms=life.rooms or seen.rooms,
        host_room_bytes=seen.host.room_bytes if life.host_room_bytes is None else life.host_room_bytes,
        tight=_is_tight(life, seen) if seen.rooms else life.tight,
        oom_kills=life.oom_kills if kills is None or is_broken(life, seen.processes) else kills,
    )


ENOUGH_SECONDS: Final = 1.0
"""CPU time by which a server shows that it runs. One that is stopped, or waits for what never comes, takes next to
none. One of many that want the same cores gets its share: ten seconds a minute of two cores at a load of 42."""


class Computing(Struct, frozen=True, kw_only=True):
    """The CPU time of all API servers together when they had last taken enough of it, and when that was."""

    cpu_seconds: float
    at_seconds: float


def computed(before: Computing | None, processes: tuple[EngineProcess, ...] | None, now: float) -> Computing | None:
    """Return when the API servers last took enough CPU time; None while that has never been seen.

    Only they speak for a page that is silent: the core and its workers spin while they wait for a GPU that never
    answers (NCCL does), but then the page answers, and says that nothing moves.
    """
    taken = together(each.cpu_seconds for each in processes or () if each.role is Role.API_SERVER)
    if taken is None:
        return before
    if before is None or taken >= before.cpu_seconds + ENOUGH_SECONDS:
        return Computing(cpu_seconds=taken, at_seconds=now)
    return replace(before, cpu_seconds=min(before.cpu_seconds, taken))  # less: one of several has ended


LIFE: Final = "engine_life"
"""The name of this state among those of the derivations, which rest on it."""

STALLED_SECONDS: Final = 60.0
"""How long nothing may move while there is work, and how long the page may be missing while its processes live.

A step takes less: a chunk of a prefill, 8192 tokens by default, seconds on the slowest cards. vLLM gives up a step of
its own after 300 s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)."""

_REASONS: Final = tuple(ExitReason)

LEFT_SECONDS: Final = 30.0
"""How long what an engine leaves is given to end by itself: a worker took up to 9 s after its core (vLLM 0.32)."""

SILENT_SECONDS: Final = 20.0
"""How long nothing may move while the probe in the core has fallen silent too: a process that hangs writes nothing."""


class LifeState(Struct, frozen=True, kw_only=True):
    """The lives so far, and what is remembered of this one by the clock of this process.

    `silent_seconds` is when the page was first asked for in vain since it last answered, None while it answers: a look
    that was not taken is no silence. `served_bytes` is the most that the engine held of each GPU, by UUID, while it
    served, since it began or last woke. `left` is since when each pid has been left behind.
    """

    lives: Lives = field(default_factory=Lives)
    movements: dict[Labels, Movement] = field(default_factory=dict)
    silent_seconds: float | None = None
    answered: bool = False
    computing: Computing | None = None
    state: EngineState = EngineState.UNKNOWN
    served_bytes: dict[str, int] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)


def forgotten(state: LifeState) -> LifeState:
    """Return the state without what may have made a look at it fail: what was counted so far stays."""
    return LifeState(lives=replace(state.lives, newest=None))


def lived(state: LifeState, snapshot: Snapshot) -> tuple[LifeState, Snapshot]:
    """Return the state after one more snapshot, and the snapshot with what is known of the engine's life.

    Of what it left behind, what goes by itself within seconds is taken out: nobody need end that.
    Which state follows from what the page and the processes show is in the table of DESIGN.md, 38.

    A server that computes and gives no page is starved of CPU, finishes its last requests behind a closed port, or
    spins. These cannot be told apart from here, so that none of them is said.
    """
    now, asleep = snapshot.monotonic_seconds, state.state is EngineState.ASLEEP
    seen = signs(snapshot, sighted=state.lives.sighted, top_bytes=state.lives.present.top_bytes, asleep=asleep)
    lives = advance(state.lives, seen, snapshot.time_seconds, answered_before=state.answered)
    ended = next((reason for reason, n in lives.exits.items() if n > state.lives.exits.get(reason, 0)), None)
    looked = _looked(state, lives, seen, now)
    age = None if seen.page is None else progress_age(looked.movements, now, snapshot.unanswered_since_seconds)
    doing, served = _state(looked, seen, age, now), looked.served_bytes
    if doing is EngineState.SERVING:
        before = {} if asleep else served
        most = {uuid: max(n_bytes, before.get(uuid, 0)) for uuid, n_bytes in seen.held.items()}
        served = remembered(before | most, most)
    left = {pid: state.left.get(pid, now) for pid in snapshot.left_behind}
    state = replace(looked, state=doing, served_bytes=served, left=left)
    stays = frozenset(pid for pid, since in left.items() if now - since >= LEFT_SECONDS)
    return state, replace(snapshot, life=_life(state, seen, age, now, ended), left_behind=stays)


def _looked(state: LifeState, lives: Lives, seen: Signs, now: float) -> LifeState:
    """Return the state after one more look, but for what the engine does now."""
    goes_on = lives.restarts == state.lives.restarts
    movements = state.movements if goes_on else {}
    answered = seen.answer is Answer.GIVEN
    return LifeState(
        lives=lives,
        movements=movements if seen.page is None else moved(movements, seen.page, now),
        silent_seconds=None if answered else now if state.silent_seconds is None else state.silent_seconds,
        answered=answered,
        computing=computed(state.computing, seen.processes, now),
        state=state.state,
        served_bytes=state.served_bytes if goes_on else {},
    )


def _state(state: LifeState, seen: Signs, age: float | None, now: float) -> EngineState:
    """Return what the engine does, by a state that says what it did before."""
    life = state.lives.newest
    if seen.page is not None:
        return _answering(state, seen, age)
    may_be_there = life is None and seen.snapshot.ambiguous
    if seen.alive is False or (seen.alive is None and seen.answer is Answer.REFUSED and not may_be_there):
        return EngineState.DOWN
    if life is None or life.ended or (seen.answer is Answer.UNREADABLE and not life.ready):
        return EngineState.UNKNOWN
    if not life.ready:
        return EngineState.STARTING
    if state.silent_seconds is not None and now - state.silent_seconds < STALLED_SECONDS:
        return state.state
    computes = state.computing is not None and now - state.computing.at_seconds < STALLED_SECONDS
    return EngineState.UNKNOWN if computes or seen.answer is Answer.UNREADABLE else EngineState.STALLED


def _answering(state: LifeState, seen: Signs, age: float | None) -> EngineState:
    life = state.lives.present
    has_told = life.page_life is not None or life.finished_total is not None  # of itself: a page does not forget that
    if seen.page is None or not (seen.page.engines or (seen.processes and not has_told)):
        return EngineState.UNKNOWN
    if is_broken(life, seen.processes):
        return EngineState.STALLED
    if awake(seen.page) is False:
        return EngineState.ASLEEP
    most = SILENT_SECONDS if seen.silent else STALLED_SECONDS
    return EngineState.STALLED if age is not None and age >= most else EngineState.SERVING


def _life(state: LifeState, seen: Signs, age: float | None, now: float, ended: ExitReason | None) -> Life:
    life = state.lives.present
    is_lost = state.state is EngineState.DOWN or is_broken(life, seen.processes)
    return Life(
        state=state.state,
        in_service=False if is_lost else life.worked,
        began_seconds=life.began_seconds,
        restarts=state.lives.restarts,
        exits=tuple([(reason, state.lives.exits.get(reason, 0)) for reason in _REASONS]),
        ended=ended,
        recent_ends=len(state.lives.ends_seconds),
        progress_age_seconds=None if state.state is EngineState.ASLEEP else age,
        stranded=() if seen.page is None else stranded(state.movements, now),
        first_rooms=tuple(life.rooms.items()),
        first_host_room_bytes=life.host_room_bytes,
        to_wake=tuple(
            (uuid, max(0, state.served_bytes[uuid] - n_bytes))
            for uuid, n_bytes in seen.held.items()
            if state.state is EngineState.ASLEEP and uuid in state.served_bytes
        ),
    )
