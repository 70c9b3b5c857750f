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
from vllm_headroom.derive.leak.facts import Estimate
from vllm_headroom.derive.leak.growth_evidence import GROWING_SECONDS, LEAKING_SECONDS
from vllm_headroom.derive.leak.inside import find_location, sharpen_track
from vllm_headroom.derive.leak.leak import LeakMemory, is_alone
from vllm_headroom.derive.life.engine import EngineMemory, update_engine
from vllm_headroom.derive.pages import count_running
from vllm_headroom.derive.tick import LEAK, answer
from vllm_headroom.expose.drawing import Point
from vllm_headroom.model import Ending, HostMemory, Sample, Snapshot
from vllm_headroom.units import format_duration, format_instant
from vllm_headroom.vocabulary import LeakLocation, LeakState, Role

RESIZED_RATIO: Final = 0.01
"""Our choice: if the KV cache size changes by more, the settings have changed. Between starts with
the same settings, the size differs by less than this.
"""


class Rise(Struct):
    """The total increase of a counter. If the counter falls, it has restarted at 0."""

    total: float | None = None
    """None until the first reading."""

    newest_value: float = 0.0

    def step(self, value: float | None, *, restarted: bool = False) -> float:
        """Add a reading and return the increase since the previous one.

        The increase is 0 for the first reading and for an unknown value (None). If `restarted` is
        True, the counter is assumed to have started at 0. The counter is assumed to have restarted
        even if it already exceeds the previous value.
        """
        if value is None:
            return 0.0
        rise = 0.0
        if self.total is not None:
            # A counter that fell was reset to 0 by the engine.
            has_restarted = restarted or value < self.newest_value
            rise = value if has_restarted else value - self.newest_value
        self.total = (self.total or 0.0) + rise
        self.newest_value = value
        return rise


class Histogram(Struct):
    """The distribution of a value.

    Values are rounded to three digits. There are at most a few thousand entries.
    """

    counts: Counter[float] = field(default_factory=Counter)

    def add(self, value: float | None) -> None:
        """Count a value unless it is None."""
        if value is not None:
            self.counts[float(f"{value:.3g}")] += 1

    def quantile(self, share: float) -> float | None:
        """Return the lowest value V with at least `share` of the values at most V.

        `share` is between 0 and 1. Returns None if there are no values.
        """
        rank = share * self.counts.total()
        count_so_far = 0
        for value, count in sorted(self.counts.items()):
            count_so_far += count
            if count_so_far >= rank:
                return value
        return None


class Curves:
    """The curves of GPU memory (free and held), free host memory, and running requests.

    A sample takes only eight bytes per curve, because a trace may cover weeks. NaN marks an unknown
    value. A GPU's curves start at the first sample that contains the GPU.
    """

    def __init__(self) -> None:
        self._times = array("d")
        self._curves: dict[tuple[str, str], array[float]] = {}

    @property
    def uuids(self) -> tuple[str, ...]:
        """Return the UUIDs of the GPUs in the order in which they first appear."""
        return tuple(uuid for name, uuid in self._curves if name == "free")

    def of(self, name: str, uuid: str = "") -> list[Point]:
        """Return a curve by its name.

        The names are `host` and `running`, and for each GPU `free` and `held`. Unknown values are
        None; the curve is empty if no value is known.
        """
        values = self._curves.get((name, uuid), array("d"))
        if all(map(isnan, values)):
            return []
        # A curve may start later than the first sample. Every sample since the curve's start has
        # added a value.
        times = self._times[len(self._times) - len(values) :]
        return [
            (seconds, None if isnan(value) else value)
            for seconds, value in zip(times, values, strict=True)
        ]

    def step(self, snapshot: Snapshot) -> None:
        """Add a sample.

        For a GPU that the sample does not contain, values are unknown.
        """
        host = snapshot.host
        values: dict[tuple[str, str], float | None] = {}
        values["host", ""] = None if host is None else host.room_bytes
        values["running", ""] = count_running(snapshot.page)
        for gpu in snapshot.devices:
            memory = gpu.reading.memory
            values["free", gpu.reading.uuid] = None if memory is None else memory.free_bytes
            values["held", gpu.reading.uuid] = gpu.held_bytes
        # Curves without a value in this sample are extended too, so that no curve falls behind.
        for key in {**self._curves, **values}:
            value = values.get(key)
            self._curves.setdefault(key, array("d")).append(nan if value is None else value)
        self._times.append(snapshot.time_seconds)


Interval = tuple[float, float | None]
"""The start and end of a state, in the trace's seconds.

The end is None if the state lasts until the end of the trace.
"""


class Moment(Struct, frozen=True, kw_only=True):
    """The detector's figures at one sample.

    Figures that the detector did not report are None. `lower` and `upper` are the bounds of a 95 %
    interval.
    """

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
    """The detector's states for one series over the course of a trace.

    A series is a GPU or a host role.
    """

    state: LeakState = LeakState.UNKNOWN
    first_alarm: Moment | None = None
    """The first sample of the first alarm, or None if there was no alarm."""

    last_alarm: Moment | None = None
    """The newest sample of the newest alarm, or None if there was no alarm."""

    settled_seconds: float | None = None
    """The latest time with enough readings to rule out growth. The value is None if there was no
    such time.
    """

    growing: list[Interval] = []
    """The times of early warnings."""

    leaking: list[Interval] = []
    """The times of alarms."""

    is_holder_known: bool = True
    """Whether the newest alarm is known to concern the engine's memory. If False, memory is filling
    up, but it is unknown which process's memory is growing.
    """

    _newest_warning: Moment | None = None
    _was_cut_off: bool = False
    """Whether the engine restarted during an early warning."""

    _open_state: LeakState = LeakState.UNKNOWN
    """The newest state that is neither sleep nor unknown."""

    @property
    def warning(self) -> Moment | None:
        """Return the newest sample of an early warning that is still open, or None."""
        return self._newest_warning if self._open_state is LeakState.GROWING else None

    @property
    def newest(self) -> Moment | None:
        """Return the newest sample of an alarm, or else of an open early warning."""
        return self.last_alarm or self.warning

    @property
    def withdrawn_seconds(self) -> float:
        """Return the total duration of all early warnings that have ended."""
        return sum(end - begin for begin, end in self.growing if end is not None)

    @property
    def is_undecided(self) -> bool:
        """Return whether an early warning may have been a leak.

        The growth may have been a leak in any of these cases:

        - A warning is still open, or was open when the engine restarted.
        - All withdrawn warnings together lasted at least as long as an alarm needs.
        - The time without growth since the last warning is shorter than an alarm needs.
        """
        if self._was_cut_off or self.warning is not None:
            return True
        if not self.growing:
            return False
        _, end_seconds = self.growing[-1]
        if end_seconds is None or self.settled_seconds is None:
            return True
        calm_seconds = self.settled_seconds - end_seconds
        return self.withdrawn_seconds >= LEAKING_SECONDS or calm_seconds < LEAKING_SECONDS

    def step(self, state: LeakState, moment: Moment, *, restarted: bool = False) -> None:
        """Add a sample's state and figures.

        Sleep or an unknown state does not end an interval. Only the next known state shows whether
        the interval continues. A restart of the engine leaves an open early warning undecided.
        """
        self.state = state
        if state in (LeakState.STABLE, LeakState.UNSETTLED):
            self.settled_seconds = moment.seconds
        if restarted and self._open_state is LeakState.GROWING:
            self._was_cut_off = True
        if state is LeakState.GROWING:
            self._newest_warning = moment
        if state is LeakState.LEAKING:
            self.first_alarm = self.first_alarm or moment
            self.last_alarm = moment
        # The state continues, or the next state is not known yet.
        if state in (LeakState.UNKNOWN, LeakState.ASLEEP, self._open_state):
            return

        intervals = {LeakState.GROWING: self.growing, LeakState.LEAKING: self.leaking}
        open_intervals = intervals.get(self._open_state)
        # A change of state closes the open interval.
        if open_intervals:
            begin_seconds, _ = open_intervals[-1]
            open_intervals[-1] = (begin_seconds, moment.seconds)
        if state in intervals:
            intervals[state].append((moment.seconds, None))
        self._open_state = state


class LeakVerdict(StrEnum):
    """The detector's verdict on a whole trace."""

    LEAKING = "leaking"
    GROWING = "growing"
    NO_LEAK = "no_leak"
    CANNOT_TELL = "cannot_tell"


def judge_course(course: LeakCourse, span_seconds: float) -> tuple[LeakVerdict, str]:
    """Return the verdict on a course that covers this span, and the reason.

    A short course can prove a leak, but not the absence of one. Every command that judges a trace
    calls this function. All commands therefore reach the same verdict.
    """
    if course.leaking:
        return LeakVerdict.LEAKING, "even growth that load does not explain"
    if course.is_undecided:
        return LeakVerdict.GROWING, "only early warnings, no alarm"
    if span_seconds < LEAKING_SECONDS:
        span = format_duration(span_seconds)
        growing_minutes = GROWING_SECONDS / 60
        leaking_minutes = LEAKING_SECONDS / 60
        reason = (
            f"{span} is too short, growth has to last {growing_minutes:.0f} min for an early"
            f" warning, about {leaking_minutes:.0f} for an alarm"
        )
        return LeakVerdict.CANNOT_TELL, reason
    if course.settled_seconds is None:
        return LeakVerdict.CANNOT_TELL, "the detector never had enough readings under load"
    return LeakVerdict.NO_LEAK, "no growth that load does not explain"


STATE_VERDICTS: Final = {
    LeakState.LEAKING: LeakVerdict.LEAKING,
    LeakState.GROWING: LeakVerdict.GROWING,
    LeakState.STABLE: LeakVerdict.NO_LEAK,
    LeakState.UNSETTLED: LeakVerdict.NO_LEAK,
}
"""The verdict on each state that can be judged without its history. If a state is not listed, the
verdict is CANNOT_TELL.
"""


SET_BACK_STEP_SECONDS: Final = 5.0
"""The interval that is assumed if the clock was set back between two samples."""

STATE_METRICS: Final = frozenset({catalog.LEAK_STATE.name, catalog.HOST_LEAK_STATE.name})

LONGEST_INTERVAL_SECONDS: Final = 300.0
"""The longest sampling interval that can be configured. If more time passes between two samples,
the trace has a gap.
"""


class LeakReplay:
    """The detector's verdicts on every GPU and host role of a trace.

    `reported_bytes` is the operator's figure for the engine's memory on each GPU.
    """

    def __init__(self, *, reported_bytes: int | None = None) -> None:
        self._reported_bytes = reported_bytes
        self.samples = 0
        self.span = (0.0, 0.0)
        """The times of the first and the last sample. If the clock was set back, the last time may
        be earlier.
        """

        self.engine = EngineMemory()
        """The state of the engine's runs at the newest sample."""

        self.events: list[Ending] = []
        """The engine's exits and stalls."""

        self.memory: HostMemory | None = None
        """The reading with the highest host memory usage, or None until the first reading."""

        self.residues: dict[tuple[str, str], dict[float, float]] = {}
        """The bytes in use during each sleep. The keys are the GPU's labels and the start of the
        sleep.
        """

        self.stranded: dict[tuple[str, str], float] = {}
        """The highest share of a KV cache that was held without any request. The keys are the
        engine's labels.
        """

        self.leak_memory: LeakMemory = LEAK.initial
        """The detector's state after the newest sample."""

        self.leak_samples: tuple[Sample, ...] = ()
        """The samples that the detector would export at the newest sample."""

        self._now_seconds = 0.0
        self._shift_seconds = 0.0
        """The seconds to add to the trace's time, so that it never goes backwards."""

        self._shared_uuids: frozenset[str] = frozenset()
        """The GPUs on which the engine's memory is not separate from other processes' memory. This
        applies to the newest sample.
        """

        self._gpu_indices: dict[str, int] = {}
        self._courses: dict[str, LeakCourse] = {}

    @property
    def gpus(self) -> tuple[tuple[int, str, LeakCourse], ...]:
        """Return the index, UUID and course of each GPU, ordered by index."""
        return tuple(
            sorted((index, uuid, self._courses[uuid]) for uuid, index in self._gpu_indices.items())
        )

    @property
    def host(self) -> tuple[tuple[Role, LeakCourse], ...]:
        """Return the course of the resident memory of each role."""
        return tuple((role, self._courses[role]) for role in Role if role in self._courses)

    def course(self, series: str) -> LeakCourse:
        """Return the course of a GPU or host role.

        A GPU is given by its UUID. The course is empty until the first sample of the series.
        """
        return self._courses.get(series) or LeakCourse()

    def requests(self, series: str) -> float:
        """Return how many requests finished in this run while the detector followed the series.

        The number is 0 if the detector does not follow the series yet.
        """
        track = self.leak_memory.gpus.get(series) or self.leak_memory.host.get(series)
        return 0.0 if track is None else track.work.requests

    def step(self, snapshot: Snapshot) -> Snapshot:
        """Run a snapshot through the detector, and return it with the engine's state added.

        If the detector does not judge a series now, its state becomes unknown.
        """
        begin_seconds = self.span[0] if self.samples else snapshot.time_seconds
        self.span = (begin_seconds, snapshot.time_seconds)
        self.samples += 1
        self.engine, snapshot = update_engine(
            self.engine, self._steady_clock(snapshot), configured_bytes=self._reported_bytes
        )
        self._note_status(snapshot)
        self.memory = _merge_host(self.memory, snapshot.host)

        self._shared_uuids = frozenset(
            gpu.reading.uuid for gpu in snapshot.devices if not is_alone(gpu)
        )
        previous_memory = self.leak_memory
        self.leak_memory, self.leak_samples = answer(LEAK, previous_memory, snapshot)
        # The loop below overwrites the state of each series judged at this sample.
        for course in self._courses.values():
            course.state = LeakState.UNKNOWN
        for sample in self.leak_samples:
            if sample.metric.name in STATE_METRICS and sample.value:
                self._follow_course(sample, previous_memory)
            elif sample.metric is catalog.SLEEP_RESIDUE:
                self._note_residue(sample)
        return snapshot

    def _note_status(self, snapshot: Snapshot) -> None:
        """Record an exit or a hang, and each KV cache's highest stranded share."""
        status = snapshot.engine_status
        if status is None:
            return
        if status.event is not None:
            self.events.append(status.event)
        for engine, ratio in status.stranded_ratios:
            self.stranded[engine] = max(ratio, self.stranded.get(engine, 0.0))

    def _note_residue(self, sample: Sample) -> None:
        """Record a GPU's used bytes during a sleep, once they are stable."""
        sleep = self.leak_memory.sleep
        if sleep.settled and sleep.since_seconds is not None:
            gpu, uuid = sample.labels
            self.residues.setdefault((gpu, uuid), {})[sleep.since_seconds] = sample.value

    def _steady_clock(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with a clock that only moves forward.

        A trace contains the wall clock. The detector would fail if that clock was set back.
        """
        now_seconds = snapshot.monotonic_seconds + self._shift_seconds
        if now_seconds < self._now_seconds:
            self._shift_seconds += self._now_seconds - now_seconds + SET_BACK_STEP_SECONDS
            now_seconds = self._now_seconds + SET_BACK_STEP_SECONDS
        self._now_seconds = now_seconds
        if not self._shift_seconds:
            return snapshot
        return replace(snapshot, monotonic_seconds=now_seconds)

    def _follow_course(self, sample: Sample, previous_memory: LeakMemory) -> None:
        """Append a leak state and its figures to the history of the series."""
        # A GPU's labels are index, UUID and state. A host role's labels are role and state.
        *gpu_index, series, state = sample.labels
        inside = None
        asleep = None
        if gpu_index:
            self._gpu_indices[series] = int(gpu_index[0])
            track = self.leak_memory.gpus.get(series)
            previous_track = previous_memory.gpus.get(series)
            inside = self.leak_memory.inside.get(series)
            asleep = self.leak_memory.asleep.get(series)
        else:
            track = self.leak_memory.host.get(series)
            previous_track = previous_memory.host.get(series)
        course = self._courses.setdefault(series, LeakCourse())
        estimate = None
        has_restarted = False
        if track is not None:  # there is no track until the engine has worked
            estimate = sharpen_track(track, asleep, inside).estimate
            # The clock of a track starts from 0 with each run of the engine.
            now_seconds = track.clock.now_seconds
            has_restarted = (
                previous_track is not None and now_seconds < previous_track.clock.now_seconds
            )
        moment = build_moment(self.span[1], estimate, find_location(estimate, inside))
        course.step(LeakState(state), moment, restarted=has_restarted)
        if course.state is LeakState.LEAKING:
            # The location of growth comes from the probe, which measures only the engine's memory.
            # Growth with a known location is therefore in the engine's memory.
            is_engines = series not in self._shared_uuids or moment.location is not None
            course.is_holder_known = is_engines


def _merge_host(earlier: HostMemory | None, newest: HostMemory | None) -> HostMemory | None:
    """Return the reading with the higher host memory usage, or None if both are None.

    The usage and the limit in the result are from the same sample. The limit's basis may change,
    for example from the machine to a cgroup. If the basis changed, only the latest reading is used.
    Shared memory and OOM kills have the higher value of the two readings.
    """
    if newest is None or earlier is None:
        return newest or earlier
    # Figures with different bases are not comparable.
    fullest = newest
    if newest.basis in (None, earlier.basis):
        fullest = max(earlier, newest, key=_rank_fullness)
    fullest_shm = max(earlier, newest, key=lambda memory: memory.shm_used_bytes or 0)
    oom_kills = newest.oom_kills
    if oom_kills is None:
        oom_kills = earlier.oom_kills
    elif earlier.oom_kills is not None:
        oom_kills = max(oom_kills, earlier.oom_kills)
    return replace(
        fullest,
        shm_used_bytes=fullest_shm.shm_used_bytes,
        shm_limit_bytes=fullest_shm.shm_limit_bytes,
        oom_kills=oom_kills,
    )


def _rank_fullness(memory: HostMemory) -> tuple[float, int]:
    """Return a sort key: the usage ratio, or the used bytes without a limit."""
    used_bytes = memory.used_bytes or 0
    return used_bytes / (memory.limit_bytes or inf), used_bytes


def build_moment(
    seconds: float, estimate: Estimate | None, location: LeakLocation | None
) -> Moment:
    """Return the detector's figures at this time.

    All are None if there is no estimate. Figures that are not finite are also None. The page has no
    series for them.
    """
    if estimate is None:
        return Moment(seconds=seconds)
    return Moment(
        seconds=seconds,
        bytes_per_second=_drop_infinite(estimate.bytes_per_second),
        bytes_per_second_lower=_drop_infinite(estimate.lower),
        bytes_per_second_upper=_drop_infinite(estimate.upper),
        bytes_per_request=_drop_infinite(estimate.bytes_per_request),
        leaked_bytes=_drop_infinite(estimate.leaked_bytes),
        time_to_oom_seconds=_drop_infinite(estimate.oom_seconds),
        time_to_oom_seconds_lower=_drop_infinite(estimate.oom_seconds_lower),
        by_requests=estimate.by_requests,
        location=location,
    )


def _drop_infinite(value: float | None) -> float | None:
    """Return the value, or None if it is unknown or infinite."""
    return value if value is not None and isfinite(value) else None


def describe_span(samples: int, begin: float, end: float) -> str:
    """Describe a trace's number of samples, duration, start and end."""
    length = format_duration(end - begin)
    return f"{samples} samples over {length}, {format_instant(begin)} to {format_instant(end)}"
