"""What does the engine do now, and is what is seen of it fit to be judged?"""

from __future__ import annotations

from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.life.lives import Lives, advance, is_broken
from vllm_headroom.derive.life.movement import Labels, Movement, moved, progress_age, stranded
from vllm_headroom.derive.life.signs import Answer, Signs, signs
from vllm_headroom.derive.page_facts import awake, together
from vllm_headroom.derive.readings import remembered
from vllm_headroom.model import EngineProcess, Life, Snapshot
from vllm_headroom.vocabulary import EngineState, ExitReason, Role

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
