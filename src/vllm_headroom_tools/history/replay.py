"""A past fed through the daemon's leak detector."""

from __future__ import annotations

from math import isfinite
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.derive import LEAK, answer
from vllm_headroom.derive.leak.facts import Estimate
from vllm_headroom.derive.leak.inside import find_location, sharpen_track
from vllm_headroom.derive.leak.leak import LeakMemory
from vllm_headroom.derive.life.lives import EngineRuns, RunState, update_run
from vllm_headroom.model import HostMemory, Sample, Snapshot
from vllm_headroom.vocabulary import LeakLocation, LeakState, Role
from vllm_headroom_tools.history.course import Course, Moment

STATES: Final = frozenset({catalog.LEAK_STATE.name, catalog.HOST_LEAK_STATE.name})

LONGEST_STEP_SECONDS: Final = 300.0
"""The longest sampling interval that can be set: what lies further apart was not watched in between."""

_SeriesName = str
"""The UUID of a GPU, or the role of processes on the host."""


class LeakReplay:
    """What the detector said of every GPU and every host role, from the first sample to the newest.

    `memory` is the host memory when last known, with the most that was in use. `residues` is what was kept of each GPU,
    by its labels, in each sleep, by when that began; `stranded` the most of an engine's KV cache that no request held.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._first_seconds = 0.0
        self._last_seconds = 0.0
        self._memory = LEAK.initial
        self._life = RunState()
        self._indices: dict[str, int] = {}
        self._gpus: dict[_SeriesName, Course] = {}
        self._host: dict[_SeriesName, Course] = {}
        self.memory: HostMemory | None = None
        self.residues: dict[tuple[str, str], dict[float, float]] = {}
        self.stranded: dict[tuple[str, str], float] = {}

    @property
    def span(self) -> tuple[float, float]:
        """The first and the last time of the trace; a clock may have been set back between them."""
        return self._first_seconds, self._last_seconds

    @property
    def gpus(self) -> tuple[tuple[int, str, Course], ...]:
        """Index, UUID and course of each GPU, in the order of the indices."""
        return tuple(sorted((self._indices[uuid], uuid, course) for uuid, course in self._gpus.items()))

    @property
    def host(self) -> tuple[tuple[Role, Course], ...]:
        """The course of each role's resident memory."""
        return tuple((role, self._host[role]) for role in Role if role in self._host)

    @property
    def leaked(self) -> bool:
        """Whether there ever was an alarm."""
        return any(course.leaking for course in (*self._gpus.values(), *self._host.values()))

    @property
    def lives(self) -> EngineRuns:
        """The lives of the engine up to the newest sample."""
        return self._life.lives

    def course(self, series: _SeriesName) -> Course:
        """Return the course of a GPU, by its UUID, or of a host role; of one that was never seen nothing is known."""
        return self._gpus.get(series) or self._host.get(series) or Course()

    def requests(self, series: _SeriesName) -> float:
        """Return the requests that finished since the detector follows a series in this life."""
        track = self._memory.gpus.get(series) or self._memory.host.get(series)
        return 0.0 if track is None else track.work.requests

    def step(self, snapshot: Snapshot) -> Snapshot:
        """Feed the detector one snapshot and keep what it says; a series it says nothing of is unknown now.

        Return the snapshot with what is known of the engine's life then.
        """
        if not self.samples:
            self._first_seconds = snapshot.time_seconds
        self.samples += 1
        self._last_seconds = snapshot.time_seconds
        self._life, snapshot = update_run(self._life, snapshot)
        self.memory = _merge_host(self.memory, snapshot.host)
        for engine, ratio in () if snapshot.life is None else snapshot.life.stranded:
            self.stranded[engine] = max(ratio, self.stranded.get(engine, 0.0))
        before = self._memory
        self._memory, samples = answer(LEAK, before, snapshot)
        for course in (*self._gpus.values(), *self._host.values()):
            course.state = LeakState.UNKNOWN
        sleep = self._memory.sleep
        for sample in samples:
            if sample.metric.name in STATES and sample.value:
                self._follow(sample, before)
            elif sample.metric is catalog.SLEEP_RESIDUE and sleep.settled and sleep.since_seconds is not None:
                gpu, uuid = sample.labels
                self.residues.setdefault((gpu, uuid), {})[sleep.since_seconds] = sample.value
        return snapshot

    def _follow(self, sample: Sample, before: LeakMemory) -> None:
        """Go on with the series that a sample names the state of."""
        *place, name, state = sample.labels
        if place:
            self._indices[name] = int(place[0])
        course = (self._gpus if place else self._host).setdefault(name, Course())
        old, track = (
            (memory.gpus if place else memory.host).get(name)  # none before the engine has worked
            for memory in (before, self._memory)
        )
        # a track's own time begins anew with each life
        anew = old is not None and track is not None and track.seconds < old.seconds
        inside, asleep = (self._memory.inside.get(name), self._memory.asleep.get(name)) if place else (None, None)
        estimate = None if track is None else sharpen_track(track, asleep, inside).estimate
        course.step(
            LeakState(state), _build_moment(self._last_seconds, estimate, find_location(estimate, inside)), anew=anew
        )


def _merge_host(before: HostMemory | None, now: HostMemory | None) -> HostMemory | None:
    """Return what is known now, with the most that ever was in use of it, and of its shared memory."""
    if now is None or before is None:
        return now or before
    most = {
        name: max((known for each in (before, now) if (known := getattr(each, name)) is not None), default=None)
        for name in ("used_bytes", "shm_used_bytes", "oom_kills")
    }
    kept = {name: getattr(now, name) or getattr(before, name) for name in ("limit_bytes", "shm_limit_bytes")}
    return HostMemory(**most, **kept)


def _build_moment(seconds: float, estimate: Estimate | None, where: LeakLocation | None) -> Moment:
    """Return what the detector says of a series; as on the page, without what is no number."""
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
    known = {name: value for name, value in figures.items() if value is not None and isfinite(value)}
    return Moment(seconds=seconds, by_requests=estimate.by_requests, location=where, **known)
