"""A past fed through the daemon's leak detector."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.derive import derivations
from vllm_headroom.derive.derivation import Derivation, answer
from vllm_headroom.derive.leak.leak import LeakMemory
from vllm_headroom.derive.life.follow import LifeState, lived
from vllm_headroom.model import Sample, Snapshot
from vllm_headroom.trace.course import Course, Moment
from vllm_headroom.vocabulary import LeakState, Role

STATES: Final = frozenset({catalog.LEAK_STATE.name, catalog.HOST_LEAK_STATE.name})
FIGURES: Final = {
    catalog.LEAK_RATE.name: "bytes_per_second",
    catalog.LEAK_RATE_LOWER.name: "bytes_per_second_lower",
    catalog.LEAK_RATE_UPPER.name: "bytes_per_second_upper",
    catalog.LEAK_PER_REQUEST.name: "bytes_per_request",
    catalog.LEAKED.name: "leaked_bytes",
    catalog.TIME_TO_OOM.name: "time_to_oom_seconds",
    catalog.TIME_TO_OOM_LOWER.name: "time_to_oom_seconds_lower",
    catalog.HOST_LEAK_RATE.name: "bytes_per_second",
}
"""What a moment keeps of the detector's samples."""

_SeriesName = str
"""The UUID of a GPU, or the role of processes on the host."""


class Watch:
    """What the detector said of every GPU and every host role, from the first sample to the newest."""

    def __init__(self) -> None:
        self.samples = 0
        self._first_seconds = 0.0
        self._last_seconds = 0.0
        self._detector = _detector()
        self._memory = self._detector.initial
        self._life = LifeState()
        self._indices: dict[str, int] = {}
        self._gpus: dict[_SeriesName, Course] = {}
        self._host: dict[_SeriesName, Course] = {}

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

    def step(self, snapshot: Snapshot) -> None:
        """Feed the detector one snapshot and keep what it says; a series it says nothing of is unknown now."""
        if not self.samples:
            self._first_seconds = snapshot.time_seconds
        self.samples += 1
        self._last_seconds = snapshot.time_seconds
        self._life, snapshot = lived(self._life, snapshot)
        self._memory, samples = answer(self._detector, self._memory, snapshot)
        for course in (*self._gpus.values(), *self._host.values()):
            course.state = LeakState.UNKNOWN
        for labels, (state, figures) in _said(samples).items():
            *place, name = labels
            if place:
                self._indices[name] = int(place[0])
            course = (self._gpus if place else self._host).setdefault(name, Course())
            track = (self._memory.gpus if place else self._memory.host).tracks.get(name)
            driven = None if track is None or track.estimate is None else track.estimate.by_requests
            course.step(state, Moment(seconds=snapshot.time_seconds, by_requests=driven, **figures))


def _detector() -> Derivation[LeakMemory]:
    return next(each for each in derivations() if each.name == "leak")


def _said(samples: Iterable[Sample]) -> dict[tuple[str, ...], tuple[LeakState, dict[str, float]]]:
    """Return the state and the figures of each series, by its labels."""
    said: dict[tuple[str, ...], tuple[LeakState, dict[str, float]]] = {}
    for sample in samples:
        name = sample.metric.name
        if name in STATES and sample.value:
            said[sample.labels[:-1]] = (LeakState(sample.labels[-1]), {})
        elif name in FIGURES:
            said[sample.labels][1][FIGURES[name]] = sample.value
    return said
