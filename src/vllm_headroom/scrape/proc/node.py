"""Find every engine on a machine, and each engine's processes, from /proc alone."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from threading import Lock
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.model import EngineName
from vllm_headroom.scrape.pods import CONTAINER_LOGS, POD_LOGS, ContainerNames
from vllm_headroom.scrape.proc import files as proc_files
from vllm_headroom.scrape.proc.connections import list_waits_by_port
from vllm_headroom.scrape.proc.files import ProcEntry
from vllm_headroom.scrape.proc.host import MachineReading, read_machine_state
from vllm_headroom.scrape.proc.names import ProcessNames
from vllm_headroom.scrape.proc.network import (
    Network,
    format_authority,
    identify_network,
    read_network,
)
from vllm_headroom.scrape.proc.owners import Owner, read_owner
from vllm_headroom.scrape.proc.reader import Scope, list_servers
from vllm_headroom.scrape.proc.servers import (
    CommandLine,
    find_default_port,
    find_server,
    find_server_port,
)
from vllm_headroom.vocabulary import EngineKind
from vllm_headroom.worker import Worker

SIDECAR_PORT: Final = 9839
"""A sidecar's default port. If this port is open in an engine's network, the engine has its own
sidecar.
"""

RESCAN_SECONDS: Final = 15.0
"""Every process is read again within this time, as in Processes. A process sets its title and is
moved into its container's cgroup only after it has started.
"""

MOST_NODE_ENGINES: Final = 64
"""The maximum number of engines that a daemon watches. We chose eight per GPU of a typical node. An
engine's page has about 300 series.
"""

_TLS_OPTIONS: Final = ("--ssl-certfile", "--ssl-keyfile")
"""If one of these is set, vLLM and SGLang serve https."""


class LocatedEngine(Struct, frozen=True, kw_only=True):
    """An engine on this machine.

    An engine has either the URL of its page or the reason why the engine cannot be watched.
    """

    kind: EngineKind
    key: str
    """Identifies the engine across restarts, as long as its pod or unit exists."""
    owner_key: str
    """The key of the pod or unit to which the engine's processes belong."""
    name: EngineName
    port: int = 0
    """The port on which the engine serves, or 0 if unknown."""
    page_url: str = ""
    """The URL of the engine's page, or "" if the engine cannot be watched."""
    problem: str = ""
    """Why the engine cannot be watched, as a clause. Empty if it can be watched, or if its own
    sidecar watches it.
    """


class Location(Struct, frozen=True, kw_only=True):
    """The location of an engine, and the data from which it was determined."""

    engine: LocatedEngine
    entry: ProcEntry | None
    """The server's process. If the process changes, the engine must be located again."""
    owner: Owner
    is_unit_shared: bool

    def is_of(self, entry: ProcEntry | None, owner: Owner, *, is_unit_shared: bool) -> bool:
        """Return whether this location was determined from these arguments."""
        return (self.entry, self.owner, self.is_unit_shared) == (entry, owner, is_unit_shared)


class NodeProcesses:
    """Remembers the owners of all processes on a machine, and finds the engines.

    `usual_container` is the usual name of an engine's container.
    """

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        container_logs: Path = CONTAINER_LOGS,
        pod_logs: Path = POD_LOGS,
        usual_container: str = "vllm",
        monotonic: Callable[[], float],
        rescan_seconds: float = RESCAN_SECONDS,
    ) -> None:
        self._proc = proc
        self._names = ContainerNames(usual_container, container_logs, pod_logs)
        self._monotonic = monotonic
        self._rescan_seconds = rescan_seconds
        # The reader has two threads. Reading a command line may hang if a driver is stuck. Reading
        # a cgroup does not hang.
        self._scanner = Worker[None]("node")
        self._finder = Worker[tuple[LocatedEngine, ...]]("engines")
        self._machine = MachineReading()
        """The state of the machine at the last scan. Nothing is known until the scan has ended."""
        self._waits_lock = Lock()
        self._are_waits_due = True
        """Whether no engine has asked for waiting requests since the last scan."""
        self._waits_by_port: Mapping[int, tuple[float, ...]] | None = None
        """How many seconds each request has been waiting, by port, or None if unknown."""
        self._pids: frozenset[int] = frozenset()
        self._owners: dict[int, Owner | None] = {}
        """The owner of each process. The least recently read one comes first."""
        self._scanned_at_seconds = monotonic()
        self._pids_by_owner: Mapping[str, frozenset[int]] = {}
        self._entries: dict[int, ProcEntry] = {}
        """Each process, keyed by its pid. The least recently read one comes first."""
        self._found_at_seconds = monotonic()
        self._shared_units: set[str] = set()
        """The keys of units with several servers. The name of such a unit does not identify a
        single engine.
        """
        self._locations: dict[int, Location] = {}
        """Where each engine was found, keyed by the pid of its server."""
        self._located_at_seconds = monotonic()
        """When all engines were last located, on the monotonic clock."""
        self._networks: dict[tuple[int, int], Network | None] = {}
        """The networks read during the current search, by namespace."""

    @property
    def sees_host(self) -> bool:
        """Return whether the processes of the whole machine are visible."""
        return proc_files.has_host_pids(self._proc)

    @property
    def names(self) -> ProcessNames:
        """Return human-readable names of all processes on the machine."""
        return ProcessNames(self._find_command, self._names, self._proc)

    def has_processes(self, owner_key: str) -> bool:
        """Return whether any process of a pod or unit existed at the last scan."""
        return owner_key in self._pids_by_owner

    def read_scope(self, owner_key: str) -> Scope:
        """Return the processes of a pod or unit at the last scan.

        The result also has the state of the machine.
        """
        own_pids = self._pids_by_owner.get(owner_key, frozenset())
        return Scope(
            visible_pids=self._pids,
            own_pids=own_pids,
            list_waits=self._list_waits,
            machine=self._machine,
        )

    async def scan(self, timeout_seconds: float) -> None:
        """Read the owners of all processes, and the state of the machine.

        Raises TimeoutError if reading takes too long, and OSError if there is no /proc.
        """
        # If the scan fails, the machine's state is unknown rather than outdated.
        self._machine = MachineReading()
        self._are_waits_due = True
        await self._scanner.call(self._scan, timeout_seconds)

    async def find_engines(self, timeout_seconds: float) -> tuple[LocatedEngine, ...]:
        """Return the engines among the processes found by the last scan.

        Raises TimeoutError if this or an earlier call is stuck. Raises OSError if there is no
        /proc.
        """
        return await self._finder.call(self._find_engines, timeout_seconds)

    def _list_waits(self, ports: Collection[int]) -> tuple[float, ...] | None:
        """Return how many seconds each request to these ports has been waiting.

        Only requests in the daemon's own network are visible. All requests are read only once per
        scan, because each reading walks the connections of the whole machine. This method may run
        on several threads at once. Returns None if the waits are unknown.
        """
        with self._waits_lock:
            if self._are_waits_due:
                self._are_waits_due = False
                self._waits_by_port = list_waits_by_port()
            waits_by_port = self._waits_by_port
        if waits_by_port is None:
            return None
        waits_seconds: list[float] = []
        for port in ports:
            waits_seconds += waits_by_port.get(port, ())
        return tuple(waits_seconds)

    def _find_command(self, pid: int) -> CommandLine | None:
        """Return a process's command line as last read, or None if it is unknown."""
        entry = self._entries.get(pid)
        return None if entry is None else entry.command

    def _scan(self) -> None:
        """Read the cgroups of new processes and of a share of the others."""
        now_seconds = self._monotonic()
        pids = proc_files.list_pids(self._proc)
        # The least recently read processes come first. Each process is therefore read within the
        # rescan time.
        due_pids = _choose_due(self._owners, pids, self._measure_share(self._scanned_at_seconds))
        self._scanned_at_seconds = now_seconds
        for pid in due_pids:
            self._owners.pop(pid, None)
            self._owners[pid] = read_owner(self._proc, pid)
        pids_by_owner: defaultdict[str, set[int]] = defaultdict(set)
        for pid, owner in self._owners.items():
            if owner is not None:
                pids_by_owner[owner.key].add(pid)
        self._pids_by_owner = {
            key: frozenset(owner_pids) for key, owner_pids in pids_by_owner.items()
        }
        self._pids = pids
        self._machine = read_machine_state(self._proc)

    def _measure_share(self, last_seconds: float) -> float:
        """Return the share of processes to read, given the time of the last reading."""
        if not self._rescan_seconds:
            return 1.0
        return (self._monotonic() - last_seconds) / self._rescan_seconds

    def _find_engines(self) -> tuple[LocatedEngine, ...]:
        """Return the engines that /proc shows now; at most MOST_NODE_ENGINES of them are watched.

        Raises OSError if there is no /proc.
        """
        self._read_entries()
        own_pid = proc_files.read_own_pid(self._proc)
        engines: list[LocatedEngine] = []
        self._shared_units &= self._pids_by_owner.keys()
        self._forget_locations()
        for owner_key, pids in self._pids_by_owner.items():
            entries = {pid: self._entries[pid] for pid in pids if pid in self._entries}
            # This is the fast path: most groups do not contain an engine process.
            if not any(entry.role for entry in entries.values()):
                continue
            servers = [pid for pid in list_servers(entries) if pid != own_pid]
            engines += self._locate_group(owner_key, servers)
        return _limit(engines)

    def _forget_locations(self) -> None:
        """Forget the locations of exited engines and, from time to time, those of all engines.

        Once per rescan time, all engines are located in one search. The search reads each network
        only once.
        """
        self._networks = {}
        for pid in self._locations.keys() - self._entries.keys():
            del self._locations[pid]
        now_seconds = self._monotonic()
        if now_seconds - self._located_at_seconds >= self._rescan_seconds:
            self._located_at_seconds = now_seconds
            self._locations = {}

    def _read_network(self, pid: int) -> Network | None:
        """Return the network of a process; each network is read only once per search."""
        identity = identify_network(self._proc, pid)
        if identity is None:
            return read_network(self._proc, pid)
        # Reading a network takes milliseconds, because the kernel walks the connections of the
        # whole machine.
        if identity not in self._networks:
            self._networks[identity] = read_network(self._proc, pid)
        return self._networks[identity]

    def _read_entries(self) -> None:
        """Read new processes and a share of the others, with their command lines."""
        pids = self._pids
        due_pids = _choose_due(self._entries, pids, self._measure_share(self._found_at_seconds))
        self._found_at_seconds = self._monotonic()
        for pid in due_pids:
            previous = self._entries.pop(pid, None)
            entry = proc_files.read_entry(self._proc, pid, previous)
            if entry is not None:
                self._entries[pid] = entry

    def _locate_group(self, owner_key: str, servers: Sequence[int]) -> Iterator[LocatedEngine]:
        """Yield the engines of a pod or unit.

        If several engines have the same name, only one of them is watched.
        """
        # The unit stays shared even while only one of its servers is running. An engine's name must
        # not change.
        if len(servers) > 1:
            self._shared_units.add(owner_key)
        names: set[EngineName] = set()
        for pid in servers:
            owner = self._owners.get(pid)
            if owner is None:
                continue
            engine = self._find_location(owner_key, owner, pid).engine
            # Two servers in one container have the same labels, so their series would collide.
            if engine.name in names and engine.kind is EngineKind.WATCHED:
                engine = _refuse(engine, "another server in the same container is watched already")
            names.add(engine.name)
            yield engine

    def _find_location(self, owner_key: str, owner: Owner, pid: int) -> Location:
        """Return where an engine is.

        The engine is located again if its location was forgotten or its data changed.
        """
        entry = self._entries.get(pid)
        is_unit_shared = owner_key in self._shared_units
        location = self._locations.get(pid)
        if location is not None and location.is_of(entry, owner, is_unit_shared=is_unit_shared):
            return location
        location = Location(
            engine=self._locate(owner_key, owner, pid),
            entry=entry,
            owner=owner,
            is_unit_shared=is_unit_shared,
        )
        self._locations[pid] = location
        return location

    def _locate(self, owner_key: str, owner: Owner, pid: int) -> LocatedEngine:
        """Return the engine whose server has this pid, or why the engine cannot be watched."""
        command = proc_files.read_command(self._proc, pid)
        network = self._read_network(pid)
        port = self._find_port(pid, command, network)
        is_own_network = proc_files.has_same_network(self._proc, pid, default=False)
        page_path = "/metrics"
        server = find_server(command) if command else None
        if server is not None:
            page_path = server.page_path
        scheme = "http"
        if any(argument.startswith(_TLS_OPTIONS) for argument in command):
            scheme = "https"
        address = None
        if network is not None and port is not None:
            address = network.find_address(port, is_own=is_own_network)
        page_url = ""
        if address is not None and port is not None:
            page_url = f"{scheme}://{format_authority(address, port)}{page_path}"
        # The engine keeps this name even while the unit's other server is down.
        if owner_key in self._shared_units:
            owner = replace(owner, unit=None)
        name = self._build_name(owner, page_url or f"pid {pid}")
        engine = LocatedEngine(
            kind=EngineKind.WATCHED,
            key=f"{owner_key}:{port or 0}",
            owner_key=owner_key,
            name=name,
            port=port or 0,
            page_url=page_url,
        )
        if network is None:
            return _refuse(engine, f"the network of its pid {pid} cannot be read in /proc")
        if SIDECAR_PORT in network.ports and not is_own_network:
            return LocatedEngine(
                kind=EngineKind.OWN_SIDECAR,
                key=engine.key,
                owner_key=owner_key,
                name=name,
                port=engine.port,
            )
        if port is None:
            return _refuse(
                engine,
                "its port is neither on its command line nor the only one that listens: start it"
                " with --port",
            )
        # The server is listening, but not on any address that can be reached from here.
        if address is None and port in {bound_port for _, bound_port in network.listening}:
            return _refuse(
                engine, f"its port {port} listens on 127.0.0.1 only: start it with --host 0.0.0.0"
            )
        if address is None:
            return _refuse(engine, "its network has no address that can be reached")
        return engine

    def _find_port(self, pid: int, command: CommandLine, network: Network | None) -> int | None:
        """Return the port on a server's command line.

        If the command line sets no port, returns the only listening port. If several ports are
        listening, returns the default port. Returns None if no port is known. A rank's title hides
        its command line, so its parent's command line is used.
        """
        entry = self._entries.get(pid)
        parent_command: CommandLine = ()
        if entry is not None:
            parent_command = proc_files.read_command(self._proc, entry.parent_pid)
        port = find_server_port(command, None, parent_command)
        listening_ports = frozenset[int]()
        if network is not None:
            listening_ports = network.ports - {SIDECAR_PORT}
        # If an environment variable can set the port, the port may differ from the default.
        is_confirmed = port in listening_ports or not listening_ports
        if port is not None and (is_confirmed or not _may_be_elsewhere(command)):
            return port
        if len(listening_ports) == 1:
            return next(iter(listening_ports))
        default_port = find_default_port(command) if command else None
        return default_port if default_port in listening_ports else port

    def _build_name(self, owner: Owner, page_url: str) -> EngineName:
        """Return the names of an engine.

        `page_url` is used if the engine has no pod or unit.
        """
        if owner.pod_uid is None:
            return EngineName(unit=owner.unit, engine_url="" if owner.unit else page_url)
        name = self._names.find(owner.pod_uid, owner.container_id)
        if name is None:
            return EngineName(pod=owner.pod_uid)
        return EngineName(namespace=name.namespace, pod=name.pod, container=name.container)


def _choose_due(
    readings: dict[int, ProcEntry] | dict[int, Owner | None], pids: frozenset[int], share: float
) -> list[int]:
    """Return the pids to read now: new ones and the least recently read ones.

    Pids that no longer exist are removed from `readings`.
    """
    for pid in readings.keys() - pids:
        del readings[pid]
    known_pids = list(readings)
    due_count = ceil(share * len(known_pids))
    return [*known_pids[:due_count], *(pids - readings.keys())]


def _may_be_elsewhere(command: CommandLine) -> bool:
    """Return whether an environment variable may have set a port other than the default."""
    server = find_server(command) if command else None
    return server is not None and bool(server.port_variable)


def _refuse(engine: LocatedEngine, problem: str) -> LocatedEngine:
    """Return an engine that is not watched, with the reason."""
    return LocatedEngine(
        kind=EngineKind.UNREADABLE,
        key=engine.key,
        owner_key=engine.owner_key,
        name=engine.name,
        port=engine.port,
        problem=problem,
    )


def _limit(engines: list[LocatedEngine]) -> tuple[LocatedEngine, ...]:
    """Return the engines; mark those beyond MOST_NODE_ENGINES as not watched."""
    limited: list[LocatedEngine] = []
    watched = 0
    # The engines are sorted, so that the same engines are watched on every tick.
    for engine in sorted(engines, key=lambda engine: engine.key):
        if engine.kind is EngineKind.WATCHED:
            watched += 1
        if engine.kind is EngineKind.WATCHED and watched > MOST_NODE_ENGINES:
            limited.append(_refuse(engine, f"{MOST_NODE_ENGINES} engines are watched already"))
        else:
            limited.append(engine)
    return tuple(limited)
