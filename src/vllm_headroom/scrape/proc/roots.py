"""Which of the engines in sight is the one that serves a port."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from vllm_headroom.scrape.proc.files import ProcEntry
from vllm_headroom.scrape.proc.servers import served_port, server_of

_INIT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The root processes of the engine; none where it is down, or where it could be any of `ambiguous` engines.

    `by_port` is whether a server with the engine's port has been seen: then ports tell whose a server is.
    """

    roots: tuple[int, ...] = ()
    ambiguous: int = 0
    by_port: bool = False


def engine_roots(
    entries: Mapping[int, ProcEntry],
    port: int,
    command_of: Callable[[int], tuple[str, ...]],
    *,
    by_port: bool,
    before: Collection[int] = (),
) -> Choice:
    """Return whose process trees are the engine's.

    `by_port` is the last choice's and `before` its roots that still run; `command_of` gives whole commands.

    A root is a process of an engine's with none of an engine's above it. One server is the engine whatever its port, as
    a proxy or a port mapping may stand before it, unless one with the port has been seen: then another is a neighbour,
    and the engine is down. Of several servers it is the one with the port, and of several with the port the one that
    was chosen before: a stranger under its name takes nothing else of it. Beside a server, an engine core without one
    is a leftover whose memory the engine does not hold: taking it for the engine's would hide the leak. Without any
    server, cores and workers below one parent are one engine (a program that embeds vLLM), and those that init has
    taken over from a killed server come last. Ray's actors descend from Ray, which leaves open whose they are: they are
    the engine's where there is but one, and where there are several, none is chosen.
    """
    tops = _tops(entries)
    actors = tuple(pid for pid in tops if entries[pid].command[0].startswith("ray::"))
    servers = [(pid,) for pid in tops if server_of(entries[pid].command)]
    engines = servers or _families(entries[pid] for pid in tops if pid not in actors)
    matching = [server for server in servers if served_port(command_of(server[0])) == port]
    by_port = by_port or len(matching) == 1
    candidates = matching if servers and (by_port or len(servers) > 1) else engines
    if len(candidates) > 1:
        candidates = [roots for roots in candidates if set(roots) <= set(before)] or candidates
    if len(candidates) == 1 and (len(engines) == 1 or not actors):
        return Choice(roots=candidates[0] + actors, by_port=by_port)
    if not engines:
        return Choice(roots=actors, by_port=by_port)
    is_down = by_port and not candidates
    return Choice(ambiguous=0 if is_down else len(engines), by_port=by_port)


def _tops(entries: Mapping[int, ProcEntry]) -> tuple[int, ...]:
    named = {pid for pid, process in entries.items() if process.role}
    return tuple(sorted(pid for pid in named if not named & ancestors(entries, pid)))


def ancestors(entries: Mapping[int, ProcEntry], pid: int) -> set[int]:
    """Return the pids above; files read one after another can show a circle, when a pid is used again."""
    ancestors: set[int] = set()
    parent = entries[pid].parent_pid
    while parent in entries and parent not in ancestors | {pid}:
        ancestors.add(parent)
        parent = entries[parent].parent_pid
    return ancestors


def _families(processes: Iterable[ProcEntry]) -> list[tuple[int, ...]]:
    siblings: dict[int, tuple[int, ...]] = defaultdict(tuple)
    for process in processes:
        siblings[process.parent_pid] += (process.pid,)
    if len(siblings) > 1:
        siblings.pop(_INIT, None)
    return list(siblings.values())
