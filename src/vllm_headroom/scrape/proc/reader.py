"""The engine's processes and their memory, read from /proc."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from vllm_headroom.model import EnginePage, EngineProcess, Failure, ProcessReadings
from vllm_headroom.scrape.proc import files as proc_files
from vllm_headroom.scrape.proc.files import ProcEntry
from vllm_headroom.scrape.proc.host import boot_time_seconds, host_of, resident_parts
from vllm_headroom.scrape.proc.roots import Asked, Choice, Orphans, Told, engine_roots, sees_others
from vllm_headroom.scrape.proc.servers import named_role, served_port
from vllm_headroom.scrape.shortage import unavailable
from vllm_headroom.vocabulary import Reason, Role, Source
from vllm_headroom.worker import Worker


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


HIDDEN: Final = Failure(
    source=Source.PROCESS,
    reason=Reason.UNAVAILABLE,
    message=(
        "no process but the daemon's own can be seen, though the engine's page is served on this machine: share the"
        " pod's processes (shareProcessNamespace: true), or mount /proc without hidepid"
    ),
)
"""What cannot be seen is not nothing: an empty list would say that the engine is down."""


class Processes:
    """Finds the processes of the vLLM that serves `engine_port` under `proc`, and measures them.

    A process that is new is looked at once. Each is looked at again within `rescan_seconds` of `monotonic`, because it
    gets its title only after it has started: a share at every reading, so that no reading of a full host takes long.
    All of them are whenever one of the engine's has gone.

    `engine_is_here` is whether the engine's page is served on this machine: then its processes must be able to show.
    """

    def __init__(
        self,
        *,
        engine_port: int,
        engine_is_here: bool = False,
        proc: Path = Path("/proc"),
        monotonic: Callable[[], float],
        rescan_seconds: float = 15.0,
    ) -> None:
        self._engine_is_here = engine_is_here
        self._proc = proc
        self._monotonic = monotonic
        self._rescan_seconds = rescan_seconds
        self._looked_at_seconds = monotonic()
        self._entries: dict[int, ProcEntry] = {}
        self._asked = self._unasked = Asked(port=engine_port)
        self._choice = Choice()
        self._roles: dict[int, Role] = {}
        self._orphans = Orphans()
        self._orphaned: frozenset[int] = frozenset()
        self._strays: frozenset[int] = frozenset()
        self._sees_others = True
        self._worker = Worker[ProcessReadings | Failure]("processes")

    async def read(self, timeout_seconds: float, page: EnginePage | Failure | None = None) -> ProcessReadings | Failure:
        """Return the engine's processes that are alive, and every pid that shows.

        `page` is what came of asking for the engine's page, None where nobody has asked; with it, `roots.engine_roots`
        says which of the engines in sight it is.
        Reads on a daemon thread, because a command line can block behind a process stuck in a driver: that is a
        TIMEOUT until it lets go. UNAVAILABLE where there is no /proc, and HIDDEN where the engine cannot show in it.
        """
        try:
            return await self._worker.call(lambda: self._read(page), timeout_seconds)
        except TimeoutError:
            late = f"{self._proc} did not answer within {timeout_seconds:g} s"
            message = f"{late}: look for processes in state D, which a hung driver holds"
            return Failure(source=Source.PROCESS, reason=Reason.TIMEOUT, message=message)
        except OSError as error:
            advice = "mount it, readable for this user"
            return unavailable(Source.PROCESS, f"{self._proc} cannot be read", error, advice)

    def _read(self, page: EnginePage | Failure | None) -> ProcessReadings | Failure:
        pids, asked = proc_files.pids(self._proc), self._asking(page)
        if not pids:
            raise OSError("no process shows, not even the daemon's own")
        if not pids >= self._roles.keys():
            self._forget()
        engine = self._engine(pids, asked)
        if len(engine) < len(self._roles):
            self._forget()
            engine = self._engine(pids, asked)
        if self._engine_is_here and not (engine or self._sees_others):
            return HIDDEN
        return ProcessReadings(
            engine=engine,
            visible_pids=pids,
            sees_host_pids=self._sees_host_pids,
            ambiguous_roots=self._choice.ambiguous,
            neighbours=frozenset((pid, self._boot_time_seconds + began) for pid, began in self._choice.others),
            ports=self._choice.ports,
            orphans=self._orphaned,
            strays=self._strays,
            zombies=frozenset(pid for pid in pids - self._entries.keys() if proc_files.is_zombie(self._proc, pid)),
            host=host_of(self._proc, engine),
        )

    def _forget(self) -> None:
        self._entries, self._roles = {}, {}

    def _asking(self, page: EnginePage | Failure | None) -> Asked:
        if page is None:
            return self._unasked
        if isinstance(page, Failure):
            listens = not (self._engine_is_here and page.reason is Reason.UNREACHABLE)
            return replace(self._unasked, listens=listens, on_host=self._sees_host_pids)
        told = [each.started_at_seconds for each in page.engines if each.started_at_seconds is not None]
        since = min(told) - self._boot_time_seconds if told else None
        return replace(self._unasked, answers=bool(page.engines), began_seconds=since)

    def _engine(self, pids: frozenset[int], asked: Asked) -> tuple[EngineProcess, ...]:
        if self._look(pids) or asked != self._asked:
            self._asked = asked
            self._roles = self._chosen(self._entries)
        found = (self._measured(self._entries[pid], role) for pid, role in sorted(self._roles.items()))
        return tuple(process for process in found if process)

    def _look(self, pids: frozenset[int]) -> bool:
        """Look at a share of the processes, which then stand behind the others, and tell whether anything changed.

        At the kernel's, once is enough.
        """
        now = self._monotonic()
        share = (now - self._looked_at_seconds) / self._rescan_seconds if self._rescan_seconds else 1.0
        self._looked_at_seconds = now
        gone, unknown = self._entries.keys() - pids, pids - self._entries.keys()
        for pid in gone:
            del self._entries[pid]
        never = proc_files.KERNEL_THREADS if proc_files.shows_kernel_threads(self._entries) else None
        others = [pid for pid, entry in self._entries.items() if entry.parent_pid != never]
        changed = bool(gone)
        for pid in (*others[: ceil(share * len(others))], *unknown):
            before = self._entries.get(pid)
            entry = proc_files.entry(self._proc, pid, before)
            self._entries.pop(pid, None)
            if entry is not None:
                self._entries[pid] = entry
            changed |= entry != before
        return changed

    def _chosen(self, entries: dict[int, ProcEntry]) -> dict[int, Role]:
        own_pid = proc_files.own_pid(self._proc)
        self._strays = self._orphans.strays(entries)
        self._orphaned = self._orphans.among(entries, answers=self._asked.answers)
        left = self._orphaned | self._strays
        rest = {pid: entry for pid, entry in entries.items() if pid not in left}
        self._choice = engine_roots(rest, self._told, self._asked, self._choice)
        roles = engine_roles(rest, own_pid, self._choice.roots)
        self._orphans.remember(rest, self._choice.roots, roles)
        self._sees_others = sees_others(entries, own_pid)
        return roles

    def _told(self, pid: int) -> Told:
        """Return its port, and whether it is on the daemon's network, as a page on a loopback address wants."""
        may_listen = not self._engine_is_here or proc_files.shares_network(self._proc, pid)
        command, above = (proc_files.command(self._proc, each) for each in (pid, self._entries[pid].parent_pid))
        return served_port(command, self._asked.port, above), may_listen

    def _measured(self, entry: ProcEntry, role: Role) -> EngineProcess | None:
        usage = proc_files.usage(self._proc, entry)
        if usage is None:
            return None
        anonymous_bytes, file_bytes = resident_parts(self._proc, entry.pid)
        return EngineProcess(
            pid=entry.pid,
            role=role,
            rss_bytes=usage[0],
            started_at_seconds=self._boot_time_seconds + entry.started_seconds,
            since_boot_seconds=entry.started_seconds,
            cpu_seconds=usage[1],
            anonymous_bytes=anonymous_bytes,
            file_bytes=file_bytes,
        )

    @cached_property
    def _sees_host_pids(self) -> bool:
        """Read once: no process ever changes its own namespace of pids."""
        return proc_files.sees_host_pids(self._proc)

    @cached_property
    def _boot_time_seconds(self) -> float:
        """Read once: a step of the clock would move it, and with it the start times that tell processes apart."""
        return boot_time_seconds(self._proc)
