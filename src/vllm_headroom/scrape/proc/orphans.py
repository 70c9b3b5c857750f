"""What is left of an engine's processes when the ones they hung from have gone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from vllm_headroom.scrape.proc.files import ProcEntry
from vllm_headroom.scrape.proc.roots import RAY, ancestors, family
from vllm_headroom.scrape.proc.servers import server_of
from vllm_headroom.vocabulary import Role

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
