"""The engine's processes and their memory, read from /proc."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from vllm_headroom.model import EngineOptions, EnginePage, EngineProcess, Failure, ProcessReadings
from vllm_headroom.scrape.proc import files as proc_files
from vllm_headroom.scrape.proc import roots as proc_roots
from vllm_headroom.scrape.proc.connections import find_wait
from vllm_headroom.scrape.proc.files import ProcEntry
from vllm_headroom.scrape.proc.host import read_boot_time, read_cpu_pressure, read_host, read_parts
from vllm_headroom.scrape.proc.options import read_options
from vllm_headroom.scrape.proc.servers import find_port, find_role
from vllm_headroom.scrape.shortage import build_unavailable
from vllm_headroom.vocabulary import Reason, Role, Source
from vllm_headroom.worker import Worker


def assign_roles(
    entries: Mapping[int, ProcEntry], own_pid: int, roots: Iterable[int]
) -> dict[int, Role]:
    """Return the role of each process of an engine by pid: its `roots` and their descendants, without the daemon's."""
    children: dict[int, list[int]] = defaultdict(list)
    for pid, process in entries.items():
        children[process.parent_pid].append(pid)
    roles: dict[int, Role] = {}
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid in roles or pid == own_pid:
            continue
        command, parent = entries[pid].command, entries.get(entries[pid].parent_pid)
        if parent is not None and command == parent.command:
            roles[pid] = Role.OTHER  # a fork has its parent's name
        else:  # titles may have any VLLM_PROCESS_NAME_PREFIX
            title = f"VLLM::{command[0].partition('::')[2]}"
            roles[pid] = entries[pid].role or find_role((title,)) or Role.OTHER
        waiting.extend(children[pid])
    return roles


HIDDEN: Final = Failure(
    source=Source.PROCESS,
    reason=Reason.UNAVAILABLE,
    message=(
        "no process but the daemon's own can be seen, though the engine's URL is of this machine: share the pod's"
        " processes (shareProcessNamespace: true), or mount /proc without hidepid"
    ),
)
"""An empty list would mean that the engine is down: so it does once the engine was visible, and pid 1 still is."""


class Processes:
    """Finds the processes of the vLLM that serves `engine_port` under `proc`, and measures them.

    A new process is read at once. Each is read again within `rescan_seconds`, because it gets its title only after its
    start: a share at every reading, so that no reading of a full host takes long. When one of the engine's has exited,
    all are read again.

    `engine_is_here`: the engine's page is served on this machine, so its processes must be visible.
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
        self._scanned_at_seconds = monotonic()
        self._entries: dict[int, ProcEntry] = {}
        self._page = self._first_page = proc_roots.PageState(port=engine_port)
        self._choice = proc_roots.Choice()
        self._roles: dict[int, Role] = {}
        self._options: EngineOptions | None = None
        self._known: dict[int, ProcEntry] = {}
        self._orphans: dict[int, ProcEntry] = {}
        self._orphaned: frozenset[int] = frozenset()
        self._strays: frozenset[int] = frozenset()
        self._sees_others = True
        self._has_shown = False
        self._worker = Worker[ProcessReadings | Failure]("processes")

    async def read(
        self, timeout_seconds: float, page: EnginePage | Failure | None = None
    ) -> ProcessReadings | Failure:
        """Return the engine's running processes, and every visible pid.

        `page` is the engine's last page, None without a request: `roots.choose_roots` chooses the engine by it. The
        thread that reads can block on a command line, behind a process stuck in a driver: TIMEOUT until that returns.
        UNAVAILABLE where there is no /proc, HIDDEN where the engine cannot be visible in it.
        """
        try:
            return await self._worker.call(lambda: self._read(page), timeout_seconds)
        except TimeoutError:
            late = f"{self._proc} did not answer within {timeout_seconds:g} s"
            message = f"{late}: look for processes in state D, which a hung driver holds"
            return Failure(source=Source.PROCESS, reason=Reason.TIMEOUT, message=message)
        except OSError as error:
            advice = "mount it, readable for this user"
            return build_unavailable(Source.PROCESS, f"{self._proc} cannot be read", error, advice)

    def _read(self, page: EnginePage | Failure | None) -> ProcessReadings | Failure:
        pids, state = proc_files.list_pids(self._proc), self._describe_page(page)
        if not pids:
            raise OSError("no process shows, not even the daemon's own")
        if not pids >= self._roles.keys():
            self._entries, self._roles = {}, {}
        engine = self._read_engine(pids, state)
        if len(engine) < len(self._roles):
            self._entries, self._roles = {}, {}
            engine = self._read_engine(pids, state)
        self._has_shown = self._has_shown or bool(engine)
        if self._engine_is_here and not (
            engine or self._sees_others or (self._has_shown and proc_roots.INIT in pids)
        ):
            return HIDDEN
        return ProcessReadings(
            engine=engine,
            visible_pids=pids,
            sees_host_pids=self._sees_host_pids,
            ambiguous_roots=self._choice.ambiguous,
            neighbours=frozenset(
                (pid, self._boot_time_seconds + began) for pid, began in self._choice.others
            ),
            ports=self._choice.ports,
            orphans=self._orphaned,
            strays=self._strays,
            zombies=frozenset(
                pid for pid in pids - self._entries.keys() if proc_files.is_zombie(self._proc, pid)
            ),
            options=self._options if engine else None,
            host=read_host(self._proc, engine[0].pid if engine else None),
        )

    def _describe_page(self, page: EnginePage | Failure | None) -> proc_roots.PageState:
        if page is None:
            return self._first_page
        if isinstance(page, Failure):
            listens = not (self._engine_is_here and page.reason is Reason.UNREACHABLE)
            return replace(self._first_page, listens=listens, on_host=self._sees_host_pids)
        starts = [
            each.started_at_seconds for each in page.engines if each.started_at_seconds is not None
        ]
        since = min(starts) - self._boot_time_seconds if starts else None
        return replace(self._first_page, answers=bool(page.engines), began_seconds=since)

    def _read_engine(
        self, pids: frozenset[int], page: proc_roots.PageState
    ) -> tuple[EngineProcess, ...]:
        if self._scan(pids) or page != self._page:
            self._page = page
            entries = self._entries
            own_pid = proc_files.read_own_pid(self._proc)
            self._strays = proc_roots.add_children(
                entries, proc_roots.find_strays(entries, self._known)
            )
            last = (self._known, self._orphans, self._choice.roots)
            self._orphans = proc_roots.find_orphans(entries, *last, answers=page.answers)
            self._orphaned = proc_roots.add_children(entries, self._orphans)
            left = self._orphaned | self._strays
            rest = {pid: entry for pid, entry in entries.items() if pid not in left}
            self._choice = proc_roots.choose_roots(
                rest, self._find_served, self._page, self._choice
            )
            self._roles = assign_roles(rest, own_pid, self._choice.roots)
            # of the engine's server, or of the program above a titled rank
            tops = [
                each for root in self._choice.roots[:1] for each in (root, entries[root].parent_pid)
            ]
            set_by = (read_options(proc_files.read_command(self._proc, pid)) for pid in tops)
            self._options = next((options for options in set_by if options is not None), None)
            self._known = {pid: rest[pid] for pid in self._roles}
            ancestors = proc_roots.list_ancestors
            line = {own_pid} | (ancestors(entries, own_pid) if own_pid in entries else set())
            others = (
                pid for pid in entries if pid not in line and own_pid not in ancestors(entries, pid)
            )
            self._sees_others = proc_roots.INIT in entries and any(
                others
            )  # with hidepid, pid 1 is not visible
        found = (
            self._measure(self._entries[pid], role) for pid, role in sorted(self._roles.items())
        )
        return tuple(process for process in found if process)

    def _scan(self, pids: frozenset[int]) -> bool:
        """Read a share of the processes, the kernel's only once, and move it to the end; return whether any changed."""
        now = self._monotonic()
        share = (
            (now - self._scanned_at_seconds) / self._rescan_seconds if self._rescan_seconds else 1.0
        )
        self._scanned_at_seconds = now
        gone, unknown = self._entries.keys() - pids, pids - self._entries.keys()
        for pid in gone:
            del self._entries[pid]
        kthreadd = self._entries.get(
            proc_files.KERNEL_THREADS
        )  # in a container this pid is an ordinary process
        has_kernel = kthreadd is not None and (kthreadd.name, *kthreadd.command) == (
            "kthreadd",
            "kthreadd",
        )
        never = proc_files.KERNEL_THREADS if has_kernel else None
        others = [pid for pid, entry in self._entries.items() if entry.parent_pid != never]
        changed = bool(gone)
        for pid in (*others[: ceil(share * len(others))], *unknown):
            before = self._entries.get(pid)
            entry = proc_files.read_entry(self._proc, pid, before, is_engine=pid in self._roles)
            self._entries.pop(pid, None)
            if entry is not None:
                self._entries[pid] = entry
            changed |= entry != before
        return changed

    def _find_served(self, pid: int) -> proc_roots.ServedPort:
        """Return its port, and whether it shares the daemon's network, which a page on a loopback address needs."""
        may_listen = not self._engine_is_here or proc_files.has_same_network(self._proc, pid)
        command, above = (
            proc_files.read_command(self._proc, each)
            for each in (pid, self._entries[pid].parent_pid)
        )
        return find_port(command, self._page.port, above), may_listen

    def _measure(self, entry: ProcEntry, role: Role) -> EngineProcess | None:
        usage = proc_files.read_usage(self._proc, entry)
        if usage is None:
            return None
        serves = role is Role.API_SERVER and entry.pid in self._choice.roots
        is_near = serves and proc_files.has_same_network(self._proc, entry.pid, otherwise=False)
        return EngineProcess(
            pid=entry.pid,
            role=role,
            rss_bytes=usage[0],
            started_at_seconds=self._boot_time_seconds + entry.started_seconds,
            since_boot_seconds=entry.started_seconds,
            cpu_seconds=usage[1],
            **read_parts(self._proc, entry.pid),
            state=usage[2],
            cpu_pressure_ratio=read_cpu_pressure(self._proc) if serves else None,
            wait_seconds=find_wait(self._choice.ports or {self._page.port}) if is_near else None,
        )

    @cached_property
    def _sees_host_pids(self) -> bool:
        """Read once: no process changes its own pid namespace."""
        return proc_files.has_host_pids(self._proc)

    @cached_property
    def _boot_time_seconds(self) -> float:
        """Read once: a clock step would move it, and with it the start times that identify processes."""
        return read_boot_time(self._proc)
