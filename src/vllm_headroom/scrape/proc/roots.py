"""Choose which of the visible engines serves a port."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from enum import IntEnum
from math import inf
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.model import SAME_START_SECONDS
from vllm_headroom.scrape.proc.files import ProcEntries, ProcEntry, ProcIdentity
from vllm_headroom.scrape.proc.servers import find_server, is_supervisor
from vllm_headroom.vocabulary import Role

INIT_PID: Final = 1

EXACT_START_SECONDS: Final = 0.2
"""Two starts that differ by at most this are equal: the kernel counts starts in hundredths of a
second. A larger difference means that the clock was set: then an equal port is stronger evidence
than the start."""

RAY_TITLE: Final = "ray::"
"""Prefix of the process titles of Ray's actors."""


Roots = tuple[int, ...]
"""The pids of one engine's processes that have no other process of the engine above them."""


class ServedPort(NamedTuple):
    """Where an engine may serve its page."""

    port: int | None
    """The port that its command line names; None where unknown."""
    can_listen: bool
    """Whether it can listen at the address of the page."""


class PageState(Struct, frozen=True, kw_only=True):
    """The result of the last request for the engine's page.

    The defaults are those before any request: then everything is possible.
    """

    port: int
    can_listen: bool = True
    """Something may listen on the port."""
    is_answered: bool = False
    """An engine answers on the port."""
    server_start_seconds: float | None = None
    """When the server behind the page started, in seconds since boot; None where the page does not
    say."""
    is_maybe_other_pods: bool = False
    """The request failed where processes of other pods are visible: the only visible engine may be
    another pod's."""


class Choice(Struct, frozen=True, kw_only=True):
    """The chosen engine, and what the next choice needs to know about this one."""

    roots: Roots = ()
    """The engine's root processes; none where it is down, or could be any of several."""
    ambiguous_engines: int = 0
    """How many engines are visible when it is unknown which of them is the engine; else 0."""
    certain_port: ServedPort | None = None
    """The engine's port when the choice was last certain; None before the first time."""
    servers: frozenset[ProcIdentity] = frozenset()
    """The engine's roots and the API servers directly below them."""
    neighbours: frozenset[ProcIdentity] = frozenset()
    """The roots of all other engines."""
    strangers: frozenset[ProcIdentity] = frozenset()
    """Those neighbours that were visible when a page identified the engine by its start."""
    identified_start_seconds: float | None = None
    """The start, since boot, by which a page last identified the engine."""
    ports: frozenset[int] = frozenset()
    """The engine's port, or those of all engines where none is chosen."""


class Candidate(Struct, frozen=True, kw_only=True):
    """An engine that may serve the page, with its evidence."""

    roots: Roots
    root_processes: frozenset[ProcIdentity]
    servers: frozenset[ProcIdentity]
    """The roots and the API servers directly below them: any of these may answer for the page."""
    starts_seconds: tuple[float, ...]
    """When its servers, and the program above its first root, started, since boot. A page may name
    any of these."""
    served_port: ServedPort


class StartMatch(IntEnum):
    """How well a start agrees with the start that the page names."""

    NONE = 0
    NEAR = 1
    """They differ by at most SAME_START_SECONDS."""
    EXACT = 2
    """They differ by at most EXACT_START_SECONDS."""


class Rank(NamedTuple):
    """How certain it is that an engine serves the page; ranks compare field by field."""

    start_match: StartMatch = StartMatch.NONE
    has_port: bool = False
    """It has the page's port and can listen there, or has the port that the engine had when it was
    certain."""
    closeness: float = -inf
    """Minus the seconds between its start and the start that the page names; -inf where they do not
    match."""
    may_have_port: bool = False
    """Its port is unknown, or differs while something listens that may forward: a proxy or a port
    mapping."""
    was_chosen: bool = False


NO_EVIDENCE: Final = Rank()
"""The rank of an engine that is not the page's: it is never chosen."""


def choose_roots(
    entries: ProcEntries,
    find_served: Callable[[int], ServedPort],
    page: PageState,
    previous: Choice,
) -> Choice:
    """Return which process trees are the engine's, given the previous choice.

    The visible engine with the highest rank is chosen. The choice has no roots where no visible
    engine has evidence, two share the highest rank, or the only evidence is a guess. `find_served`
    returns the port of the server with a pid.
    """
    tops = _find_tops(entries)
    ray_actors = tuple(pid for pid in tops if _is_ray_actor(entries[pid]))
    # Ray's actors descend from Ray, not from their engine, so no engine is grouped from them.
    engines = _group_engines(entries, [pid for pid in tops if pid not in ray_actors])
    candidates = []
    for roots in engines:
        served_port = find_served(roots[0])
        candidates.append(_describe_candidate(entries, roots, served_port))

    ranks = [_rank_candidate(candidate, page, previous) for candidate in candidates]
    best_rank = max(ranks, default=NO_EVIDENCE)
    best_candidates = []
    if best_rank != NO_EVIDENCE:
        best_candidates = [
            candidate
            for candidate, rank in zip(candidates, ranks, strict=True)
            if rank == best_rank
        ]

    is_first_choice = previous.certain_port is None
    is_certain = (
        best_rank.start_match is not StartMatch.NONE
        or best_rank.has_port
        or (page.is_answered and is_first_choice)
    )
    # The only visible engine may be another pod's: wait until the page answers.
    is_guess = page.is_maybe_other_pods and is_first_choice and not is_certain
    # Beside one engine Ray's actors belong to it; beside several their owner is unknown.
    has_unowned_actors = bool(ray_actors) and len(candidates) > 1
    if len(best_candidates) != 1 or is_guess or has_unowned_actors:
        # Without any engine, the actors are the engine while something listens.
        is_ray_only = page.can_listen and not candidates
        return _choose_none(
            candidates,
            previous,
            roots=ray_actors if is_ray_only else (),
            is_ambiguous=bool(best_candidates),
        )

    chosen = best_candidates[0]
    port = chosen.served_port.port
    neighbours = _list_root_processes(candidates) - chosen.servers
    choice = Choice(
        roots=chosen.roots + ray_actors,
        servers=chosen.servers,
        certain_port=chosen.served_port if is_certain else previous.certain_port,
        neighbours=neighbours,
        ports=frozenset() if port is None else frozenset({port}),
    )
    # Only a page that names its server's start distinguishes the engine from other servers.
    if best_rank.start_match is StartMatch.NONE:
        return replace(
            choice,
            strangers=previous.strangers & _list_root_processes(candidates),
            identified_start_seconds=previous.identified_start_seconds,
        )
    return replace(choice, strangers=neighbours, identified_start_seconds=page.server_start_seconds)


def list_servers(entries: ProcEntries) -> list[int]:
    """Return the pid of each engine that serves: the first of its roots, the lowest pid first.

    An engine without an API server, such as a program that embeds vLLM, is left out.
    """
    tops = [pid for pid in _find_tops(entries) if not _is_ray_actor(entries[pid])]
    engines = _group_engines(entries, tops)
    return sorted(roots[0] for roots in engines if _has_api_server(entries, roots))


def _choose_none(
    candidates: list[Candidate],
    previous: Choice,
    *,
    roots: Roots,
    is_ambiguous: bool,
) -> Choice:
    """Return a choice without an engine.

    `roots` are Ray's actors where they alone are the engine, else empty. What identified the engine
    before stays, so that it is recognised when it is visible again.
    """
    root_processes = _list_root_processes(candidates)
    ports = {candidate.served_port.port for candidate in candidates}
    return replace(
        previous,
        roots=roots,
        ambiguous_engines=len(candidates) if is_ambiguous else 0,
        servers=frozenset(),
        neighbours=root_processes,
        strangers=previous.strangers & root_processes,
        ports=frozenset(port for port in ports if port is not None),
    )


def _list_root_processes(candidates: Iterable[Candidate]) -> frozenset[ProcIdentity]:
    root_processes: set[ProcIdentity] = set()
    for candidate in candidates:
        root_processes |= candidate.root_processes
    return frozenset(root_processes)


def _find_tops(entries: ProcEntries) -> list[int]:
    """Return the sorted pids of engine processes without another engine process above them.

    A supervisor that only starts ranks does not count as an engine process: each rank below it is
    an engine with its own port.
    """
    engine_pids = {
        pid
        for pid, process in entries.items()
        if process.role and not is_supervisor(process.command)
    }
    return sorted(
        pid for pid in engine_pids if engine_pids.isdisjoint(list_ancestors(entries, pid))
    )


def _is_ray_actor(process: ProcEntry) -> bool:
    return process.command[0].startswith(RAY_TITLE)


def _group_engines(entries: ProcEntries, tops: Iterable[int]) -> list[Roots]:
    """Return the roots of each engine among `tops`; some of these may belong to none.

    A server is the only root of its engine, and so is a rank below a supervisor. Other processes
    with the same parent and process group are the roots of one engine. Beside a server or rank,
    such a group is an engine only if it has an API server.
    """
    engines: list[Roots] = []
    families: defaultdict[tuple[int, int], Roots] = defaultdict(tuple)
    for pid in tops:
        process = entries[pid]
        parent = entries.get(process.parent_pid)
        is_rank = parent is not None and is_supervisor(parent.command)
        if is_rank or find_server(process.command) is not None:
            engines.append((pid,))
        else:
            families[process.family] += (pid,)
    if not engines:
        # Without any server, cores and workers below one parent are a program that embeds vLLM.
        return list(families.values())
    # Beside a server, an engine core without one is a leftover: counting its memory as the
    # engine's would hide the leak. A family with an API server still serves: it has outlived the
    # process that started it.
    engines.extend(roots for roots in families.values() if _has_api_server(entries, roots))
    return engines


def _has_api_server(entries: ProcEntries, pids: Iterable[int]) -> bool:
    return any(entries[pid].role is Role.API_SERVER for pid in pids)


def _is_api_server(process: ProcEntry) -> bool:
    """Return whether a process answers for the page: a supervisor of ranks has the role too."""
    return process.role is Role.API_SERVER and not is_supervisor(process.command)


def _describe_candidate(entries: ProcEntries, roots: Roots, served_port: ServedPort) -> Candidate:
    """Return an engine with its servers and their starts, by which a page may name it."""
    root_processes = [entries[pid] for pid in roots]
    servers = list(root_processes)
    for process in entries.values():
        if process.parent_pid in roots and _is_api_server(process):
            servers.append(process)  # noqa: PERF401 - a list for two conditions reads worse
    starts_seconds = [process.started_seconds for process in servers]
    # `vllm serve` may be the parent of several servers: a page may report its start.
    program = entries.get(root_processes[0].parent_pid)
    if program is not None:
        starts_seconds.append(program.started_seconds)
    return Candidate(
        roots=roots,
        root_processes=frozenset(process.identity for process in root_processes),
        servers=frozenset(process.identity for process in servers),
        starts_seconds=tuple(starts_seconds),
        served_port=served_port,
    )


def _rank_candidate(candidate: Candidate, page: PageState, previous: Choice) -> Rank:
    """Return how certain it is that this engine serves the page; NO_EVIDENCE where it does not."""
    is_first_choice = previous.certain_port is None
    was_chosen = not candidate.root_processes.isdisjoint(previous.servers)
    page_port = ServedPort(page.port, can_listen=True)
    has_port = candidate.served_port in {page_port, previous.certain_port}

    closeness = _measure_closeness(candidate, page)
    # A start identifies one engine. Where it identified the previous choice, it does not identify
    # another engine: the last page of an exited engine may still be the newest page.
    is_start_taken = page.server_start_seconds == previous.identified_start_seconds
    if is_start_taken and not was_chosen:
        closeness = -inf
    start_rank = Rank(start_match=_match_start(closeness), closeness=closeness)

    # This engine was visible when a page named the start of another engine. So only a page that
    # names this engine's start is evidence for it.
    if not candidate.root_processes.isdisjoint(previous.strangers):
        return start_rank
    # A page that names its server's start is no evidence for an engine with another start, unless
    # that engine has the page's port: setting the clock moves the start on the page.
    if page.server_start_seconds is not None and is_first_choice and not has_port:
        return start_rank
    is_port_unknown = candidate.served_port == ServedPort(None, can_listen=True)
    return start_rank._replace(
        has_port=has_port,
        may_have_port=is_first_choice and (page.can_listen or is_port_unknown),
        was_chosen=was_chosen,
    )


def _measure_closeness(candidate: Candidate, page: PageState) -> float:
    """Return minus the seconds between the page's start and the candidate's nearest one.

    -inf where they are too far apart to match, or the page names no start.
    """
    page_start_seconds = page.server_start_seconds
    if page_start_seconds is None:
        return -inf
    distances_seconds = [abs(start - page_start_seconds) for start in candidate.starts_seconds]
    distance_seconds = min(distances_seconds)
    return -distance_seconds if distance_seconds <= SAME_START_SECONDS else -inf


def _match_start(closeness: float) -> StartMatch:
    if closeness >= -EXACT_START_SECONDS:
        return StartMatch.EXACT
    return StartMatch.NONE if closeness == -inf else StartMatch.NEAR


def list_ancestors(entries: ProcEntries, pid: int) -> set[int]:
    """Return the pids of all processes above this one; "above" means its parent and so on."""
    ancestors: set[int] = set()
    parent = entries[pid].parent_pid
    # A pid that is reused between two reads can close a circle.
    while parent in entries and parent not in ancestors | {pid}:
        ancestors.add(parent)
        parent = entries[parent].parent_pid
    return ancestors


def add_descendants(entries: ProcEntries, pids: Collection[int]) -> frozenset[int]:
    """Return those of the pids that still exist, with the pids of all processes below them.

    A process below an exited pid counts too.
    """
    if not pids:
        return frozenset()
    family = {pid for pid in pids if pid in entries}
    for pid in entries:
        if not list_ancestors(entries, pid).isdisjoint(pids):
            family.add(pid)
    return frozenset(family)


def find_orphans(
    entries: ProcEntries,
    engine: ProcEntries,
    previous_orphans: ProcEntries,
    roots: Iterable[int],
    *,
    is_page_answered: bool,
) -> dict[int, ProcEntry]:
    """Return the processes of an exited run that still exist, by pid.

    They were processes of the engine, or orphans already, and descend from no running root of the
    engine. Empty while the engine runs, also without the process that started it. `engine` has the
    engine's processes, roots included, as last read; `roots` are its last roots.
    """
    survivors: dict[int, ProcEntry] = {}
    for pid, process in {**previous_orphans, **engine}.items():
        current = entries.get(pid)
        if current is not None and current.identity == process.identity:
            survivors[pid] = current
    # A root that is no API server has a program above it, which started it. Without that program
    # the root is an orphan: its parent is then init, or another process that adopts orphans.
    running_roots: set[int] = set()
    for pid in roots:
        root = survivors.get(pid)
        if root is None:
            continue
        has_program = root.parent_pid == engine[pid].parent_pid
        if has_program or root.role is Role.API_SERVER:
            running_roots.add(pid)

    has_server = _has_api_server(survivors, survivors)
    if has_server and is_page_answered and not running_roots:
        # The engine continues without the process that started it (seen: vLLM 0.32 with two API
        # servers).
        return {}
    # The engine had an API server and has none now: whatever still runs serves nobody.
    if not has_server and _has_api_server(engine, engine):
        running_roots = set()
    orphans: dict[int, ProcEntry] = {}
    for pid, process in survivors.items():
        line_of_descent = {pid} | list_ancestors(entries, pid)
        if pid in previous_orphans or running_roots.isdisjoint(line_of_descent):
            orphans[pid] = process
    return orphans


_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh"})
"""Shells that run a container's entrypoint. A shell becomes the parent of the processes that a
server in its own process group leaves; it is never an engine."""


def find_strays(entries: ProcEntries, engine: Collection[int]) -> set[int]:
    """Return the pids of cores and workers that an engine left which was never seen.

    Processes of the watched engine are left out. So are Ray's actors, whose parent is always Ray's
    daemon, and processes of a family whose API server still runs.
    """
    # A family with an adopted API server still serves.
    serving_families = {
        process.family
        for process in entries.values()
        if process.role is Role.API_SERVER and not find_server(process.command)
    }
    strays = set()
    for pid, process in entries.items():
        if process.role not in {Role.ENGINE_CORE, Role.WORKER} or pid in engine:
            continue
        if _is_ray_actor(process) or process.family in serving_families:
            continue
        # A process whose parent has exited gets another one: its engine is gone.
        if _is_adopted(process, entries.get(process.parent_pid)):
            strays.add(pid)
    return strays


def _is_adopted(process: ProcEntry, parent: ProcEntry | None) -> bool:
    """Return whether a process has lost its parent: its parent now is one that adopts orphans."""
    if parent is None or parent.role:
        return False
    # An engine's processes share the process group of their parent.
    return parent.group != process.group or parent.name in _SHELLS
