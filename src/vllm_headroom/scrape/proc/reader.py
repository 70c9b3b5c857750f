"""The engine's processes and their memory, read from /proc."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from math import ceil
from pathlib import Path
from typing import Final

from vllm_headroom.model import EngineProcess, Failure, ProcessReadings
from vllm_headroom.scrape.proc import files as proc_files
from vllm_headroom.scrape.proc.files import ProcEntry
from vllm_headroom.scrape.proc.host import host_of
from vllm_headroom.scrape.proc.orphans import Orphans, strays
from vllm_headroom.scrape.proc.roles import engine_roles
from vllm_headroom.scrape.proc.roots import Choice, ancestors, engine_roots
from vllm_headroom.scrape.worker import Worker
from vllm_headroom.vocabulary import Reason, Role, Source

_FIRST: Final = 1

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
        self._engine_port = engine_port
        self._engine_is_here = engine_is_here
        self._proc = proc
        self._monotonic = monotonic
        self._rescan_seconds = rescan_seconds
        self._looked_at_seconds = monotonic()
        self._entries: dict[int, ProcEntry] = {}
        self._choice = Choice()
        self._roles: dict[int, Role] = {}
        self._orphans = Orphans()
        self._orphaned: frozenset[int] = frozenset()
        self._strays: frozenset[int] = frozenset()
        self._sees_others = True
        self._worker = Worker[ProcessReadings | Failure]("processes")

    async def read(self, timeout_seconds: float) -> ProcessReadings | Failure:
        """Return the engine's processes that are alive, and every pid that shows.

        Which of several engines it is, `roots.engine_roots` says.
        Reads on a daemon thread, because a command line can block behind a process stuck in a driver: that is a
        TIMEOUT until it lets go. UNAVAILABLE where there is no /proc, and HIDDEN where the engine cannot show in it.
        """
        try:
            return await self._worker.call(self._read, timeout_seconds)
        except TimeoutError:
            message = (
                f"{self._proc} did not answer within {timeout_seconds:g} s: "
                "look for processes in state D, which a hung driver holds"
            )
            return Failure(source=Source.PROCESS, reason=Reason.TIMEOUT, message=message)
        except OSError as error:
            message = f"{self._proc} cannot be read ({error.strerror or error}): mount it, readable for this user"
            return Failure(source=Source.PROCESS, reason=Reason.UNAVAILABLE, message=message)

    def _read(self) -> ProcessReadings | Failure:
        pids = proc_files.pids(self._proc)
        if not pids >= self._roles.keys():
            self._forget()
        engine = self._engine(pids)
        if len(engine) < len(self._roles):
            self._forget()
            engine = self._engine(pids)
        if self._engine_is_here and not (engine or self._sees_others):
            return HIDDEN
        return ProcessReadings(
            engine=engine,
            visible_pids=pids,
            sees_host_pids=self._sees_host_pids,
            ambiguous_roots=self._choice.ambiguous,
            orphans=self._orphaned,
            strays=self._strays,
            zombies=frozenset(pid for pid in pids - self._entries.keys() if proc_files.is_zombie(self._proc, pid)),
            host=host_of(self._proc, engine),
        )

    def _forget(self) -> None:
        self._entries, self._roles = {}, {}

    def _engine(self, pids: frozenset[int]) -> tuple[EngineProcess, ...]:
        if self._look(pids):
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
            before = self._entries.pop(pid, None)
            entry = proc_files.entry(self._proc, pid, before)
            if entry is not None:
                self._entries[pid] = entry
            changed |= entry != before
        return changed

    def _chosen(self, entries: dict[int, ProcEntry]) -> dict[int, Role]:
        command_of = partial(proc_files.command, self._proc)
        own_pid = proc_files.own_pid(self._proc)
        self._orphaned = self._orphans.among(entries)
        self._strays = strays(entries)
        left = self._orphaned | self._strays
        rest = {pid: entry for pid, entry in entries.items() if pid not in left}
        before = [pid for pid in self._choice.roots if pid in rest]
        self._choice = engine_roots(rest, self._engine_port, command_of, by_port=self._choice.by_port, before=before)
        roles = engine_roles(rest, own_pid, self._choice.roots)
        self._orphans.remember(rest, self._choice.roots, roles)
        self._sees_others = _sees_others(entries, own_pid)
        return roles

    def _measured(self, entry: ProcEntry, role: Role) -> EngineProcess | None:
        usage = proc_files.usage(self._proc, entry)
        if usage is None:
            return None
        rss_bytes, cpu_seconds = usage
        anonymous_bytes, file_bytes = proc_files.resident_parts(self._proc, entry.pid)
        return EngineProcess(
            pid=entry.pid,
            role=role,
            rss_bytes=rss_bytes,
            started_at_seconds=self._boot_time_seconds + entry.started_seconds,
            cpu_seconds=cpu_seconds,
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
        return proc_files.boot_time_seconds(self._proc)


def _sees_others(entries: Mapping[int, ProcEntry], own_pid: int) -> bool:
    """Tell whether more than the daemon's own processes can be read: not in a container of its own, nor with hidepid.

    Every namespace has a pid 1; where it cannot be read, /proc hides what belongs to other users.
    """
    line = ancestors(entries, own_pid) | {own_pid} if own_pid in entries else {own_pid}
    return _FIRST in entries and any(pid not in line and own_pid not in ancestors(entries, pid) for pid in entries)
