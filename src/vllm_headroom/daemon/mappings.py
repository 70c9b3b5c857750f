"""Which kinds of mappings of the engine's processes grow, read when their host memory does."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
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

AGAIN_SECONDS: Final = 600.0
"""Between two readings of a process that grows: each takes 10 to 40 ms per GiB of pages of 4 KiB, and 1 ms per GiB of
huge pages (measured). Meanwhile a thread of the engine that maps memory may wait; one that uses memory does not."""

MOST_PROCESSES, MOST_KINDS = 32, 8

Sizes = dict[str, int]
"""Resident bytes by kind of mapping."""


class _Growth(Struct, frozen=True, kw_only=True):
    """A process's first reading and its newest, at first the same; the next may follow at `due` (monotonic)."""

    role: Role
    due: float = 0.0
    since: float
    first: Sizes
    newest_seconds: float
    newest: Sizes

    @property
    def kinds(self) -> Sizes:
        """The kinds that have grown, in bytes, the largest growth first."""
        grown = list(find_growth(self.first, self.newest).items())[:MOST_KINDS]
        return {kind: size for kind, size in grown if size >= MIB}


class Mappings:
    """Owns the first reading of each process, taken once it serves, and the newest, taken while its role may leak.

    `read` runs on its own thread, for one process at a time and one per step; where it hangs, no more are read.
    """

    def __init__(self, read: Callable[[int], Sizes | None]) -> None:
        self._read, self._worker = read, Worker[Sizes | None]("mappings")
        self._known: dict[ProcessName, _Growth] = {}
        self._begun: tuple[ProcessName, asyncio.Future[Sizes | None]] | None = None

    def step(self, snapshot: Snapshot, values: Values) -> None:
        """Keep what was read since the last step, and begin the next reading that is due, without waiting for it."""
        if isinstance(snapshot.processes, Failure) or not snapshot.in_service:
            return
        present = {(each.pid, each.started_at_seconds): each for each in snapshot.processes}
        self._known = {name: known for name, known in self._known.items() if name in present}
        if self._begun is not None:
            name, reading = self._begun
            if not reading.done():
                return
            self._begun = None
            if name in present:  # so that the pid was this process's meanwhile
                self._keep(
                    name,
                    present[name].role,
                    snapshot,
                    {} if reading.exception() else reading.result() or {},
                )
        due = self._find_due(present, snapshot.monotonic_seconds, values)
        if due is not None:
            with contextlib.suppress(OSError):  # no thread can be started now
                self._begun = due, self._worker.begin(partial(self._read, due[0]))

    def describe(self) -> list[dict[str, Any]]:
        """Return by how much the kinds of each process grew that was read again, in bytes."""
        return [
            {
                "pid": pid,
                "role": each.role,
                "since": each.since,
                "t": each.newest_seconds,
                "kinds": each.kinds,
            }
            for (pid, _), each in self._known.items()
            if each.newest is not each.first
        ]

    def _find_due(
        self, present: Mapping[ProcessName, EngineProcess], now: float, values: Values
    ) -> ProcessName | None:
        """Return a process that was never read, else one of a growing role that was not read lately."""
        largest = sorted(present, key=lambda name: -present[name].rss_bytes)[:MOST_PROCESSES]
        growing = {role for role in Role if values.state(catalog.HOST_LEAK_STATE, role) in SHOWN}
        again = (
            name
            for name in self._known
            if present[name].role in growing and now >= self._known[name].due
        )
        return next(chain((name for name in largest if name not in self._known), again), None)

    def _keep(self, name: ProcessName, role: Role, snapshot: Snapshot, sizes: Sizes) -> None:
        now, known = round(snapshot.time_seconds, 3), self._known.get(name)
        if known is None or not known.first:
            known = _Growth(role=role, since=now, first=sizes, newest_seconds=now, newest=sizes)
        elif sizes:
            is_second, known = (
                known.newest is known.first,
                replace(known, newest_seconds=now, newest=sizes),
            )
            if is_second and known.kinds:
                grown = ", ".join(
                    f"{format_size(size)} {kind}" for kind, size in known.kinds.items()
                )
                log.warning(
                    "host memory grew in these mappings", process=role, pid=name[0], grown=grown
                )
        self._known[name] = replace(known, due=snapshot.monotonic_seconds + AGAIN_SECONDS)
