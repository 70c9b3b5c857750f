"""The detector alone on the series that leaks or might: its observations once, then their course as often as wanted.

A tenth of the cost of a replay. The memory in use that a probe shows, and what is kept in sleep, are left out.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from judge import read_series, score
from msgspec.structs import replace
from oncall import END_SECONDS
from traces import Labelled

from vllm_headroom.derive.leak.facts import start_track
from vllm_headroom.derive.leak.leak import find_leak_state
from vllm_headroom.derive.leak.observation import Observation, observe_gpus, observe_host
from vllm_headroom.derive.leak.track import observe
from vllm_headroom.derive.life.engine import EngineMemory, update_engine
from vllm_headroom.derive.life.service import keep_service
from vllm_headroom.derive.stability import LoadState, derive_load
from vllm_headroom.model import EngineStatus, Snapshot
from vllm_headroom.vocabulary import EngineState, LeakState
from vllm_headroom_tools.history import LeakCourse, build_moment
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
    state, load = EngineMemory(), LoadState()
    found: list[Seen] = []
    is_up = all(sample["engines"] and sample["gpus"] for sample in trace.samples)
    is_up = is_up and len({sample["engines"][0].get("started_at") for sample in trace.samples}) == 1
    for sample in trace.samples:
        snapshot = parse_snapshot(sample)
        assert isinstance(snapshot, Snapshot), snapshot
        if is_up and found and found[-1].is_in_service:  # it will stay so: saves half of the time
            snapshot = replace(snapshot, engine_status=SERVING)
        else:
            state, snapshot = update_engine(state, snapshot)
        served = keep_service(snapshot)
        load, _ = derive_load(load, served)
        if trace.truth["series"] != "gpu":
            observation = dict(observe_host(served)).get(trace.truth["series"])
        else:
            _, observation = next(observe_gpus(served, served.owned_gpus[:1]), (None, None))
        found.append(Seen(sample["t"], observation, load.is_stable is not False, bool(snapshot.is_in_service)))
    return found, trace.truth, read_series(trace)


def follow(watched: Watched) -> Row:
    """Return the trace's row, as `judge` does."""
    samples, truth, readings = watched
    course, track, before_end = LeakCourse(), None, None
    for sample in samples:
        state, known, again = LeakState.UNKNOWN, None, False
        if sample.observation is not None:
            old = track or start_track(sample.observation.seconds)
            track = observe(old, sample.observation)
            again, known = track.clock.now_seconds < old.clock.now_seconds, track.estimate
            if sample.is_in_service:
                state = find_leak_state(
                    track, is_known=sample.observation.held_bytes is not None, is_settled=sample.settled
                )
        course.step(state, build_moment(sample.seconds, known, None), restarted=again)
        if truth["oom_at"] is not None and sample.seconds <= truth["oom_at"] - END_SECONDS:
            before_end = course.last_alarm
    return score(course, before_end, truth, readings)
