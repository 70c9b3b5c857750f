"""Which processes are an engine's, told by their titles, command lines and parents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from vllm_headroom.scrape.proc.files import ProcEntry
from vllm_headroom.scrape.proc.servers import named_role
from vllm_headroom.vocabulary import Role


def engine_roles(entries: Mapping[int, ProcEntry], own_pid: int, roots: Iterable[int]) -> dict[int, Role]:
    """Return the role of each process of an engine by pid: its `roots` and all their descendants.

    `own_pid` and its descendants are never among them: an entrypoint that starts this daemon and then becomes vLLM
    is its parent.
    """
    children: dict[int, list[int]] = defaultdict(list)
    for pid, process in entries.items():
        children[process.parent_pid].append(pid)
    roles: dict[int, Role] = {}
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid in roles or pid == own_pid:
            continue
        roles[pid] = _role(entries[pid], entries.get(entries[pid].parent_pid))
        waiting.extend(children[pid])
    return roles


def _role(process: ProcEntry, parent: ProcEntry | None) -> Role:
    """Return the role by name; a fork that has not taken another name is no second one of its parent.

    Below a server a title counts whatever VLLM_PROCESS_NAME_PREFIX has put before it.
    """
    if parent is not None and process.command == parent.command:
        return Role.OTHER
    return process.role or named_role((f"VLLM::{process.command[0].partition('::')[2]}",)) or Role.OTHER
