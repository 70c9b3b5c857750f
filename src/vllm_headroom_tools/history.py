"""A recorded trace: its counters, curves and leak verdicts."""

from __future__ import annotations

from array import array
from collections import Counter
from enum import StrEnum
from math import inf, isfinite, isnan, nan
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive import LEAK, answer
from vllm_headroom.derive.leak.evidence import GROWING_SECONDS, LEAKING_SECONDS
from vllm_headroom.derive.leak.facts import Estimate
from vllm_headroom.derive.leak.inside import find_location, sharpen_track
from vllm_headroom.derive.leak.leak import LeakMemory
from vllm_headroom.derive.life.engine import EngineMemory, update_engine
from vllm_headroom.derive.readings import count_running
from vllm_headroom.expose.drawing import Point
from vllm_headroom.model import Ending, HostMemory, Sample, Snapshot
from vllm_headroom.units import format_duration, format_instant
from vllm_headroom.vocabulary import LeakLocation, LeakState, Role


class Rise(Struct):
    """The rise of a counter; `total` is None until the first reading. A counter that fell has started again from 0."""

    total: float | None = None
    last: float = 0.0

    def step(self, value: float | None, *, restarted: bool = False) -> float:
        """Add a reading (None: unknown) and return the rise; after a restart of the engine the counter began at 0."""
        if value is None:
            return 0.0
        since = 0.0 if restarted or value < self.last else self.last
        rise = 0.0 if self.total is None else value - since
        self.total, self.last = (self.total or 0.0) + rise, value
        return rise


class Histogram(Struct):
    """The distribution of a value; rounding to three digits bounds its size to some thousand entries."""

    counts: Counter[float] = field(default_factory=Counter)

    def add(self, value: float | None) -> None:
        """Count a value unless it is None."""
        if value is not None:
            self.counts[float(f"{value:.3g}")] += 1

    def quantile(self, share: float) -> float | None:
        """Return the lowest value that this share of all values does not exceed; None without values."""
        wanted, counted = share * self.counts.total(), 0
        for value, times in sorted(self.counts.items()):
            counted += times
            if counted >= wanted:
                return value
        return None


class Curves:
    """Free and held memory of each GPU, free memory of the host, and the running requests.

    A sample takes eight bytes a curve, since a trace may last weeks; NaN is an unknown value. The curves of a GPU begin
    with the first sample that has it.
    """

    def __init__(self) -> None:
        self._times = array("d")
        self._curves: dict[tuple[str, str], array[float]] = {}

    @property
    def uuids(self) -> tuple[str, ...]:
        """The GPUs, in the order of their first samples."""
        return tuple(uuid for name, uuid in self._curves if name == "free")

    def of(self, name: str, uuid: str = "") -> list[Point]:
        """Return `host`, `running`, or `free` or `held` of a GPU; empty where no value is known."""
        values = self._curves.get((name, uuid), array("d"))
        if all(map(isnan, values)):
            return []
        times = self._times[len(self._times) - len(values) :]
        return [
            (seconds, None if isnan(value) else value)
            for seconds, value in zip(times, values, strict=True)
        ]

    def step(self, snapshot: Snapshot) -> None:
        """Add a sample; the values of a GPU that it lacks are unknown."""
        host, values = snapshot.host, dict[tuple[str, str], float | None]()
        values["host", ""] = None if host is None else host.room_bytes
        values["running", ""] = count_running(snapshot.page)
        for gpu in snapshot.devices:
            memory = gpu.reading.memory
            values["free", gpu.reading.uuid] = None if memory is None else memory.free_bytes
            values["held", gpu.reading.uuid] = gpu.held_bytes
        for key in {**self._curves, **values}:
            value = values.get(key)
            self._curves.setdefault(key, array("d")).append(nan if value is None else value)
        self._times.append(snapshot.time_seconds)


Interval = tuple[float, float | None]
"""Begin and end, in the trace's seconds; the end is None where the state lasts to the end of the trace."""


class Moment(Struct, frozen=True, kw_only=True):
    """The detector's figures at one sample, None where it gave none; lower and upper bound a 95 % interval."""

    seconds: float
    bytes_per_second: float | None = None
    bytes_per_second_lower: float | None = None
    bytes_per_second_upper: float | None = None
    bytes_per_request: float | None = None
    leaked_bytes: float | None = None
    time_to_oom_seconds: float | None = None
    time_to_oom_seconds_lower: float | None = None
    by_requests: bool | None = None
    location: LeakLocation | None = None


class LeakCourse(Struct):
    """The states of one series.

    `growing` are the intervals of the early warning, `leaking` of the alarm; `first` and `last` the first and newest
    sample of the latter. `settled` is whether the detector ever had enough readings to rule out growth.
    """

    state: LeakState = LeakState.UNKNOWN
    first: Moment | None = None
    last: Moment | None = None
    settled: bool = False
    growing: list[Interval] = []
    leaking: list[Interval] = []
    _warning: Moment | None = None
    _cut_off: bool = False
    _known: LeakState = LeakState.UNKNOWN

    @property
    def warning(self) -> Moment | None:
        """The newest sample of an early warning that is still open."""
        return self._warning if self._known is LeakState.GROWING else None

    @property
    def newest(self) -> Moment | None:
        """The newest sample of the alarm, else of an open early warning."""
        return self.last or self.warning

    @property
    def is_undecided(self) -> bool:
        """Whether an early warning was still open at the end or at a restart of the engine."""
        return self._cut_off or self.warning is not None

    def step(self, state: LeakState, moment: Moment, *, restarted: bool = False) -> None:
        """Add a sample; neither sleep nor an unknown state ends an interval; a restart leaves a warning undecided."""
        self.state = state
        self.settled = self.settled or state in (LeakState.STABLE, LeakState.UNSETTLED)
        self._cut_off = self._cut_off or (restarted and self._known is LeakState.GROWING)
        if state is LeakState.GROWING:
            self._warning = moment
        if state is LeakState.LEAKING:
            self.first = self.first or moment
            self.last = moment
        if state in (LeakState.UNKNOWN, LeakState.ASLEEP, self._known):
            return
        intervals = {LeakState.GROWING: self.growing, LeakState.LEAKING: self.leaking}
        if left := intervals.get(self._known):
            left[-1] = (left[-1][0], moment.seconds)
        if state in intervals:
            intervals[state].append((moment.seconds, None))
        self._known = state


class LeakVerdict(StrEnum):
    """The detector's verdict on a whole span."""

    LEAKING = "leaking"
    GROWING = "growing"
    NO_LEAK = "no_leak"
    CANNOT_TELL = "cannot_tell"


def judge_course(course: LeakCourse, span_seconds: float) -> tuple[LeakVerdict, str]:
    """Judge a course of so many seconds, with the reason: a short one proves no absence."""
    if course.leaking:
        return LeakVerdict.LEAKING, "even growth that load does not explain"
    if course.growing:
        return LeakVerdict.GROWING, "only early warnings, no alarm"
    if span_seconds < LEAKING_SECONDS:
        least = f"{GROWING_SECONDS / 60:.0f} min for an early warning, about {LEAKING_SECONDS / 60:.0f} for an alarm"
        return (
            LeakVerdict.CANNOT_TELL,
            f"{format_duration(span_seconds)} is too short, growth has to last {least}",
        )
    if not course.settled:
        return LeakVerdict.CANNOT_TELL, "the detector never had enough readings under load"
    return LeakVerdict.NO_LEAK, "no growth that load does not explain"


STEP_SECONDS: Final = 5.0
"""The assumed step where the clock was set back between two samples."""

STATES: Final = frozenset({catalog.LEAK_STATE.name, catalog.HOST_LEAK_STATE.name})

LONGEST_STEP_SECONDS: Final = 300.0
"""The longest sampling interval that can be set: a longer step is a gap in the trace."""


class LeakReplay:
    """The detector's verdicts on every GPU and host role.

    `span` is the first and the last time of the trace; the second may be lower after a clock step. `run` is the state
    of the engine's runs at the newest sample, `events` are its exits and stalls. `memory` is the fullest reading of the
    host memory. `residues` has the memory kept on each GPU, by its labels and by the start of the sleep; `stranded` the
    highest share of an engine's KV cache that no request held.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.span = (0.0, 0.0)
        self.engine = EngineMemory()
        self._memory = LEAK.initial
        self._now = self._shift = 0.0
        self.events: list[Ending] = []
        self._indices: dict[str, int] = {}
        self._courses: dict[str, LeakCourse] = {}
        self.memory: HostMemory | None = None
        self.residues: dict[tuple[str, str], dict[float, float]] = {}
        self.stranded: dict[tuple[str, str], float] = {}

    @property
    def gpus(self) -> tuple[tuple[int, str, LeakCourse], ...]:
        """Index, UUID and course of each GPU, by index."""
        return tuple(
            sorted((index, uuid, self._courses[uuid]) for uuid, index in self._indices.items())
        )

    @property
    def host(self) -> tuple[tuple[Role, LeakCourse], ...]:
        """The course of each role's resident memory."""
        return tuple((role, self._courses[role]) for role in Role if role in self._courses)

    def course(self, series: str) -> LeakCourse:
        """Return the course of a GPU, by UUID, or of a host role; an empty one before its first sample."""
        return self._courses.get(series) or LeakCourse()

    def requests(self, series: str) -> float:
        """Return the requests that finished since the detector began with a series in this run of the engine."""
        track = self._memory.gpus.get(series) or self._memory.host.get(series)
        return 0.0 if track is None else track.work.requests

    def step(self, snapshot: Snapshot) -> Snapshot:
        """Run a snapshot through the detector; return it with the engine's state. A series not judged is unknown."""
        self.span = self.span[0] if self.samples else snapshot.time_seconds, snapshot.time_seconds
        self.samples += 1
        self.engine, snapshot = update_engine(self.engine, self._steady_clock(snapshot))
        if snapshot.engine_status is not None and snapshot.engine_status.event is not None:
            self.events.append(snapshot.engine_status.event)
        self.memory = _merge_host(self.memory, snapshot.host)
        for engine, ratio in (
            () if snapshot.engine_status is None else snapshot.engine_status.stranded
        ):
            self.stranded[engine] = max(ratio, self.stranded.get(engine, 0.0))
        before = self._memory
        self._memory, samples = answer(LEAK, before, snapshot)
        for course in self._courses.values():
            course.state = LeakState.UNKNOWN
        sleep = self._memory.sleep
        for sample in samples:
            if sample.metric.name in STATES and sample.value:
                self._follow(sample, before)
            elif (
                sample.metric is catalog.SLEEP_RESIDUE
                and sleep.settled
                and sleep.since_seconds is not None
            ):
                gpu, uuid = sample.labels
                self.residues.setdefault((gpu, uuid), {})[sleep.since_seconds] = sample.value
        return snapshot

    def _steady_clock(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot on a clock that only moves forward: that of a trace may be set back."""
        now = snapshot.monotonic_seconds + self._shift
        if now < self._now:
            self._shift += self._now - now + STEP_SECONDS
            now = self._now + STEP_SECONDS
        self._now = now
        return snapshot if not self._shift else replace(snapshot, monotonic_seconds=now)

    def _follow(self, sample: Sample, before: LeakMemory) -> None:
        *place, name, state = sample.labels
        if place:
            self._indices[name] = int(place[0])
        course = self._courses.setdefault(name, LeakCourse())
        old, track = (
            (memory.gpus if place else memory.host).get(name)  # none before the engine has worked
            for memory in (before, self._memory)
        )
        # the time of a track starts over with each run of the engine
        restarted = old is not None and track is not None and track.clock.now_seconds < old.clock.now_seconds
        inside, asleep = (
            (self._memory.inside.get(name), self._memory.asleep.get(name))
            if place
            else (None, None)
        )
        estimate = None if track is None else sharpen_track(track, asleep, inside).estimate
        moment = _build_moment(self.span[1], estimate, find_location(estimate, inside))
        course.step(LeakState(state), moment, restarted=restarted)


def _merge_host(before: HostMemory | None, now: HostMemory | None) -> HostMemory | None:
    """Return the fullest reading of the newest scope: a use belongs to the limit of the same sample."""
    if now is None or before is None:
        return now or before
    most = now
    if now.basis in (None, before.basis):
        most = max(
            before,
            now,
            key=lambda each: (
                (each.used_bytes or 0) / (each.limit_bytes or inf),
                each.used_bytes or 0,
            ),
        )
    shm = max(before, now, key=lambda each: each.shm_used_bytes or 0)
    kills = max(
        (each.oom_kills for each in (before, now) if each.oom_kills is not None), default=None
    )
    return replace(
        most,
        shm_used_bytes=shm.shm_used_bytes,
        shm_limit_bytes=shm.shm_limit_bytes,
        oom_kills=kills,
    )


def _build_moment(seconds: float, estimate: Estimate | None, where: LeakLocation | None) -> Moment:
    """Return the detector's figures; those that are not finite are absent, as on the page."""
    if estimate is None:
        return Moment(seconds=seconds)
    figures = {
        "bytes_per_second": estimate.bytes_per_second,
        "bytes_per_second_lower": estimate.lower,
        "bytes_per_second_upper": estimate.upper,
        "bytes_per_request": estimate.bytes_per_request,
        "leaked_bytes": estimate.leaked_bytes,
        "time_to_oom_seconds": estimate.oom_seconds,
        "time_to_oom_seconds_lower": estimate.oom_seconds_lower,
    }
    known = {
        name: value for name, value in figures.items() if value is not None and isfinite(value)
    }
    return Moment(seconds=seconds, by_requests=estimate.by_requests, location=where, **known)


def describe_span(samples: int, begin: float, end: float) -> str:
    """Return the samples, the length and both ends of a trace."""
    return f"{samples} samples over {format_duration(end - begin)}, {format_instant(begin)} to {format_instant(end)}"
