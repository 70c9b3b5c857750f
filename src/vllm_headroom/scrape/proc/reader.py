"""The engine's processes and their memory, read from /proc."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.model import EngineOptions, EnginePage, EngineProcess, Failure, ProcessReadings
from vllm_headroom.scrape.proc import files as proc_files
from vllm_headroom.scrape.proc import roots as proc_roots
from vllm_headroom.scrape.proc.connections import count_waiting, find_slow_wait, list_waits
from vllm_headroom.scrape.proc.files import ProcEntries, ProcEntry
from vllm_headroom.scrape.proc.host import read_boot_time, read_cpu_pressure, read_host, read_parts
from vllm_headroom.scrape.proc.options import read_options
from vllm_headroom.scrape.proc.servers import find_port, find_role
from vllm_headroom.scrape.shortage import build_unavailable
from vllm_headroom.vocabulary import Reason, Role, Source
from vllm_headroom.worker import Worker

HIDDEN: Final = Failure(
    source=Source.PROCESS,
    reason=Reason.UNAVAILABLE,
    message=(
        "no process but the daemon's own can be seen, though the engine's URL is of this machine:"
        " share the pod's processes (shareProcessNamespace: true), or mount /proc without hidepid"
    ),
)
"""The result where the engine's processes cannot be visible. An empty list of processes would mean
that the engine is down: that is the result once the engine was visible, while pid 1 still is."""


class Scope(Struct, frozen=True, kw_only=True):
    """The processes among which one of several engines is looked for."""

    visible_pids: frozenset[int]
    """The processes of the whole machine."""
    own_pids: frozenset[int]
    """The processes of the engine's pod or unit: those that a sidecar in the pod would see."""


def assign_roles(entries: ProcEntries, own_pid: int, roots: Iterable[int]) -> dict[int, Role]:
    """Return by pid the roles of an engine's `roots` and of all processes below them.

    The daemon, which may run below the engine's entrypoint, is left out with all processes below
    it. A process of the tree without a known title has the role OTHER.
    """
    children: dict[int, list[int]] = defaultdict(list)
    for pid, process in entries.items():
        children[process.parent_pid].append(pid)
    roles: dict[int, Role] = {}
    pending_pids = list(roots)
    while pending_pids:
        pid = pending_pids.pop()
        if pid in roles or pid == own_pid:
            continue
        process = entries[pid]
        parent = entries.get(process.parent_pid)
        if parent is not None and process.command == parent.command:
            roles[pid] = Role.OTHER  # a fork that has not set its own title
        else:
            # vLLM's titles may have any prefix (VLLM_PROCESS_NAME_PREFIX).
            title = f"VLLM::{process.command[0].partition('::')[2]}"
            roles[pid] = process.role or find_role((title,)) or Role.OTHER
        pending_pids.extend(children[pid])
    return roles


def sees_other_processes(entries: ProcEntries, own_pid: int) -> bool:
    """Return whether a process is visible that is neither above nor below the daemon.

    False where pid 1 is not visible. That is so with hidepid, where only processes of the daemon's
    user are visible, so that a visible process does not show that the engine's would be.
    """
    if proc_roots.INIT_PID not in entries:
        return False
    own_line = {own_pid}
    # A process above or below the daemon is in its own container: it proves nothing.
    if own_pid in entries:
        own_line |= proc_roots.list_ancestors(entries, own_pid)
    for pid in entries:
        if pid not in own_line and own_pid not in proc_roots.list_ancestors(entries, pid):
            return True
    return False


class Processes:
    """Finds the processes of the engine that serves `engine_port`, and measures them.

    A new process is read at once. Every process is read again within `rescan_seconds`, because a
    process gets its title only after its start. Each reading takes a share of the processes, so
    that no reading takes long on a host with many. When a process of the engine has exited, all
    processes are read again.

    `engine_is_here` means that the engine's page is served on this machine, so that the engine's
    processes must be visible. `read_scope` returns the processes among which to look for the
    engine; without it these are all that are visible.
    """

    def __init__(
        self,
        *,
        engine_port: int,
        engine_is_here: bool = False,
        proc: Path = Path("/proc"),
        monotonic: Callable[[], float],
        rescan_seconds: float = 15.0,
        read_scope: Callable[[], Scope] | None = None,
    ) -> None:
        self._engine_is_here = engine_is_here
        self._read_scope = read_scope
        self._proc = proc
        self._monotonic = monotonic
        self._rescan_seconds = rescan_seconds
        self._worker = Worker[ProcessReadings | Failure]("processes")

        # The scan.
        self._entries: dict[int, ProcEntry] = {}
        """Every visible process by pid; the one that was read longest ago is first."""
        self._scanned_at_seconds = monotonic()

        # The engine among the scanned processes.
        self._no_page = proc_roots.PageState(port=engine_port)
        """The state before any request for the page."""
        self._page = self._no_page
        """The state of the page by which the engine was last chosen."""
        self._choice = proc_roots.Choice()
        self._roles: dict[int, Role] = {}
        """The roles of the engine's processes by pid."""
        self._engine_entries: dict[int, ProcEntry] = {}
        """The engine's processes by pid, as they were when it was last chosen."""
        self._options: EngineOptions | None = None

        # What exited runs have left.
        self._orphans: dict[int, ProcEntry] = {}
        """Processes of exited runs of the engine, by pid."""
        self._orphan_pids: frozenset[int] = frozenset()
        """The pids of these and of all processes below them."""
        self._stray_pids: frozenset[int] = frozenset()
        """The pids of processes that an unseen engine left, and of all processes below them."""

        self._sees_others = True
        """Whether processes are visible that are neither above nor below the daemon."""
        self._has_seen_engine = False

    async def read(
        self, timeout_seconds: float, page: EnginePage | Failure | None = None
    ) -> ProcessReadings | Failure:
        """Return the engine's running processes, and what /proc shows of all others; never raise.

        `page` is the result of the last request for the engine's page, None before any request: it
        helps to choose the engine. The result is a failure with the reason TIMEOUT while the
        reading thread is blocked, as on the command line of a process that is stuck in a driver;
        UNAVAILABLE where /proc cannot be read; and HIDDEN where the engine cannot be visible.
        """
        try:
            return await self._worker.call(lambda: self._read(page), timeout_seconds)
        except TimeoutError:
            late = f"{self._proc} did not answer within {timeout_seconds:g} s"
            # Reading a command line takes the lock of that process's memory map, which a hung
            # driver may hold.
            message = f"{late}: look for processes in state D, which a hung driver holds"
            return Failure(source=Source.PROCESS, reason=Reason.TIMEOUT, message=message)
        except OSError as error:
            advice = "mount it, readable for this user"
            return build_unavailable(Source.PROCESS, f"{self._proc} cannot be read", error, advice)

    def _read(self, page: EnginePage | Failure | None) -> ProcessReadings | Failure:
        """Return what `read` does, on the thread; raise OSError where /proc cannot be read.

        A Failure where /proc may hide the engine.
        """
        if self._read_scope is None:
            pids = proc_files.list_pids(self._proc)
            visible_pids = pids
        else:
            scope = self._read_scope()
            pids = scope.own_pids
            visible_pids = scope.visible_pids
        page_state = self._describe_page(page)
        if not visible_pids:
            raise OSError("no process shows, not even the daemon's own")
        # A process of the engine has exited: others may change with it, so all are read again.
        if not pids >= self._roles.keys():
            self._forget_entries()
        engine = self._read_engine(pids, page_state)
        # The same, where the process exited after its pid was listed.
        if len(engine) < len(self._roles):
            self._forget_entries()
            engine = self._read_engine(pids, page_state)
        if engine:
            self._has_seen_engine = True
        # An empty list means that the engine is down, so it must not come from a /proc that hides
        # it.
        if self._is_engine_hidden(pids, engine):
            return HIDDEN
        # A zombie has no command line, so it is no entry: its state alone is read.
        states = {
            pid: proc_files.read_state(self._proc, pid) for pid in pids - self._entries.keys()
        }
        # A pid that was reaped since it was listed is no running process.
        reaped_pids = frozenset(pid for pid, state in states.items() if state is None)
        measured_pids = {process.pid for process in engine}
        return ProcessReadings(
            engine=engine,
            visible_pids=visible_pids - reaped_pids,
            sees_host_pids=self._sees_host_pids,
            ambiguous_engines=self._choice.ambiguous_engines,
            neighbours=frozenset(
                (pid, self._boot_time_seconds + started_seconds)
                for pid, started_seconds in self._choice.neighbours
            ),
            ports=self._choice.ports,
            orphans=self._orphan_pids,
            strays=self._stray_pids,
            exiting=frozenset(self._roles.keys() - measured_pids - reaped_pids),
            zombies=frozenset(
                pid for pid, state in states.items() if state == proc_files.ZOMBIE_STATE
            ),
            options=self._options if engine else None,
            host=read_host(self._proc, engine[0].pid if engine else None),
        )

    def _forget_entries(self) -> None:
        """Make the next scan read every process."""
        self._entries = {}
        self._roles = {}

    def _is_engine_hidden(self, pids: frozenset[int], engine: tuple[EngineProcess, ...]) -> bool:
        """Return whether `engine` is empty because the engine's processes cannot be visible."""
        if self._read_scope is not None or not self._engine_is_here:
            return False
        if engine or self._sees_others:
            return False
        # An engine that was visible has exited; but if pid 1 is gone too, all became invisible.
        return not (self._has_seen_engine and proc_roots.INIT_PID in pids)

    def _describe_page(self, page: EnginePage | Failure | None) -> proc_roots.PageState:
        """Return what the last request for the page shows about the engine's server."""
        if page is None:
            return self._no_page
        if isinstance(page, Failure):
            # On this machine, a refused connection proves that nothing listens on the port.
            is_refused = self._engine_is_here and page.reason is Reason.UNREACHABLE
            return replace(
                self._no_page,
                can_listen=not is_refused,
                is_maybe_other_pods=self._sees_host_pids and self._read_scope is None,
            )
        start_times_seconds = [
            engine.started_at_seconds
            for engine in page.engines
            if engine.started_at_seconds is not None
        ]
        server_start_seconds = None
        if start_times_seconds:
            # Relative to boot, as /proc gives the starts of processes.
            server_start_seconds = min(start_times_seconds) - self._boot_time_seconds
        return replace(
            self._no_page,
            is_answered=bool(page.engines),
            server_start_seconds=server_start_seconds,
        )

    def _read_engine(
        self, pids: frozenset[int], page: proc_roots.PageState
    ) -> tuple[EngineProcess, ...]:
        """Return the engine's processes in the order of their pids, without those that have exited.

        The engine is chosen again where a process or the page's state has changed. Raises OSError
        where /proc cannot be read, or it is unknown whether a process has exited.
        """
        has_changed = self._scan(pids)
        # Choosing costs a walk over all processes: it is done only when something has changed.
        if has_changed or page != self._page:
            self._page = page
            self._find_engine()
        processes = []
        for pid, role in sorted(self._roles.items()):
            process = self._measure(self._entries[pid], role)
            if process is not None:
                processes.append(process)
        return tuple(processes)

    def _scan(self, pids: frozenset[int]) -> bool:
        """Read new processes and a share of the others; return whether any process has changed.

        A process that is read moves to the end of `_entries`, so that all get their turn.
        """
        now_seconds = self._monotonic()
        share = 1.0
        # On a host with thousands of processes a full scan at each tick would be costly.
        if self._rescan_seconds:
            share = (now_seconds - self._scanned_at_seconds) / self._rescan_seconds
        self._scanned_at_seconds = now_seconds

        exited_pids = self._entries.keys() - pids
        new_pids = pids - self._entries.keys()
        for pid in exited_pids:
            del self._entries[pid]

        # Kernel threads never change: they are read once.
        kernel_parent = self._find_kernel_parent()
        known_pids = [
            pid for pid, entry in self._entries.items() if entry.parent_pid != kernel_parent
        ]
        # The oldest entries first: those that are read move to the end.
        due_pids = known_pids[: ceil(share * len(known_pids))]
        has_changed = bool(exited_pids)
        for pid in (*due_pids, *new_pids):
            previous = self._entries.pop(pid, None)
            entry = proc_files.read_entry(self._proc, pid, previous, is_engine=pid in self._roles)
            if entry is not None:
                self._entries[pid] = entry
            if entry != previous:
                has_changed = True
        return has_changed

    def _find_kernel_parent(self) -> int | None:
        """Return the pid of kthreadd, the parent of kernel threads; None where it is not visible.

        In a container, pid 2 is another process.
        """
        process = self._entries.get(proc_files.KTHREADD_PID)
        if process is None:
            return None
        is_kthreadd = process.name == "kthreadd" and process.command == ("kthreadd",)
        return proc_files.KTHREADD_PID if is_kthreadd else None

    def _find_engine(self) -> None:
        """Choose the engine among the scanned processes; find what exited runs have left.

        Sets all fields from `_choice` to `_sees_others`.
        """
        entries = self._entries
        own_pid = proc_files.read_own_pid(self._proc)

        strays = proc_roots.find_strays(entries, self._engine_entries)
        self._stray_pids = proc_roots.add_descendants(entries, strays)
        # By the choice before this scan: a run's orphans are recognised by the engine that left
        # them.
        self._orphans = proc_roots.find_orphans(
            entries,
            self._engine_entries,
            self._orphans,
            self._choice.roots,
            is_page_answered=self._page.is_answered,
        )
        self._orphan_pids = proc_roots.add_descendants(entries, self._orphans)

        leftover_pids = self._orphan_pids | self._stray_pids
        # What exited runs left must not be chosen as the engine.
        candidates = {pid: entry for pid, entry in entries.items() if pid not in leftover_pids}
        self._choice = proc_roots.choose_roots(
            candidates, self._find_served_port, self._page, self._choice
        )
        self._roles = assign_roles(candidates, own_pid, self._choice.roots)
        self._engine_entries = {pid: candidates[pid] for pid in self._roles}
        self._options = self._read_options()
        self._sees_others = sees_other_processes(entries, own_pid)

    def _find_served_port(self, pid: int) -> proc_roots.ServedPort:
        """Return the port of a server, and whether the server can listen at the page's address."""
        can_listen = True
        # An address of this machine is one of the daemon's network namespace.
        if self._engine_is_here and self._read_scope is None:
            can_listen = proc_files.has_same_network(self._proc, pid)
        command = proc_files.read_command(self._proc, pid)
        # The title of a rank hides its command line: then its supervisor's names the first port.
        parent_command = proc_files.read_command(self._proc, self._entries[pid].parent_pid)
        port = find_port(command, self._page.port, parent_command)
        return proc_roots.ServedPort(port, can_listen)

    def _read_options(self) -> EngineOptions | None:
        """Return the options of the engine's server; None where it has none that can be read.

        The title of a rank hides its options: then they are those of the program above it.
        """
        if not self._choice.roots:
            return None
        root_pid = self._choice.roots[0]
        for pid in (root_pid, self._entries[root_pid].parent_pid):
            options = read_options(proc_files.read_command(self._proc, pid))
            if options is not None:
                return options
        return None

    def _measure(self, entry: ProcEntry, role: Role) -> EngineProcess | None:
        """Return a process of the engine with its memory; None where it has exited."""
        usage = proc_files.read_usage(self._proc, entry)
        if usage is None:
            return None
        cpu_pressure_ratio = None
        wait_seconds = None
        waiting_requests = None
        # Once for the engine: pressure and connections are the container's, not a process's.
        if role is Role.API_SERVER and entry.pid in self._choice.roots:
            cpu_pressure_ratio = read_cpu_pressure(self._proc)
            if proc_files.has_same_network(self._proc, entry.pid, default=False):
                waits_seconds = list_waits(self._choice.ports or {self._page.port})
                if waits_seconds is not None:
                    wait_seconds = find_slow_wait(waits_seconds)
                    waiting_requests = count_waiting(waits_seconds)
        return EngineProcess(
            pid=entry.pid,
            role=role,
            rss_bytes=usage.rss_bytes,
            started_at_seconds=self._boot_time_seconds + entry.started_seconds,
            since_boot_seconds=entry.started_seconds,
            cpu_seconds=usage.cpu_seconds,
            **read_parts(self._proc, entry.pid),
            state=usage.state,
            cpu_pressure_ratio=cpu_pressure_ratio,
            wait_seconds=wait_seconds,
            waiting_requests=waiting_requests,
        )

    @cached_property
    def _sees_host_pids(self) -> bool:
        """Whether pids are those of the host; read once, since no process changes its namespace."""
        return proc_files.has_host_pids(self._proc)

    @cached_property
    def _boot_time_seconds(self) -> float:
        """When the machine booted, since the epoch.

        It is read once: setting the clock moves it, and would move the starts of all processes,
        which identify them.
        """
        return read_boot_time(self._proc)
