"""Which of the engines in sight is the one that serves a port."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from math import inf
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.model import SAME_START_SECONDS
from vllm_headroom.scrape.proc.files import ProcEntry
from vllm_headroom.scrape.proc.servers import server_of, supervises
from vllm_headroom.vocabulary import Role

_INIT: Final = 1

RAY: Final = "ray::"
"""How the titles of Ray's actors begin."""

Name = tuple[int, float]
"""A process by its pid and its start, in seconds since boot: a pid alone is given to another one later."""

Told = tuple[int | None, bool]
"""The port that an engine's command line tells, and whether it can listen where the daemon asks."""


class Asked(Struct, frozen=True, kw_only=True):
    """The port that the engine's page is asked for at, and what came of it; all is possible while nobody has asked.

    `listens` is whether something may be listening there, `answers` whether an engine does; `began_seconds` is when,
    since boot, the server behind the page began, None where it does not say. `on_host` is whether processes of others
    than a pod's show.
    """

    port: int
    listens: bool = True
    answers: bool = False
    began_seconds: float | None = None
    on_host: bool = False


class Choice(Struct, frozen=True, kw_only=True):
    """The root processes of the engine; none where it is down, or where it could be any of `ambiguous` engines.

    `names` are those of its servers. `told` is what the engine told when last it was sure to be the one; None before it
    ever was. `others` are the roots of the engines that are not it, `strangers` those of them that were seen beside the
    one that a page named by its start, `since`. `ports` are those that it tells, or that all tell where none is it.
    """

    roots: tuple[int, ...] = ()
    ambiguous: int = 0
    told: Told | None = None
    names: frozenset[Name] = frozenset()
    others: frozenset[Name] = frozenset()
    strangers: frozenset[Name] = frozenset()
    since: float | None = None
    ports: frozenset[int] = frozenset()


Claim = tuple[float, bool, bool, bool]
_NEVER: Final = -inf
_NONE: Final[Claim] = (_NEVER, False, False, False)


def engine_roots(
    entries: Mapping[int, ProcEntry], told_by: Callable[[int], Told], asked: Asked, before: Choice
) -> Choice:
    """Return whose process trees are the engine's, after the last choice.

    A root is a process of an engine's with none above it but one that supervises ranks. Beside a server, an engine core
    without one is a leftover whose memory the engine does not hold: taking it for the engine's would hide the leak.
    Ray's actors descend from Ray, which leaves open whose they are: where there is one engine they are its, without any
    they are it while something listens, and beside several none is chosen.

    Of several engines it is the one with the best claim; where none has any, the engine is down, and where two have the
    same, it is not known which. On a host neither is it known of one that only may be it, before the page answers.
    """
    named = {pid: process for pid, process in entries.items() if process.role and not supervises(process.command)}
    tops = tuple(sorted(pid for pid in named if named.keys().isdisjoint(ancestors(entries, pid))))
    actors = tuple(pid for pid in tops if entries[pid].command[0].startswith(RAY))
    engines = _engines(entries, [pid for pid in tops if pid not in actors])
    told = {roots: told_by(roots[0]) for roots in engines}
    serving = {roots: _serving(named, roots) for roots in engines}
    began = {roots: _starts(entries, (*serving[roots], entries[roots[0]].parent_pid)) for roots in engines}
    claims = {roots: _claim(_names(entries, roots), began[roots], told[roots], asked, before) for roots in engines}
    best = max(claims.values(), default=_NONE)
    chosen = [roots for roots in engines if claims[roots] == best != _NONE]
    names = _names(entries, chain.from_iterable(engines))
    strangers = before.strangers & names
    is_named = best[0] > _NEVER
    is_sure = is_named or best[1] or (asked.answers and before.told is None)
    is_guess = asked.on_host and before.told is None and not is_sure
    if len(chosen) != 1 or (actors and len(engines) > 1) or is_guess:
        roots = actors if asked.listens and not engines else ()
        before = replace(before, roots=roots, names=frozenset(), others=names, strangers=strangers)
        return replace(before, ambiguous=len(engines) if chosen else 0, ports=_ports(told.values()))
    (roots,) = chosen
    own = _names(entries, serving[roots])
    return Choice(
        roots=roots + actors,
        names=own,
        told=told[roots] if is_sure else before.told,
        others=names - own,
        strangers=names - own if is_named else strangers,
        since=asked.began_seconds if is_named else before.since,
        ports=_ports([told[roots]]),
    )


def _engines(entries: Mapping[int, ProcEntry], tops: Iterable[int]) -> list[tuple[int, ...]]:
    """Return the roots of each engine.

    Without any server, cores and workers below one parent are one engine (a program that embeds vLLM), and beside one
    where an API server is among them, which has outlived the process that began them all.
    """
    servers = {pid: _serves(entries, pid) for pid in tops}
    alone = [(pid,) for pid, serves in servers.items() if serves]
    families = _families(entries[pid] for pid, serves in servers.items() if not serves)
    outlived = [roots for roots in families if any(entries[pid].role is Role.API_SERVER for pid in roots)]
    return alone + outlived if alone else families


def _ports(told: Iterable[Told]) -> frozenset[int]:
    return frozenset(port for port, _ in told if port is not None)


def _serves(entries: Mapping[int, ProcEntry], pid: int) -> bool:
    process = entries[pid]
    above = entries.get(process.parent_pid)
    return server_of(process.command) is not None or (above is not None and supervises(above.command))


def _claim(names: frozenset[Name], starts: Iterable[float], told: Told, asked: Asked, before: Choice) -> Claim:
    """Return how well it is vouched for that an engine is the one, the surest first.

    It began nearer than any to when the page says that its server did; one start names one engine, for the last page of
    a dead one is still known when another has its pid. It has the port, and can listen where the page is asked for, or
    tells what the engine told when that was sure. It may be the one for all that is known: it tells no port, or has
    another and something listens that can stand before it, a proxy or a port mapping. It was chosen before.

    A page that names its server speaks for no other, unless it has the port: a clock that was set moves the start.
    """
    since, never_sure = asked.began_seconds, before.told is None
    fits, is_strange = told in {(asked.port, True), before.told}, bool(names & before.strangers)
    apart = inf if since is None else min(abs(start - since) for start in starts)
    may_be_named = since != before.since or bool(names & before.names)
    began = -apart if apart <= SAME_START_SECONDS and may_be_named else _NEVER
    if is_strange or (since is not None and never_sure and not fits):
        return began, False, False, False
    may_be = never_sure and (asked.listens or told == (None, True))
    return began, fits, may_be, bool(names & before.names)


def _names(entries: Mapping[int, ProcEntry], pids: Iterable[int]) -> frozenset[Name]:
    return frozenset((pid, entries[pid].started_seconds) for pid in pids)


def _starts(entries: Mapping[int, ProcEntry], pids: Iterable[int]) -> list[float]:
    return [entries[pid].started_seconds for pid in pids if pid in entries]


def _serving(named: Mapping[int, ProcEntry], roots: tuple[int, ...]) -> tuple[int, ...]:
    """Return the pids of what may serve an engine's page: its roots, and servers below them."""
    below = (pid for pid, process in named.items() if process.parent_pid in roots and process.role is Role.API_SERVER)
    return (*roots, *below)


def ancestors(entries: Mapping[int, ProcEntry], pid: int) -> set[int]:
    """Return the pids above; files read one after another can show a circle, when a pid is used again."""
    ancestors: set[int] = set()
    parent = entries[pid].parent_pid
    while parent in entries and parent not in ancestors | {pid}:
        ancestors.add(parent)
        parent = entries[parent].parent_pid
    return ancestors


def family(process: ProcEntry) -> tuple[int, int]:
    """Return what the roots of one engine share: a parent, which for orphans is init, and the group they began in."""
    return process.parent_pid, process.group


def _families(processes: Iterable[ProcEntry]) -> list[tuple[int, ...]]:
    siblings: dict[tuple[int, int], tuple[int, ...]] = defaultdict(tuple)
    for process in processes:
        siblings[family(process)] += (process.pid,)
    return list(siblings.values())


def sees_others(entries: Mapping[int, ProcEntry], own_pid: int) -> bool:
    """Tell whether more than the daemon's own processes can be read: not in a container of its own, nor with hidepid.

    Every namespace has a pid 1; where it cannot be read, /proc hides what belongs to other users.
    """
    line = ancestors(entries, own_pid) | {own_pid} if own_pid in entries else {own_pid}
    return _INIT in entries and any(pid not in line and own_pid not in ancestors(entries, pid) for pid in entries)


_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh"})
"""What an entrypoint is run by, that takes over what a server in its own group leaves; no program of an engine's."""

_BELOW_A_SERVER: Final = (Role.ENGINE_CORE, Role.WORKER)


class Orphans:
    """Knows the engine's processes again after the death of the core or the server above them."""

    def __init__(self) -> None:
        self._roots: dict[int, ProcEntry] = {}
        self._members: dict[int, ProcEntry] = {}
        self._left: dict[int, ProcEntry] = {}

    def among(self, entries: Mapping[int, ProcEntry], *, answers: bool) -> frozenset[int]:
        """Return the pids of what was the engine's and hangs from none of its roots now, and of their children.

        Init, or whoever takes over orphans, is their parent now, and no later engine is. A root that is no server has a
        program above it, and is an orphan without it. Where the page `answers` and one of its servers lives, the engine
        goes on without the process that began it (seen: vLLM 0.32 with two API servers).
        """
        roots = {pid for pid, root in self._roots.items() if _lives_on(root, entries.get(pid))}
        known = {**self._left, **self._members}
        alive = {pid: entries[pid] for pid, was in known.items() if pid in entries and _same(was, entries[pid])}
        serves = any(process.role is Role.API_SERVER for process in alive.values())
        if serves and answers and not roots:
            self._left = {}
            return frozenset()
        if not serves and any(process.role is Role.API_SERVER for process in self._members.values()):
            roots = set()
        self._left = {
            pid: process
            for pid, process in alive.items()
            if pid in self._left or not roots & (ancestors(entries, pid) | {pid})
        }
        return _with_children(entries, self._left.keys())

    def remember(self, entries: Mapping[int, ProcEntry], roots: Iterable[int], members: Iterable[int]) -> None:
        """Take note of the engine's processes as they are now."""
        self._roots = {pid: entries[pid] for pid in roots}
        self._members = {pid: entries[pid] for pid in members}

    def strays(self, entries: Mapping[int, ProcEntry]) -> frozenset[int]:
        """Return the pids of cores and workers that another has taken over unseen from a server, and of their children.

        Only of those with a title of their own, and not of Ray's, whose daemon starts them. Nobody but init, or who
        stands in for it, is the parent of a process of another group: an engine's are of the group of who began it.
        Where an API server has been taken over with them, they serve on.
        """
        served = {
            family(process)
            for process in entries.values()
            if process.role is Role.API_SERVER and not server_of(process.command)
        }
        return _with_children(
            entries,
            {
                pid
                for pid, process in entries.items()
                if process.role in _BELOW_A_SERVER
                and pid not in self._members
                and not process.command[0].startswith(RAY)
                and family(process) not in served
                and _was_taken_over(process, entries.get(process.parent_pid))
            },
        )


def _was_taken_over(process: ProcEntry, parent: ProcEntry | None) -> bool:
    if parent is None or parent.role:
        return False
    return parent.group != process.group or parent.name in _SHELLS


def _with_children(entries: Mapping[int, ProcEntry], left: Collection[int]) -> frozenset[int]:
    if not left:
        return frozenset()
    return frozenset(pid for pid in entries if not ({pid} | ancestors(entries, pid)).isdisjoint(left))


def _same(was: ProcEntry, now: ProcEntry | None) -> bool:
    return now is not None and was.started_seconds == now.started_seconds


def _lives_on(was: ProcEntry, now: ProcEntry | None) -> bool:
    if now is None or not _same(was, now):
        return False
    return was.parent_pid == now.parent_pid or now.role is Role.API_SERVER
