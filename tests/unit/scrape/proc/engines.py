"""Processes that are engines and their neighbours, and which of them is chosen."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from vllm_headroom.model import ProcessReadings
from vllm_headroom.scrape.proc.files import ProcEntry
from vllm_headroom.scrape.proc.reader import Choice, PageState, Processes, ServedPort, choose_roots
from vllm_headroom.scrape.proc.servers import find_server_port
from vllm_headroom.vocabulary import Role

PORT = 8000
SERVER = ("python3.11", "/venv/bin/vllm", "serve", "tiny")
Tree = dict[int, ProcEntry]


def tree(*processes: tuple[int, int, str]) -> Tree:
    return {
        pid: ProcEntry(pid=pid, parent_pid=parent_pid, started_seconds=1.0, command=tuple(command.split()))
        for pid, parent_pid, command in processes
    }


class Clock:
    """A monotonic clock that stands until a test sets it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def read(processes: Processes) -> ProcessReadings:
    """Return the readings; fail where /proc could not be read."""
    readings = asyncio.run(processes.read(30))
    assert isinstance(readings, ProcessReadings), readings
    return readings


def roles(processes: Processes) -> dict[int, Role]:
    """Return the role of each of the engine's processes by its pid."""
    return {process.pid: process.role for process in read(processes).engine}


REFUSED = PageState(port=PORT, can_listen=False)
"""Nobody listens where the page is requested."""

ANYTHING = PageState(port=PORT)
ON_HOST = PageState(port=PORT, is_maybe_other_pods=True)


def named(began_seconds: float | None = None) -> PageState:
    """Return what a page shows, and when its server began."""
    return PageState(port=PORT, is_answered=True, server_start_seconds=began_seconds)


def choice(
    process_tree: Tree,
    *,
    page_state: PageState = REFUSED,
    earlier_choice: Choice | None = None,
    away: Collection[int] = (),
) -> Choice:
    """Return the choice after `before`; those `away` are on another network than the daemon."""
    nobody = ProcEntry(pid=0, parent_pid=0, started_seconds=0.0, command=())
    above = {pid: process_tree.get(process.parent_pid, nobody).command for pid, process in process_tree.items()}
    served_ports = {
        pid: ServedPort(find_server_port(proc_entry.command, parent_command=above[pid]), pid not in away)
        for pid, proc_entry in process_tree.items()
    }
    return choose_roots(process_tree, served_ports.__getitem__, page_state, earlier_choice or Choice())


OURS = (10, 1, "python /bin/vllm serve m --port 8000")
NEIGHBOUR = (20, 1, "python /bin/vllm serve n --port 9000")
ANOTHER = (30, 1, "python /bin/vllm serve o --port 9001")
