"""The circumstances of an exit, collected sample by sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf
from statistics import median
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.derive.readings import list_named, sum_known
from vllm_headroom.model import EngineReading, Failure, Fate, Gpu, Snapshot
from vllm_headroom.trace.flight import MEMORY_REASONS, SEQUENCE_SECONDS, IncidentKind
from vllm_headroom.vocabulary import EngineState, ExitReason, LeakState, Reason, Role
from vllm_headroom_tools.history import LeakReplay, Moment
from vllm_headroom_tools.postmortem.facts import (
    Circumstances,
    GpuAtEnd,
    Header,
    read_leaks,
    read_lost_gpus,
    read_ooms,
    read_progress_age,
    read_used,
    read_xids,
    subtract,
)

PEAK_SECONDS: Final = 60.0
LAST_SECONDS: Final = 30.0 + PEAK_SECONDS
"""A tick and the minute for which the peak is kept."""

BEFORE_SECONDS: Final = 300.0
"""Growth within this time is a burst."""


class _GpuSample(Struct, frozen=True, kw_only=True):
    """One GPU in one sample, with room and the engine's memory at the peak."""

    seconds: float
    gpu: Gpu
    room_bytes: int | None
    engine_bytes: int | None


class GpuSamples:
    """The first sample of a GPU in a run of the engine, and those of the last minutes."""

    def __init__(self) -> None:
        self._first: _GpuSample | None = None
        self._last: deque[_GpuSample] = deque()

    def add(self, gpu: Gpu, now: float, *, is_first: bool) -> None:
        """Add a sample; it becomes the first one when the engine begins to serve."""
        sample = _take_sample(gpu, now)
        self._first = sample if is_first or self._first is None else self._first
        self._last.append(sample)
        while self._last[0].seconds < now - BEFORE_SECONDS - LAST_SECONDS:
            self._last.popleft()

    @property
    def share_at_first(self) -> float:
        """The engine's first memory over its last; 0 where unknown."""
        first, last = (sample and sample.gpu.held_bytes for sample in (self._first, self._last[-1]))
        return first / last if first and last else 0.0

    def facts(self, now: float, leak: LeakState, leaked: Moment | None) -> GpuAtEnd:
        """Return the facts at the exit; needs a first sample."""
        first = self._first or self._last[0]
        recent = now - BEFORE_SECONDS - LAST_SECONDS
        last = [sample for sample in self._last if sample.seconds >= self._last[-1].seconds - LAST_SECONDS]
        before = [sample for sample in (first, *self._last) if recent <= sample.seconds < now - LAST_SECONDS]
        if not before and first.seconds >= recent:
            before = [first]
        memory, engine_bytes = first.gpu.reading.memory, _find_most(sample.engine_bytes for sample in last)
        return GpuAtEnd(
            index=first.gpu.reading.index,
            uuid=first.gpu.reading.uuid,
            total_bytes=None if memory is None else memory.total_bytes,
            usable_bytes=None if memory is None else memory.usable_bytes,
            first_room_bytes=first.room_bytes,
            last_room_bytes=_find_least(sample.room_bytes for sample in last),
            last_engine_bytes=engine_bytes,
            grown_bytes=subtract(first.gpu.held_bytes, engine_bytes),
            jumped_bytes=subtract(_find_most(sample.gpu.held_bytes for sample in before), engine_bytes),
            first_other_bytes=first.gpu.other_bytes,
            last_other_bytes=_find_most(sample.gpu.other_bytes for sample in last),
            joined=(_find_most(sample.gpu.process_count for sample in last) or 0) > (first.gpu.process_count or inf),
            between=_find_least(sample.room_bytes for sample in last)
            != _find_least(memory.left_bytes for sample in last if (memory := sample.gpu.reading.memory)),
            leak=leak,
            leaked=leaked,
        )

    def raise_peak(self, used: Iterable[tuple[float, int]], shift: float) -> None:
        """Give the newest sample the highest memory in use since then, or in the minute before it.

        The times of `used` are `shift` behind those of the samples.
        """
        last = self._last[-1]
        known = [n_bytes for at, n_bytes in used if at + shift >= last.seconds - PEAK_SECONDS]
        peak_bytes = max((*known, last.gpu.reading.used_peak_bytes or 0))
        reading = replace(last.gpu.reading, used_peak_bytes=peak_bytes)
        self._last[-1] = _take_sample(replace(last.gpu, reading=reading), last.seconds)


def _take_sample(gpu: Gpu, now: float) -> _GpuSample:
    memory, held_bytes = gpu.reading.memory, gpu.held_bytes
    if memory is None:
        return _GpuSample(seconds=now, gpu=gpu, room_bytes=None, engine_bytes=held_bytes)
    above = max(0, (gpu.reading.used_peak_bytes or 0) - memory.used_bytes)
    at_peak = None if held_bytes is None else held_bytes + above
    return _GpuSample(seconds=now, gpu=gpu, room_bytes=memory.left_bytes - above, engine_bytes=at_peak)


def _find_least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _find_most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


USUAL_SECONDS: Final = 900.0
STEP_SECONDS: Final = 5.0
"""The assumed step where the clock was set back between two samples."""

SAME_SECONDS: Final = 0.5
LOADED: Final = 0.5
YOUNG_SECONDS: Final = 15.0
"""An engine older than this that holds more than this share in its first sample had loaded before."""


class Follower:
    """Collects samples in their order; the header of an incident has the time of the event.

    Without a header the last exit in the trace counts, or a stall that goes on. `silent` is whether a page that once
    answered no longer does.
    """

    def __init__(self, header: Header | None = None) -> None:
        self.facts: Circumstances | None = None
        self.watch = LeakReplay()
        self.silent = False
        self._header: Header = header or {}
        self._last = self._shift = 0.0
        self._paged = False
        self._state = EngineState.UNKNOWN
        self._first: tuple[Role, ...] = ()
        self._orphans = 0
        self._forget()

    def step(self, snapshot: Snapshot) -> Snapshot:
        """Add a sample; return it with the state of the engine added."""
        before = self.watch.runs
        snapshot = self.watch.step(self._steady_clock(snapshot))
        what, reason = self._find_event(snapshot)
        leaves = what is IncidentKind.ENDED and _count_orphans(snapshot) > self._orphans
        if snapshot.page is not None or self._began is None:  # its server may exit a sample later than its core
            self._orphans = _count_orphans(snapshot)
        if not self._first and (leaves or snapshot.page is not None):
            self._first = (Role.API_SERVER,) if leaves else self.watch.runs.present.lost
        if what is not None:
            self.facts = self._build_facts(snapshot, what, reason)
        newest = self.watch.runs.newest
        if newest is None or newest.ended or self.watch.runs.restarts != before.restarts:
            self._forget()
        if newest is not None and not newest.ended:
            self._add(snapshot)
        self._paged = self._paged or snapshot.page is not None
        self.silent = self._paged and snapshot.page is None
        return snapshot

    def _steady_clock(self, snapshot: Snapshot) -> Snapshot:
        now, before = snapshot.time_seconds, self._last
        self._shift += before - now + STEP_SECONDS if now < before else 0.0
        self._last = now
        return replace(snapshot, monotonic_seconds=now + self._shift)

    def _find_event(self, snapshot: Snapshot) -> tuple[IncidentKind | None, ExitReason | None]:
        life = snapshot.life
        reason = None if life is None else life.ended
        stalled = life is not None and life.state is EngineState.STALLED is not self._state
        if life is not None and life.state is not EngineState.UNKNOWN:
            self._state = life.state
        if self._header:
            late = snapshot.time_seconds - self._header["t"]
            due = abs(late) <= SAME_SECONDS or (self.facts is None and late > 0)
            counted = next((each for each in ExitReason if each == self._header.get("reason")), reason)
            return (IncidentKind(self._header["what"]), counted) if due else (None, None)
        return (IncidentKind.ENDED if reason else IncidentKind.STALLED if stalled else None), reason

    def _forget(self) -> None:
        self._began: float | None = None
        self._began_seconds: float | None = None
        self._is_young = False
        self._seen = self._paged_at = 0.0
        self._shut_since: float | None = None
        self._served = self._answered = False
        self._gpus: dict[str, GpuSamples] = {}
        self._engines: tuple[EngineReading, ...] = ()
        self._idle_since: float | None = None
        self._idle_seconds: float | None = None
        self._running: deque[tuple[float, float]] = deque()
        self._hung: float | None = None
        self._first = ()
        self._leaks: dict[str, tuple[LeakState, Moment | None]] = {}

    def _add(self, snapshot: Snapshot) -> None:
        now, life = snapshot.monotonic_seconds, snapshot.life
        born = None if life is None else life.began_seconds
        if self._began is None:
            self._began = self._paged_at = now
            self._is_young = born is not None and snapshot.time_seconds - born < YOUNG_SECONDS
        if snapshot.page is not None:
            self._paged_at = now
        refused = isinstance(snapshot.engines, Failure) and snapshot.engines.reason is Reason.UNREACHABLE
        self._shut_since = (self._shut_since or now) if refused and self.watch.runs.present.lost else None
        self._seen, self._began_seconds = now, born
        self._answered = snapshot.page is not None
        if engines := list_named(snapshot.page):
            self._add_page(engines, now)
        for gpu in snapshot.owned:
            samples = self._gpus.setdefault(gpu.reading.uuid, GpuSamples())
            samples.add(gpu, now, is_first=self._answered and not self._served)
        self._served = self._served or self._answered
        stalled = life is not None and life.state is EngineState.STALLED
        self._hung = (self._hung if self._hung is not None else now) if stalled else None
        for _, uuid, course in self.watch.gpus:
            if life is not None and life.in_service and course.state is not LeakState.UNKNOWN:
                self._leaks[uuid] = course.state, course.last or course.warning

    def _add_page(self, engines: tuple[EngineReading, ...], now: float) -> None:
        self._engines = engines
        work = sum_known(value for engine in engines for value in (engine.running, engine.waiting))
        self._idle_since = (self._idle_since or now) if work == 0 else None
        self._idle_seconds = None if self._idle_since is None else now - self._idle_since
        running = sum_known(engine.running for engine in engines)
        if running is not None:
            self._running.append((now, running))
        while self._running and self._running[0][0] < now - USUAL_SECONDS:
            self._running.popleft()

    def _build_facts(self, snapshot: Snapshot, what: IncidentKind, reason: ExitReason | None) -> Circumstances:
        now, life = snapshot.monotonic_seconds, snapshot.life
        answered = self._answered if what is IncidentKind.ENDED else snapshot.page is not None
        hung = self._hung is not None and (reason not in MEMORY_REASONS or now - self._hung > SEQUENCE_SECONDS)
        stalled = what is IncidentKind.STALLED or hung
        age = read_progress_age(self._header) or (None if life is None else life.progress_age_seconds)
        usual = [running for at, running in self._running if at < now - LAST_SECONDS]
        loaded = any(each.share_at_first >= LOADED for each in self._gpus.values())  # so it did not exit while starting
        return Circumstances(
            what=what,
            seconds=snapshot.time_seconds,
            reason=reason if what is IncidentKind.ENDED else None,
            began_seconds=self._began_seconds,
            seen_seconds=0.0 if self._began is None else now - self._began,
            unseen_seconds=None if self._began is None or what is not IncidentKind.ENDED else now - self._seen,
            served=self._served or (loaded and not self._paged and not self._is_young),
            hung_seconds=(age or now - self._paged_at) if stalled and not self._first else None,
            shut_seconds=None if self._shut_since is None else now - self._shut_since,
            answered=answered,
            first=self._first,
            engines=self._engines,
            idle_seconds=self._idle_seconds,
            usual_running=median(usual) if usual else None,
            gpus=tuple(self._build_gpu(uuid, samples, snapshot) for uuid, samples in self._gpus.items()),
            xids=read_xids(self._header),
            ooms=read_ooms(self._header),
            lost=read_lost_gpus(self._header),
        )

    def _build_gpu(self, uuid: str, samples: GpuSamples, snapshot: Snapshot) -> GpuAtEnd:
        state, moment = self._leaks.get(uuid, (LeakState.UNKNOWN, None))
        reported = read_leaks(self._header).get(uuid, LeakState.UNKNOWN)
        surer = max(state, reported, key=lambda each: (each is LeakState.LEAKING, each is LeakState.GROWING))
        samples.raise_peak(read_used(self._header).get(uuid, ()), self._shift)
        return samples.facts(snapshot.monotonic_seconds, surer, moment)


def _count_orphans(snapshot: Snapshot) -> int:
    """Count the orphaned processes on the engine's GPUs: a stopped engine leaves none."""
    return sum(left.fate is Fate.ORPHANED for gpu in snapshot.owned for left in gpu.leftovers)
