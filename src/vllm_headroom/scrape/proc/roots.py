"""Choose which of the visible engines serves a port."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from math import inf
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.model import SAME_START_SECONDS
from vllm_headroom.scrape.proc.files import ProcEntry
from vllm_headroom.scrape.proc.servers import find_server, is_supervisor
from vllm_headroom.vocabulary import Role

INIT: Final = 1
EXACT_SECONDS: Final = 0.2
"""Starts are counted in hundredths of a second: further apart, the clock was set, and a port is surer."""

RAY: Final = "ray::"
"""How the titles of Ray's actors begin."""

Name = tuple[int, float]
"""A process as ProcEntry.display_name."""

ServedPort = tuple[int | None, bool]
"""The port that an engine's command line names, and whether it can listen at the address of the page."""


class PageState(Struct, frozen=True, kw_only=True):
    """The port of the engine's page, and the result of the last request; without a request everything is possible.

    `listens`: something may listen there. `answers`: an engine answers there. `began_seconds`: when the server behind
    the page started, in seconds since boot; None where the page does not say. `on_host`: processes of other pods are
    visible.
    """

    port: int
    listens: bool = True
    answers: bool = False
    began_seconds: float | None = None
    on_host: bool = False


class Choice(Struct, frozen=True, kw_only=True):
    """The root processes of the engine; none where it is down, or where it could be any of `ambiguous` engines.

    `names` are its servers. `served` is its port when it was last certain; None before the first time. `others` are the
    roots of the other engines; `strangers` are those of them that were seen when a page identified the engine by its
    start, `since`. `ports` are the engine's, or those of all engines where none is chosen.
    """

    roots: tuple[int, ...] = ()
    ambiguous: int = 0
    served: ServedPort | None = None
    names: frozenset[Name] = frozenset()
    others: frozenset[Name] = frozenset()
    strangers: frozenset[Name] = frozenset()
    since: float | None = None
    ports: frozenset[int] = frozenset()


class Rank(NamedTuple):
    """How certain it is that an engine serves the page; ranks compare field by field, the most certain first."""

    precision: int = 0
    """1 if it started within SAME_START_SECONDS of the start that the page names, 2 within EXACT_SECONDS. One start
    identifies one engine, because the last page of an exited engine is still known when its pid is reused."""
    has_port: bool = False
    """It has the port and can listen at the page's address, or has the port that the engine had when it was certain."""
    closeness: float = -inf
    """Minus the seconds between its start and the start that the page names; -inf where they do not match."""
    may_have_port: bool = False
    """Its port is unknown, or differs while something listens that may forward: a proxy or a port mapping."""
    was_chosen: bool = False


def choose_roots(
    entries: Mapping[int, ProcEntry],
    find_served: Callable[[int], ServedPort],
    page: PageState,
    before: Choice,
) -> Choice:
    """Return which process trees are the engine's, given the last choice.

    A root is an engine's process without another above it, except one that supervises ranks. An engine core without a
    server, beside a server, is a leftover: counting its memory as the engine's would hide the leak. Ray's actors
    descend from Ray, not from their engine: beside one engine they belong to it, without an engine they are the engine
    while something listens, beside several none is chosen.

    The engine of the highest rank is chosen. Without any rank the engine is down; with two of the same rank it is
    unknown which one it is. On a host, an engine that only may have the port is not chosen before the page answers.
    """
    named = {
        pid: process
        for pid, process in entries.items()
        if process.role and not is_supervisor(process.command)
    }
    tops = tuple(
        sorted(pid for pid in named if named.keys().isdisjoint(list_ancestors(entries, pid)))
    )
    actors = tuple(pid for pid in tops if entries[pid].command[0].startswith(RAY))
    engines = _group_engines(entries, [pid for pid in tops if pid not in actors])
    served = {roots: find_served(roots[0]) for roots in engines}
    serving: dict[
        tuple[int, ...], list[ProcEntry]
    ] = {}  # what may serve the page: the roots, and servers below them
    ranks: dict[tuple[int, ...], Rank] = {}
    for roots in engines:
        of_engine = [entries[pid] for pid in roots]
        below = [
            each
            for each in named.values()
            if each.parent_pid in roots and each.role is Role.API_SERVER
        ]
        serving[roots] = of_engine + below
        above = [entries[each] for each in {of_engine[0].parent_pid} & entries.keys()]
        starts = [each.started_seconds for each in serving[roots] + above]
        ranks[roots] = _rank_engine(
            {each.display_name for each in of_engine}, starts, served[roots], page, before
        )
    best = max(ranks.values(), default=Rank())
    chosen = [roots for roots in engines if ranks[roots] == best != Rank()]
    names = frozenset(entries[pid].display_name for roots in engines for pid in roots)
    strangers = before.strangers & names
    is_certain = best.precision > 0 or best.has_port or (page.answers and before.served is None)
    is_guess = page.on_host and before.served is None and not is_certain
    of_chosen = (
        chosen[0]
        if len(chosen) == 1 and not (actors and len(engines) > 1) and not is_guess
        else None
    )
    ports = frozenset(
        port
        for roots, (port, _) in served.items()
        if port is not None and of_chosen in {None, roots}
    )
    if of_chosen is None:
        actors = actors if page.listens and not engines else ()
        before = replace(before, roots=actors, names=frozenset(), others=names, strangers=strangers)
        return replace(before, ambiguous=len(engines) if chosen else 0, ports=ports)
    own = frozenset(each.display_name for each in serving[of_chosen])
    return Choice(
        roots=of_chosen + actors,
        names=own,
        served=served[of_chosen] if is_certain else before.served,
        others=names - own,
        strangers=names - own if best.precision else strangers,
        since=page.began_seconds if best.precision else before.since,
        ports=ports,
    )


def _group_engines(entries: Mapping[int, ProcEntry], tops: Iterable[int]) -> list[tuple[int, ...]]:
    """Return the roots of each engine.

    Without any server, cores and workers below one parent are one engine: a program that embeds vLLM. Beside a server
    they are one only with an API server among them, which has outlived the process that started them all.
    """
    alone: list[tuple[int, ...]] = []
    siblings: dict[tuple[int, int], tuple[int, ...]] = defaultdict(tuple)
    for process in (entries[pid] for pid in tops):
        above = entries.get(process.parent_pid)
        if find_server(process.command) is not None or (
            above is not None and is_supervisor(above.command)
        ):
            alone.append((process.pid,))
        else:
            siblings[process.family] += (process.pid,)
    families = list(siblings.values())
    outlived = [
        roots for roots in families if any(entries[pid].role is Role.API_SERVER for pid in roots)
    ]
    return alone + outlived if alone else families


def _rank_engine(
    names: AbstractSet[Name],
    starts: Iterable[float],
    served: ServedPort,
    page: PageState,
    before: Choice,
) -> Rank:
    """Return the rank of one engine."""
    since, never_certain = page.began_seconds, before.served is None
    has_port = served in {(page.port, True), before.served}
    apart = inf if since is None else min(abs(start - since) for start in starts)
    may_be_named = since != before.since or bool(names & before.names)
    closeness = -apart if apart <= SAME_START_SECONDS and may_be_named else -inf
    rank = Rank(precision=(closeness > -inf) + (closeness >= -EXACT_SECONDS), closeness=closeness)
    # a page that names its server supports no other engine, unless that has the port: setting the clock moves the start
    if names & before.strangers or (since is not None and never_certain and not has_port):
        return rank
    may_have_port = never_certain and (page.listens or served == (None, True))
    was_chosen = bool(names & before.names)
    return rank._replace(has_port=has_port, may_have_port=may_have_port, was_chosen=was_chosen)


def list_ancestors(entries: Mapping[int, ProcEntry], pid: int) -> set[int]:
    """Return the pids above; a pid that is reused between two reads can close a circle."""
    ancestors: set[int] = set()
    parent = entries[pid].parent_pid
    while parent in entries and parent not in ancestors | {pid}:
        ancestors.add(parent)
        parent = entries[parent].parent_pid
    return ancestors


_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh"})
"""They run an entrypoint and become the parent of what a server in its own group leaves; no engine is one."""


def find_orphans(
    entries: Mapping[int, ProcEntry],
    engine: Mapping[int, ProcEntry],
    before: Mapping[int, ProcEntry],
    roots: Iterable[int],
    *,
    answers: bool,
) -> dict[int, ProcEntry]:
    """Return the former processes of an engine that descend from none of its roots now.

    `engine` has its processes, roots included, as they were, `before` its last orphans. The parent of an orphan is
    init, or another process that adopts orphans, and never a later engine. A root that is no server has a program above
    it, and is an orphan without it. Where the page `answers` and one of its servers runs, the engine continues without
    the process that started it (seen: vLLM 0.32 with two API servers).
    """
    alive = {
        pid: entries[pid]
        for pid, was in {**before, **engine}.items()
        if pid in entries and entries[pid].display_name == was.display_name
    }
    tops = {
        pid
        for pid in roots
        if pid in alive
        and (alive[pid].parent_pid == engine[pid].parent_pid or alive[pid].role is Role.API_SERVER)
    }
    serves = any(process.role is Role.API_SERVER for process in alive.values())
    if serves and answers and not tops:
        return {}
    if not serves and any(process.role is Role.API_SERVER for process in engine.values()):
        tops = set()
    return {
        pid: process
        for pid, process in alive.items()
        if pid in before or tops.isdisjoint(list_ancestors(entries, pid) | {pid})
    }


def find_strays(entries: Mapping[int, ProcEntry], engine: Collection[int]) -> set[int]:
    """Return the pids of cores and workers, none of the engine's, that were adopted from an unseen server.

    Only those with a title, and not Ray's, whose daemon starts them. Only a process that adopts orphans is the parent
    of a process of another group: an engine's processes share the group of their parent. With an adopted API server
    among them, they still serve.
    """
    servers = [each for each in entries.values() if each.role is Role.API_SERVER]
    served = {each.family for each in servers if not find_server(each.command)}
    strays = set()
    for pid, process in entries.items():
        above = entries.get(process.parent_pid)
        if (
            process.role in {Role.ENGINE_CORE, Role.WORKER}
            and pid not in engine
            and not process.command[0].startswith(RAY)
            and process.family not in served
            and above is not None
            and not above.role
            and (above.group != process.group or above.name in _SHELLS)
        ):
            strays.add(pid)
    return strays


def add_children(entries: Mapping[int, ProcEntry], left: Collection[int]) -> frozenset[int]:
    """Return the pids with those of all processes below them."""
    return frozenset(
        pid
        for pid in entries
        if left and not ({pid} | list_ancestors(entries, pid)).isdisjoint(left)
    )
