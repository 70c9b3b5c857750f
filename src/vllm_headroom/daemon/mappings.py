"""Find which kinds of mappings grow along with an engine process's host memory."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.leak.leak import SHOWN
from vllm_headroom.log import Log
from vllm_headroom.model import EngineProcess, Failure, ProcessName, Snapshot, Values
from vllm_headroom.scrape.proc.smaps import find_growth
from vllm_headroom.units import MIB, format_size
from vllm_headroom.vocabulary import Role
from vllm_headroom.worker import Worker

log = Log(__name__)

REREAD_SECONDS: Final = 600.0
"""The pause between two readings of a process whose memory is growing. A reading takes 10 to 40 ms
per GiB of 4 KiB pages. Per GiB of huge pages, it takes 1 ms (measured). During a reading, an engine
thread that maps memory may have to wait. A thread that only uses memory does not wait.
"""

MOST_MAPPED_PROCESSES: Final = 32
"""The maximum number of processes that are read: the largest ones of the engine."""

MOST_KINDS: Final = 8
"""The number of kinds of mappings shown per process: the ones that grew the most."""

Sizes = dict[str, int]
"""Resident bytes by kind of mapping."""


class _Growth(Struct, frozen=True, kw_only=True):
    """A process's first and newest readings, which are initially the same."""

    role: Role
    next_reading_seconds: float = 0.0
    """When the process may be read again, on the monotonic clock."""
    first_seconds: float
    """When the process was first read, in seconds since the epoch. `newest_seconds` uses the same
    clock.
    """
    first_sizes: Sizes
    """The sizes of the first reading, which are empty if that reading failed."""
    newest_seconds: float
    newest_sizes: Sizes

    @property
    def has_one_reading(self) -> bool:
        """Return whether the process has been read only once so far."""
        return self.newest_sizes is self.first_sizes

    @property
    def grown_bytes(self) -> Sizes:
        """Return how much each kind has grown, sorted with the largest growth first.

        Kinds that have grown by less than 1 MiB are omitted.
        """
        growth = find_growth(self.first_sizes, self.newest_sizes)
        largest_kinds = list(growth.items())[:MOST_KINDS]
        return {kind: size_bytes for kind, size_bytes in largest_kinds if size_bytes >= MIB}


class Mappings:
    """Owns the first and newest readings of each process.

    The first reading is taken once the engine is serving. A process is read again while the leak
    detector finds growth in its role. `read` runs on a thread, for one process per step. If a call
    to `read` hangs, no other process is read.
    """

    def __init__(self, read: Callable[[int], Sizes | None]) -> None:
        self._read = read
        self._worker = Worker[Sizes | None]("mappings")
        self._growths: dict[ProcessName, _Growth] = {}
        self._running: tuple[ProcessName, asyncio.Future[Sizes | None]] | None = None
        """The process that is being read, and the future for its sizes. None between readings."""

    def step(self, snapshot: Snapshot, values: Values) -> None:
        """Store new readings, and begin the next reading if one is due.

        Does nothing while the engine is out of service. Also does nothing if its processes could
        not be read.
        """
        if isinstance(snapshot.processes, Failure) or not snapshot.is_in_service:
            return
        processes = {
            (process.pid, process.started_at_seconds): process for process in snapshot.processes
        }
        self._growths = {
            name: growth for name, growth in self._growths.items() if name in processes
        }
        if self._running is not None:
            name, reading = self._running
            if not reading.done():
                return  # Only one process is read at a time.
            self._running = None
            # The process still exists, so the PID belonged to it during the whole reading.
            if name in processes:
                # After an error, such as a missing permission, the process counts as unreadable.
                sizes = None if reading.exception() else reading.result()
                self._add_reading(name, processes[name].role, snapshot, sizes or {})
        due_name = self._find_due(processes, snapshot.monotonic_seconds, values)
        if due_name is not None:
            pid, _ = due_name
            with contextlib.suppress(OSError):  # No thread can be started now.
                self._running = due_name, self._worker.begin(partial(self._read, pid))

    def describe(self) -> list[dict[str, Any]]:
        """Return the growth of each process with two or more readings, for JSON.

        `kinds` contains the growth in bytes of each kind of mapping. `since` and `t` are the times
        of the first and newest readings (epoch seconds).
        """
        return [
            {
                "pid": pid,
                "role": growth.role,
                "since": growth.first_seconds,
                "t": growth.newest_seconds,
                "kinds": growth.grown_bytes,
            }
            for (pid, _), growth in self._growths.items()
            if not growth.has_one_reading
        ]

    def _find_due(
        self, processes: Mapping[ProcessName, EngineProcess], now_seconds: float, values: Values
    ) -> ProcessName | None:
        """Return the next process to read, or None if no reading is due.

        The largest process that has never been read comes first. If all have been read, the result
        is a process that may be read again. The memory of its role must be growing.
        """
        # The largest process is the most likely to leak.
        by_size = sorted(processes, key=lambda name: -processes[name].rss_bytes)
        for name in by_size[:MOST_MAPPED_PROCESSES]:
            if name not in self._growths:
                return name
        growing_roles = {
            role for role in Role if values.state(catalog.HOST_LEAK_STATE, role) in SHOWN
        }
        for name, growth in self._growths.items():
            is_growing = processes[name].role in growing_roles
            if is_growing and now_seconds >= growth.next_reading_seconds:
                return name
        return None

    def _add_reading(self, name: ProcessName, role: Role, snapshot: Snapshot, sizes: Sizes) -> None:
        """Add a reading of a process.

        `sizes` is empty if the process could not be read.
        """
        now_seconds = round(snapshot.time_seconds, 3)
        growth = self._growths.get(name)
        # A first reading that failed is replaced by the next one.
        if growth is None or not growth.first_sizes:
            growth = _Growth(
                role=role,
                first_seconds=now_seconds,
                first_sizes=sizes,
                newest_seconds=now_seconds,
                newest_sizes=sizes,
            )
        elif sizes:
            is_second = growth.has_one_reading
            growth = replace(growth, newest_seconds=now_seconds, newest_sizes=sizes)
            if is_second and growth.grown_bytes:
                log.warning(
                    "host memory grew in these mappings",
                    process=role,
                    pid=name[0],
                    grown=", ".join(
                        f"{format_size(size_bytes)} {kind}"
                        for kind, size_bytes in growth.grown_bytes.items()
                    ),
                )
        self._growths[name] = replace(
            growth, next_reading_seconds=snapshot.monotonic_seconds + REREAD_SECONDS
        )
