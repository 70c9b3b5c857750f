"""The detector alone on the series that leaks or might: its observations once, then their course as often as wanted.

A tenth of the cost of a replay. The memory in use that a probe shows, and what is kept in sleep, are left out.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from judge import read_series, score
from msgspec.structs import replace
from oncall import END_SECONDS
from traces import Labelled

from vllm_headroom.derive.leak.facts import Observation, Track, start_track
from vllm_headroom.derive.leak.leak import find_leak_state, keep_service, observe_gpus, observe_host
from vllm_headroom.derive.leak.track import observe
from vllm_headroom.derive.life.engine import EngineMemory, update_engine
from vllm_headroom.derive.stability import LoadState, derive_load
from vllm_headroom.model import EngineStatus, Snapshot
from vllm_headroom.vocabulary import EngineState, LeakState
from vllm_headroom_tools.history import LeakCourse, Moment, build_moment
from vllm_headroom_tools.trace import parse_snapshot

SERVING: Final = EngineStatus(state=EngineState.SERVING)


class Seen(NamedTuple):
    """One sample: its time, the observation, whether load is settled, whether growth is the engine's, and it serves."""

    seconds: float
    observation: Observation | None
    settled: bool
    is_in_service: bool


Row = dict[str, Any]
Watched = tuple[list[Seen], Row, list[tuple[float, float, float]]]
"""What was observed of a trace, its truth, and its readings for the plain rules."""


def watch(trace: Labelled) -> Watched:
    """Return what the detector observes of a trace, without any verdict on it."""
    engine = EngineMemory()
    load = LoadState()
    watched: list[Seen] = []
    is_up = _is_always_up(trace.samples)
    for sample in trace.samples:
        snapshot = parse_snapshot(sample)
        assert isinstance(snapshot, Snapshot), snapshot
        # An engine that is up all the time stays in service: this saves half of the time.
        if is_up and watched and watched[-1].is_in_service:
            snapshot = replace(snapshot, engine_status=SERVING)
        else:
            engine, snapshot = update_engine(engine, snapshot)
        served = keep_service(snapshot)
        load, _ = derive_load(load, served)
        if trace.truth["series"] != "gpu":
            observation = dict(observe_host(served)).get(trace.truth["series"])
        else:
            _, observation = next(observe_gpus(served, served.owned_gpus[:1]), (None, None))
        watched.append(Seen(sample["t"], observation, load.is_stable is not False, bool(snapshot.is_in_service)))
    return watched, trace.truth, read_series(trace)


def _is_always_up(samples: list[dict[str, Any]]) -> bool:
    """Return whether page and GPUs could be read in each sample, and one run gave all of them."""
    for sample in samples:
        if not sample["engines"] or not sample["gpus"]:
            return False
    return len({sample["engines"][0].get("started_at") for sample in samples}) == 1


def follow(watched: Watched) -> Row:
    """Return the trace's row, as `judge` does."""
    samples, truth, readings = watched
    course = LeakCourse()
    track: Track | None = None
    alarm_before_end: Moment | None = None
    for sample in samples:
        state = LeakState.UNKNOWN
        estimate = None
        has_restarted = False
        if sample.observation is not None:
            previous = track or start_track(sample.observation.seconds)
            track = observe(previous, sample.observation)
            estimate = track.estimate
            # A track's own time goes back only where it starts over for another run.
            has_restarted = track.clock.now_seconds < previous.clock.now_seconds
            if sample.is_in_service:
                is_known = sample.observation.held_bytes is not None
                state = find_leak_state(track, is_known=is_known, is_settled=sample.settled)
        course.step(state, build_moment(sample.seconds, estimate, None), restarted=has_restarted)
        if truth["oom_at"] is not None and sample.seconds <= truth["oom_at"] - END_SECONDS:
            alarm_before_end = course.last_alarm
    return score(course, alarm_before_end, truth, readings)
