"""The lives of the engine: where one ends and another begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import product
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.life.movement import worked
from vllm_headroom.derive.life.signs import Answer, Signs
from vllm_headroom.derive.page_facts import RESTART_SHARE, begun_anew
from vllm_headroom.model import SAME_START_SECONDS, EngineProcess, ProcessName
from vllm_headroom.vocabulary import ExitReason, Role

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
