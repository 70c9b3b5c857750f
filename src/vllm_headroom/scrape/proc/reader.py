"""Use /proc to find and measure the processes of the engine that serves a port."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from enum import IntEnum
from functools import cached_property
from math import ceil, inf
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.model import (
    SAME_START_SECONDS,
    EngineOptions,
    EnginePage,
    EngineProcess,
    Failure,
    ProcessReadings,
)
from vllm_headroom.scrape.proc import files as proc_files
from vllm_headroom.scrape.proc.connections import count_lasting_waits, find_slow_wait, list_waits
from vllm_headroom.scrape.proc.files import ProcEntries, ProcEntry, ProcIdentity
from vllm_headroom.scrape.proc.host import (
    MachineReading,
    read_boot_time,
    read_host_on,
    read_machine_state,
    read_process_parts,
)
from vllm_headroom.scrape.proc.options import read_options
from vllm_headroom.scrape.proc.servers import (
    CommandLine,
    find_role,
    find_server,
    find_server_port,
    is_supervisor,
)
from vllm_headroom.scrape.shortage import build_unavailable
from vllm_headroom.vocabulary import Reason, Role, Source
from vllm_headroom.worker import Caller, Worker

HIDDEN: Final = Failure(
    source=Source.PROCESS,
    reason=Reason.UNAVAILABLE,
    message=(
        "no process but the daemon's own can be seen, though the engine's URL is of this machine:"
        " share the pod's processes (shareProcessNamespace: true), or mount /proc without hidepid"
    ),
)
"""The result if /proc may hide the engine's processes. An empty list of processes would mean that
the engine is down. An empty list therefore requires that the engine was visible before. In
addition, pid 1 must still be visible.
"""

INIT_PID: Final = 1

EXACT_START_SECONDS: Final = 0.2
"""Start times that differ by at most this much are treated as equal. The kernel counts in
hundredths of a second. A larger difference may mean that the clock was set. In that case, the port
is stronger evidence than the start time.
"""

_WAITS_SECONDS: Final = 4.0
"""How long a reading of the waiting requests stays valid. At the usual interval of 5 s, every tick
reads them again. Only waits of SLOW_REQUEST_SECONDS or more are significant.
"""

RAY_TITLE: Final = "ray::"
"""The prefix of the process titles of Ray's actors."""

_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh"})
"""Shells that run a container's entrypoint. A shell adopts the processes that a server in its
process group leaves behind. The shell itself is never an engine.
"""


ListWaits = Callable[[Collection[int]], tuple[float, ...] | None]
"""Returns how many seconds each request to the ports has been waiting. Returns None if the waits
are unknown.
"""


class Scope(Struct, frozen=True, kw_only=True):
    """The processes among which the daemon searches for one of several engines."""

    visible_pids: frozenset[int]
    """The pids of all processes on the machine."""
    own_pids: frozenset[int]
    """The pids of the processes in the engine's pod or unit. A sidecar in the pod would see the
    same processes.
    """
    list_waits: ListWaits
    """Lists the waiting requests, like `connections.list_waits`."""
    machine: MachineReading
    """The state of the machine, which is read once for all engines."""


Roots = tuple[int, ...]
"""The pids of an engine's topmost processes, which have no ancestor in the engine."""


class ServedPort(NamedTuple):
    """The port on which an engine may serve its page."""

    port: int | None
    """The port on the engine's command line, or None if unknown."""
    can_listen: bool
    """Whether the engine can listen on the address of the page."""


class PageState(Struct, frozen=True, kw_only=True):
    """The result of the last request for the engine's page.

    The defaults describe the state before the first request, when nothing is known.
    """

    port: int
    can_listen: bool = True
    """Whether something may be listening on the port."""
    is_answered: bool = False
    """Whether an engine responds on the port."""
    server_start_seconds: float | None = None
    """When the page's server started, in seconds since boot. None if the page does not show the
    start time.
    """
    is_maybe_other_pods: bool = False
    """Whether the request failed while processes of other pods were visible. If so, the only
    visible engine may belong to another pod.
    """


class Choice(Struct, frozen=True, kw_only=True):
    """The chosen engine, and the facts about this choice that the next choice needs."""

    roots: Roots = ()
    """The engine's root processes. Empty if the engine is down. Also empty if it is unknown which
    of several engines serves the page.
    """
    ambiguous_engines: int = 0
    """The number of visible engines while it is unknown which one serves the page. Otherwise, 0."""
    certain_port: ServedPort | None = None
    """The engine's port when the choice was last certain. None if no choice has been certain."""
    servers: frozenset[ProcIdentity] = frozenset()
    """The engine's roots and the API servers directly below them."""
    neighbours: frozenset[ProcIdentity] = frozenset()
    """The roots of all other engines."""
    strangers: frozenset[ProcIdentity] = frozenset()
    """The neighbours at the time when a page's start time last identified the engine."""
    identified_start_seconds: float | None = None
    """The start time by which a page last identified the engine, in seconds since boot."""
    ports: frozenset[int] = frozenset()
    """The engine's port or, if no engine is chosen, the ports of all engines."""


class Candidate(Struct, frozen=True, kw_only=True):
    """An engine that may be serving the page, with the evidence for it."""

    roots: Roots
    root_processes: frozenset[ProcIdentity]
    servers: frozenset[ProcIdentity]
    """The roots and the API servers directly below them. Any of these may serve the page."""
    starts_seconds: tuple[float, ...]
    """The start times of the engine's servers, in seconds since boot. The start time of the first
    root's parent is also included. The page may show any of these times.
    """
    served_port: ServedPort


class StartMatch(IntEnum):
    """How well a start time matches the one on the page."""

    NONE = 0
    NEAR = 1
    """The two times differ by at most SAME_START_SECONDS."""
    EXACT = 2
    """The two times differ by at most EXACT_START_SECONDS."""


class Rank(NamedTuple):
    """How certain it is that an engine serves the page.

    Ranks are compared field by field.
    """

    start_match: StartMatch = StartMatch.NONE
    has_port: bool = False
    """Whether the engine has the page's port and can listen on it. Also true if the engine has the
    port of the last certain choice.
    """
    closeness: float = -inf
    """The negated difference of the engine's and the page's start times, in seconds. The value is
    -inf if the start times do not match.
    """
    may_have_port: bool = False
    """Whether the engine may be reachable at the page's port. The engine may be reachable there if
    its own port is unknown. A proxy or port mapping on the page's port may also forward requests to
    the engine.
    """
    was_chosen: bool = False


NO_EVIDENCE: Final = Rank()
"""The rank of an engine for which there is no evidence. An engine without evidence is never chosen.
"""


class Processes:
    """Finds the processes of the engine that serves `engine_port`, and measures them.

    A new process is read immediately. Every process is read again within `rescan_seconds`. A
    process sets its title only after it has started. Each reading covers a share of the processes,
    to stay short on large hosts. When a process of the engine has exited, all processes are read
    again.

    `engine_is_here` means that the engine's page is served on this machine. In that case, the
    engine's processes must be visible. `read_scope` returns the processes among which to search for
    the engine. Without it, all visible processes are searched. `worker` reads /proc; without it,
    the reader has its own thread.
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
        worker: Caller[ProcessReadings | Failure] | None = None,
    ) -> None:
        self._engine_is_here = engine_is_here
        self._read_scope = read_scope
        self._proc = proc
        self._monotonic = monotonic
        self._rescan_seconds = rescan_seconds
        if worker is None:
            worker = Worker[ProcessReadings | Failure]("processes")
        self._worker = worker

        self._machine = MachineReading()
        """The state of the machine at this reading."""
        self._list_waits: ListWaits = list_waits

        # The fields of the scan.
        self._entries: dict[int, ProcEntry] = {}
        """Every visible process, keyed by its pid. The least recently read one comes first."""
        self._scanned_at_seconds = monotonic()

        # The following fields describe the engine among the scanned processes.
        self._no_page = PageState(port=engine_port)
        """The state of the page before any request for it."""
        self._page = self._no_page
        """The state of the page when the engine was last chosen."""
        self._choice = Choice()
        self._roles: dict[int, Role] = {}
        """The roles of the engine's processes, keyed by pid."""
        self._engine_entries: dict[int, ProcEntry] = {}
        """The engine's processes, keyed by pid, as they were when the engine was last chosen."""
        self._options: EngineOptions | None = None
        self._is_choice_due = True
        """Whether the engine must be chosen again if any process at all changes."""
        self._family_pids: frozenset[int] = frozenset()
        """The pids of the engine's processes and of those left behind by exited runs."""
        self._ancestor_pids: frozenset[int] = frozenset()
        """The pids of all ancestors of any engine's processes."""

        # The following fields describe processes left behind by exited runs.
        self._orphans: dict[int, ProcEntry] = {}
        """Processes of the engine's exited runs, keyed by pid."""
        self._orphan_pids: frozenset[int] = frozenset()
        """The pids of these processes and of all their descendants."""
        self._stray_pids: frozenset[int] = frozenset()
        """The pids of processes left behind by an unobserved engine, and of all their descendants.
        """

        # The requests that are waiting for a response.
        self._waits_seconds: tuple[float, ...] | None = None
        """How many seconds each request has been waiting, or None if unknown."""
        self._waiting_ports: frozenset[int] = frozenset()
        """The engine's ports whose requests were read, or none before the first reading."""
        self._waits_read_at_seconds = 0.0

        self._sees_others = True
        """Whether a process is visible that is neither the daemon's ancestor nor its descendant."""
        self._has_seen_engine = False

    async def read(
        self, timeout_seconds: float, page: EnginePage | Failure | None = None
    ) -> ProcessReadings | Failure:
        """Return the engine's running processes and what /proc shows about others; never raise.

        `page` is the result of the last request for the engine's page, or None. The page helps to
        choose the engine. The result is a Failure in three cases:
        - The reading thread is blocked, as by a hung driver (reason TIMEOUT).
        - /proc cannot be read (reason UNAVAILABLE).
        - /proc may hide the engine (reason HIDDEN).
        """
        try:
            return await self._worker.call(lambda: self._read(page), timeout_seconds)
        except TimeoutError:
            late = f"{self._proc} did not answer within {timeout_seconds:g} s"
            # Reading a command line takes the lock on the process's memory map. A hung driver may
            # be holding this lock.
            message = f"{late}: look for processes in state D, which a hung driver holds"
            return Failure(source=Source.PROCESS, reason=Reason.TIMEOUT, message=message)
        except OSError as error:
            advice = "mount it, readable for this user"
            return build_unavailable(Source.PROCESS, f"{self._proc} cannot be read", error, advice)

    def find_command(self, pid: int) -> CommandLine | None:
        """Return a process's last read command line, or None if it is not visible.

        This method may be called from any thread.
        """
        entry = self._entries.get(pid)
        return None if entry is None else entry.command

    def _read(self, page: EnginePage | Failure | None) -> ProcessReadings | Failure:
        """Do the work of `read` on the thread.

        Raises OSError if /proc cannot be read. Returns a Failure if /proc may hide the engine.
        """
        if self._read_scope is None:
            pids = proc_files.list_pids(self._proc)
            visible_pids = pids
            self._machine = read_machine_state(self._proc)
        else:
            scope = self._read_scope()
            pids = scope.own_pids
            visible_pids = scope.visible_pids
            self._machine = scope.machine
            self._list_waits = scope.list_waits
        page_state = self._describe_page(page)
        if not visible_pids:
            raise OSError("no process shows, not even the daemon's own")
        # A process of the engine has exited. Other processes may have changed too, so all are read
        # again.
        if not pids >= self._roles.keys():
            self._forget_entries()
        engine = self._read_engine(pids, page_state)
        # All processes are also read again if an engine process exited after the listing.
        if len(engine) < len(self._roles):
            self._forget_entries()
            engine = self._read_engine(pids, page_state)
        if engine:
            self._has_seen_engine = True
        # An empty list means that the engine is down. An empty list must not be returned if /proc
        # hides the engine.
        if self._is_engine_hidden(pids, engine):
            return HIDDEN
        # A zombie has no command line and therefore no entry. Only its state is read.
        states = {
            pid: proc_files.read_state(self._proc, pid) for pid in pids - self._entries.keys()
        }
        # A pid that was reaped after the listing has no running process any more.
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
            host=read_host_on(self._machine.memory, self._proc, engine[0].pid if engine else None),
        )

    def _forget_entries(self) -> None:
        """Make the next scan read every process."""
        self._entries = {}
        self._roles = {}
        self._is_choice_due = True

    def _is_engine_hidden(self, pids: frozenset[int], engine: tuple[EngineProcess, ...]) -> bool:
        """Return whether `engine` may be empty only because /proc hides the engine's processes."""
        if self._read_scope is not None or not self._engine_is_here:
            return False
        if engine or self._sees_others:
            return False
        # If the engine was visible before and pid 1 still is, the engine has exited. If pid 1 is
        # gone too, /proc has started to hide all processes.
        return not (self._has_seen_engine and INIT_PID in pids)

    def _describe_page(self, page: EnginePage | Failure | None) -> PageState:
        """Return what the last request for the page shows about the server."""
        if page is None:
            return self._no_page
        if isinstance(page, Failure):
            # On this machine, a refused connection proves that nothing is listening on the port.
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
            # The time is converted to seconds since boot, like the start times in /proc.
            server_start_seconds = min(start_times_seconds) - self._boot_time_seconds
        return replace(
            self._no_page,
            is_answered=bool(page.engines),
            server_start_seconds=server_start_seconds,
        )

    def _read_engine(self, pids: frozenset[int], page: PageState) -> tuple[EngineProcess, ...]:
        """Return the engine's processes sorted by pid, without those that have exited.

        If a relevant process or the page's state has changed, the engine is chosen again. Raises
        OSError if /proc cannot be read. Also raises it if it is unknown whether a process has
        exited.
        """
        changed_processes = self._scan(pids)
        # Choosing the engine requires walking over all processes. On a busy machine, some process
        # starts or exits on every tick. Therefore, the engine is chosen again only if a change may
        # concern an engine.
        concerns_engine = any(self._may_concern_engine(process) for process in changed_processes)
        if concerns_engine or page != self._page:
            self._page = page
            self._find_engine()
        elif changed_processes:
            own_pid = proc_files.read_own_pid(self._proc)
            self._sees_others = sees_other_processes(self._entries, own_pid)
        processes = []
        for pid, role in sorted(self._roles.items()):
            process = self._measure(self._entries[pid], role)
            if process is not None:
                processes.append(process)
        return tuple(processes)

    def _may_concern_engine(self, process: ProcEntry) -> bool:
        """Return whether a process may affect, or may have affected, the choice of the engine.

        A process affects the choice if it is or was part of an engine. Ancestors and descendants of
        an engine's process also affect the choice.
        """
        if self._is_choice_due or process.role is not None:
            return True
        return process.pid in self._ancestor_pids or not self._family_pids.isdisjoint(
            (process.pid, process.parent_pid)
        )

    def _scan(self, pids: frozenset[int]) -> list[ProcEntry]:
        """Read new processes and a share of the others; return both entries of changed ones.

        A process that was read moves to the end of `_entries`. Every process is thus read in turn.
        """
        now_seconds = self._monotonic()
        share = 1.0
        # On a host with thousands of processes, a full scan each tick is expensive.
        if self._rescan_seconds:
            share = (now_seconds - self._scanned_at_seconds) / self._rescan_seconds
        self._scanned_at_seconds = now_seconds

        exited_pids = self._entries.keys() - pids
        new_pids = pids - self._entries.keys()
        changed_processes = [self._entries.pop(pid) for pid in exited_pids]

        # Kernel threads never change, so they are read only once.
        kernel_parent = self._find_kernel_parent()
        known_pids = [
            pid for pid, entry in self._entries.items() if entry.parent_pid != kernel_parent
        ]
        # The least recently read entries come first, because entries move to the end when read.
        due_pids = known_pids[: ceil(share * len(known_pids))]
        for pid in (*due_pids, *new_pids):
            previous = self._entries.pop(pid, None)
            entry = proc_files.read_entry(self._proc, pid, previous, is_engine=pid in self._roles)
            # Zombies and processes that exited after they were listed have no entry.
            if entry is not None:
                self._entries[pid] = entry
            if entry == previous:
                continue
            if previous is not None:
                changed_processes.append(previous)
            if entry is not None:
                changed_processes.append(entry)
        return changed_processes

    def _find_kernel_parent(self) -> int | None:
        """Return the pid of kthreadd, the parent of kernel threads.

        In a container, pid 2 is a different process. Returns None if kthreadd is not visible.
        """
        process = self._entries.get(proc_files.KTHREADD_PID)
        if process is None:
            return None
        is_kthreadd = process.name == "kthreadd" and process.command == ("kthreadd",)
        return proc_files.KTHREADD_PID if is_kthreadd else None

    def _find_engine(self) -> None:
        """Choose the engine among the scanned processes, and find what exited runs left behind.

        Sets the fields about the engine and about leftover processes, and `_sees_others`.
        """
        entries = self._entries
        own_pid = proc_files.read_own_pid(self._proc)
        previous_result = (self._choice, self._engine_entries, self._orphans, self._stray_pids)

        strays = find_strays(entries, self._engine_entries)
        self._stray_pids = add_descendants(entries, strays)
        # The previous choice is used. A run's orphans are identified by the engine that left them
        # behind.
        self._orphans = find_orphans(
            entries,
            self._engine_entries,
            self._orphans,
            self._choice.roots,
            is_page_answered=self._page.is_answered,
        )
        self._orphan_pids = add_descendants(entries, self._orphans)

        leftover_pids = self._orphan_pids | self._stray_pids
        # Processes left behind by exited runs must not be chosen as the engine.
        candidates = {pid: entry for pid, entry in entries.items() if pid not in leftover_pids}
        self._choice = choose_roots(candidates, self._find_served_port, self._page, self._choice)
        self._roles = assign_roles(candidates, own_pid, self._choice.roots)
        self._engine_entries = {pid: candidates[pid] for pid in self._roles}
        self._options = self._read_options()
        self._sees_others = sees_other_processes(entries, own_pid)

        # A choice depends on the previous one. The choice must be repeated until it no longer
        # changes.
        result = (self._choice, self._engine_entries, self._orphans, self._stray_pids)
        self._is_choice_due = result != previous_result
        self._family_pids = leftover_pids | self._roles.keys()
        ancestor_pids: set[int] = set()
        for pid, process in entries.items():
            if process.role is not None:
                ancestor_pids |= {process.parent_pid} | list_ancestors(entries, pid)
        self._ancestor_pids = frozenset(ancestor_pids)

    def _find_served_port(self, pid: int) -> ServedPort:
        """Return a server's port, and whether it can listen on the page's address."""
        can_listen = True
        # An address of this machine belongs to the daemon's network namespace.
        if self._engine_is_here and self._read_scope is None:
            can_listen = proc_files.has_same_network(self._proc, pid)
        command = proc_files.read_command(self._proc, pid)
        # A rank's title hides its command line. The command line of the rank's supervisor contains
        # the first port.
        parent_command = proc_files.read_command(self._proc, self._entries[pid].parent_pid)
        port = find_server_port(command, self._page.port, parent_command)
        return ServedPort(port, can_listen)

    def _read_options(self) -> EngineOptions | None:
        """Return the options of the engine's server, or None if they cannot be read.

        A rank's title hides its options, so its parent's options are used instead.
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
        """Return a process of the engine with its memory, or None if it has exited.

        Raises OSError if it is unknown whether the process has exited.
        """
        usage = proc_files.read_usage(self._proc, entry)
        if usage is None:
            return None
        # A process that has released its memory is exiting, even though it is still listed.
        if usage.state == proc_files.ZOMBIE_STATE or usage.rss_bytes == 0:
            return None
        cpu_pressure_ratio = None
        wait_seconds = None
        waiting_requests = None
        # Only the first API server gets these values. The machine's pressure does not belong to a
        # single process. Nor do the connections to the engine's ports. If several servers had these
        # values, the values would be added up.
        if entry.pid == self._find_first_server():
            cpu_pressure_ratio = self._machine.cpu_pressure_ratio
            if proc_files.has_same_network(self._proc, entry.pid, default=False):
                waits_seconds = self._read_waits(self._choice.ports or frozenset({self._page.port}))
                if waits_seconds is not None:
                    wait_seconds = find_slow_wait(waits_seconds)
                    waiting_requests = count_lasting_waits(waits_seconds)
        return EngineProcess(
            pid=entry.pid,
            role=role,
            rss_bytes=usage.rss_bytes,
            started_at_seconds=self._boot_time_seconds + entry.started_seconds,
            since_boot_seconds=entry.started_seconds,
            cpu_seconds=usage.cpu_seconds,
            **read_process_parts(self._proc, entry.pid),
            state=usage.state,
            cpu_pressure_ratio=cpu_pressure_ratio,
            wait_seconds=wait_seconds,
            waiting_requests=waiting_requests,
        )

    def _read_waits(self, ports: frozenset[int]) -> tuple[float, ...] | None:
        """Return how many seconds each request to these ports has been waiting.

        A reading takes 0.7 ms, because the kernel walks the connections of the whole machine. The
        result is therefore reused for _WAITS_SECONDS. Returns None if the waits are unknown.
        """
        now_seconds = self._monotonic()
        is_due = now_seconds - self._waits_read_at_seconds >= _WAITS_SECONDS
        if is_due or ports != self._waiting_ports:
            self._waits_seconds = self._list_waits(ports)
            self._waiting_ports = ports
            self._waits_read_at_seconds = now_seconds
        return self._waits_seconds

    def _find_first_server(self) -> int | None:
        """Return the pid of the engine's first root that is an API server, or None."""
        for pid in self._choice.roots:
            if self._roles.get(pid) is Role.API_SERVER:
                return pid
        return None

    @cached_property
    def _sees_host_pids(self) -> bool:
        """Return whether the visible pids are those of the host.

        The namespace is read only once, because a process never changes its PID namespace.
        """
        return proc_files.has_host_pids(self._proc)

    @cached_property
    def _boot_time_seconds(self) -> float:
        """Return when the machine booted, in seconds since the epoch.

        The boot time is read only once. Setting the clock changes the boot time, and a changed boot
        time would change the start times that identify processes.
        """
        return read_boot_time(self._proc)


def sees_other_processes(entries: ProcEntries, own_pid: int) -> bool:
    """Return whether any visible process is neither an ancestor nor a descendant of the daemon.

    Returns False if pid 1 is not visible, as with hidepid. In that case, only processes of the
    daemon's user are visible. Seeing another process of this user does not prove that the engine's
    processes would be visible.
    """
    if INIT_PID not in entries:
        return False
    own_line = {own_pid}
    # The daemon's ancestors and descendants are in its own container and prove nothing.
    if own_pid in entries:
        own_line |= list_ancestors(entries, own_pid)
    for pid in entries:
        if pid not in own_line and own_pid not in list_ancestors(entries, pid):
            return True
    return False


def find_strays(entries: ProcEntries, engine: Collection[int]) -> set[int]:
    """Return the pids of cores and workers left behind by an unobserved engine.

    The result does not contain:

    - Processes of the watched engine.
    - Ray's actors, because their parent is always Ray's daemon.
    - Processes that belong to a running API server.
    """
    # A family of processes with an adopted API server is still serving.
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
        # A process gets another parent when its parent exits, so its engine is gone.
        if _is_adopted(process, entries.get(process.parent_pid)):
            strays.add(pid)
    return strays


def _is_adopted(process: ProcEntry, parent: ProcEntry | None) -> bool:
    """Return whether a process lost its parent and got one that adopts orphans."""
    if parent is None or parent.role:
        return False
    # An engine's processes share their parent's process group.
    return parent.group != process.group or parent.name in _SHELLS


def find_orphans(
    entries: ProcEntries,
    engine: ProcEntries,
    previous_orphans: ProcEntries,
    roots: Iterable[int],
    *,
    is_page_answered: bool,
) -> dict[int, ProcEntry]:
    """Return the processes of an exited run that still exist, keyed by pid.

    A process that was an orphan before remains one. Another process of the engine is an orphan if
    it has no running root. The root may be the process itself or an ancestor. While the engine is
    running, the result is empty, even if the process that started the engine has exited. `engine`
    contains the engine's processes as last read, including its roots. `roots` contains its last
    roots.
    """
    survivors: dict[int, ProcEntry] = {}
    for pid, process in {**previous_orphans, **engine}.items():
        current = entries.get(pid)
        if current is not None and current.identity == process.identity:
            survivors[pid] = current
    # A root that is not an API server was started by its parent. If that parent is gone, the root
    # is an orphan. The orphan's parent is now init or another process that adopts orphans.
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
        # The engine keeps running without the process that started it, as seen in vLLM 0.32 with
        # two API servers.
        return {}
    # The engine no longer has an API server, so whatever is still running serves nobody.
    if not has_server and _has_api_server(engine, engine):
        running_roots = set()
    orphans: dict[int, ProcEntry] = {}
    for pid, process in survivors.items():
        line_of_descent = {pid} | list_ancestors(entries, pid)
        if pid in previous_orphans or running_roots.isdisjoint(line_of_descent):
            orphans[pid] = process
    return orphans


def choose_roots(
    entries: ProcEntries,
    find_served: Callable[[int], ServedPort],
    page: PageState,
    previous: Choice,
) -> Choice:
    """Choose the process trees that belong to the engine, given the previous choice.

    The visible engine with the highest rank is chosen. `find_served` returns the port of the server
    with a given pid. The choice has no roots in three cases:

    - There is no evidence for any visible engine.
    - Two engines share the highest rank.
    - The only evidence is a guess.
    """
    tops = _find_tops(entries)
    ray_actors = tuple(pid for pid in tops if _is_ray_actor(entries[pid]))
    # Ray's actors descend from Ray, not from their engine. Ray's actors therefore do not form an
    # engine.
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
    # The only visible engine may belong to another pod, so wait until the page responds.
    is_guess = page.is_maybe_other_pods and is_first_choice and not is_certain
    # If there is only one engine, Ray's actors belong to it. If there are several engines, it is
    # unknown to which of them the actors belong.
    has_unowned_actors = bool(ray_actors) and len(candidates) > 1
    if len(best_candidates) != 1 or is_guess or has_unowned_actors:
        # If there is no other engine and something is listening, the actors are the engine.
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
    # Only a page that shows its server's start time distinguishes the engine from other servers.
    if best_rank.start_match is StartMatch.NONE:
        return replace(
            choice,
            strangers=previous.strangers & _list_root_processes(candidates),
            identified_start_seconds=previous.identified_start_seconds,
        )
    return replace(choice, strangers=neighbours, identified_start_seconds=page.server_start_seconds)


def list_servers(entries: ProcEntries) -> list[int]:
    """Return the sorted pids of the first roots of engines with an API server.

    Engines without an API server, such as a program that embeds vLLM, are omitted.
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

    `roots` contains Ray's actors if the whole engine consists of them. If not, `roots` is empty.
    The identity of the previous engine is kept, so that the engine is recognised when it becomes
    visible again.
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
    """Return the sorted pids of engine processes that have no engine process as an ancestor.

    A supervisor that only starts ranks is not regarded as an engine process. Each of the
    supervisor's ranks is an engine with its own port.
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
    """Return the roots of each engine among `tops`.

    Some of `tops` may not belong to an engine. A server is the only root of its engine, and so is a
    supervisor's rank. Other processes with the same parent and process group are the roots of one
    engine. If `tops` contains a server or a rank, an engine needs an API server.
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
        # If there is no server, a program embeds vLLM. Cores and workers with the same parent
        # belong to one program that embeds vLLM.
        return list(families.values())
    # If there is a server, an engine core without a server is a leftover. Attributing the core's
    # memory to the engine would hide the leak. A family with an API server is still serving. The
    # process that started the family may have exited.
    engines.extend(roots for roots in families.values() if _has_api_server(entries, roots))
    return engines


def _has_api_server(entries: ProcEntries, pids: Iterable[int]) -> bool:
    return any(entries[pid].role is Role.API_SERVER for pid in pids)


def _is_api_server(process: ProcEntry) -> bool:
    """Return whether a process serves the page. A supervisor has the same role but does not."""
    return process.role is Role.API_SERVER and not is_supervisor(process.command)


def _describe_candidate(entries: ProcEntries, roots: Roots, served_port: ServedPort) -> Candidate:
    """Return an engine with its servers and the start times its page may show."""
    root_processes = [entries[pid] for pid in roots]
    servers = list(root_processes)
    for process in entries.values():
        if process.parent_pid in roots and _is_api_server(process):
            servers.append(process)  # noqa: PERF401 - a list for two conditions reads worse
    starts_seconds = [process.started_seconds for process in servers]
    # `vllm serve` may be the parent of several servers. The page may show its start time.
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
    """Return how certain it is that this engine serves the page, or NO_EVIDENCE."""
    is_first_choice = previous.certain_port is None
    was_chosen = not candidate.root_processes.isdisjoint(previous.servers)
    page_port = ServedPort(page.port, can_listen=True)
    has_port = candidate.served_port in {page_port, previous.certain_port}

    closeness = _measure_closeness(candidate, page)
    # A start time identifies one engine. The page may still show the start time of the previous
    # choice. In that case, the page may be the last page of the previous engine. The last page of
    # one engine is not evidence for another engine.
    is_start_taken = page.server_start_seconds == previous.identified_start_seconds
    if is_start_taken and not was_chosen:
        closeness = -inf
    start_rank = Rank(start_match=_match_start(closeness), closeness=closeness)

    # This engine was already visible when a page showed another engine's start time. Only a page
    # with this engine's start time is evidence for it.
    if not candidate.root_processes.isdisjoint(previous.strangers):
        return start_rank
    # A page with a start time is not evidence for an engine with another one. The exception
    # is an engine with the page's port. Setting the clock changes the start time on the page.
    if page.server_start_seconds is not None and is_first_choice and not has_port:
        return start_rank
    is_port_unknown = candidate.served_port == ServedPort(None, can_listen=True)
    return start_rank._replace(
        has_port=has_port,
        may_have_port=is_first_choice and (page.can_listen or is_port_unknown),
        was_chosen=was_chosen,
    )


def _measure_closeness(candidate: Candidate, page: PageState) -> float:
    """Return the negated difference between the start times of page and candidate, in seconds.

    If the candidate has several start times, the one closest to the page's is used. Returns -inf if
    the two are too far apart to match. Also returns -inf if the page shows no start time.
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


def assign_roles(entries: ProcEntries, own_pid: int, roots: Iterable[int]) -> dict[int, Role]:
    """Return the roles of an engine's `roots` and of all their descendants, keyed by pid.

    The daemon may be a descendant of the engine's entrypoint. The daemon and its descendants are
    omitted. A process without a known title has the role OTHER.
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
            roles[pid] = Role.OTHER  # The process is a fork that has not set its own title yet.
        else:
            # vLLM's titles may have a configured prefix (VLLM_PROCESS_NAME_PREFIX).
            title = f"VLLM::{process.command[0].partition('::')[2]}"
            roles[pid] = process.role or find_role((title,)) or Role.OTHER
        pending_pids.extend(children[pid])
    return roles


def list_ancestors(entries: ProcEntries, pid: int) -> set[int]:
    """Return the pids of all ancestors of a process."""
    ancestors: set[int] = set()
    parent = entries[pid].parent_pid
    # A pid that is reused between two reads can create a cycle.
    while parent in entries and parent not in ancestors | {pid}:
        ancestors.add(parent)
        parent = entries[parent].parent_pid
    return ancestors


def add_descendants(entries: ProcEntries, pids: Collection[int]) -> frozenset[int]:
    """Return the pids that still exist, along with the pids of all their descendants.

    Descendants of a pid that has exited are included too.
    """
    if not pids:
        return frozenset()
    family = {pid for pid in pids if pid in entries}
    for pid in entries:
        if not list_ancestors(entries, pid).isdisjoint(pids):
            family.add(pid)
    return frozenset(family)
