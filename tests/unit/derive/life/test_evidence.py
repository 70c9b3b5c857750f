"""A witness that fails proves nothing: no exit, no restart and no end is made of what could not be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, product
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.samples import probed
from tests.unit.derive.life.watch import (
    BEGAN,
    LOGIN,
    NEXT,
    NO_GPU,
    REFUSED,
    SILENT,
    STEP_SECONDS,
    UNSEEN,
    WHOLE,
    Watch,
    card,
    working,
)
from vllm_headroom.model import EnginePage, EngineProcess, EngineStatus, Failure, Gpu, ProbeReadings, SchedulerReading
from vllm_headroom.vocabulary import EngineState, ExitReason, Reason, Source

LATE: Final = Failure(source=Source.PROCESS, reason=Reason.TIMEOUT, message="late")
NO_PROBE: Final = Failure(source=Source.PROBE, reason=Reason.TIMEOUT, message="late")
SOURCES: Final = ("page", "processes", "gpus", "probe")
TEN_MINUTES: Final = int(600 / STEP_SECONDS)
HALF_A_MINUTE: Final = 30.0

SHORT_OF_CPU: Final = 0.99
"""Without it a server that computes for minutes and gives no page is one that spins."""


@dataclass(frozen=True)
class Stage:
    """What is true of the engine at one time: its state, and what each source shows where it can be read."""

    state: EngineState
    page: Callable[[float], EnginePage | Failure] = lambda _: REFUSED
    processes: tuple[EngineProcess, ...] = ()
    held_gib: float = 0.0
    computes: bool = True


STARTED: Final = BEGAN + 9000
ABSENT: Final = Stage(EngineState.DOWN)
STARTING: Final = Stage(EngineState.STARTING, processes=WHOLE, held_gib=5.0)
EARLY: Final = Stage(EngineState.STARTING, processes=WHOLE[:1], held_gib=0.4)
SERVING: Final = Stage(EngineState.SERVING, working, WHOLE, 70.0)
ASLEEP: Final = Stage(EngineState.ASLEEP, lambda _: working(600, running=0.0, awake=False), WHOLE, 1.0)
HANGS: Final = Stage(EngineState.STALLED, lambda _: working(600), WHOLE, 70.0)
STOPPED: Final = Stage(EngineState.STALLED, lambda _: SILENT, WHOLE, 70.0, computes=False)
BROKEN: Final = Stage(EngineState.STALLED, lambda _: working(600, running=0.0), WHOLE[:1], 0.0)
AGAIN: Final = Stage(EngineState.STARTING, processes=NEXT, held_gib=5.0)
ANEW: Final = Stage(EngineState.SERVING, lambda at: working(at, started=STARTED), NEXT, 70.0)

STAGES: Final = {
    "absent": (ABSENT,),
    "starting": (EARLY,),
    "loading": (EARLY, STARTING),
    "serving": (EARLY, STARTING, SERVING),
    "asleep": (EARLY, STARTING, SERVING, ASLEEP),
    "hangs": (STARTING, SERVING, HANGS),
    "stopped": (STARTING, SERVING, STOPPED),
    "broken": (STARTING, SERVING, BROKEN),
    "ended": (STARTING, SERVING, ABSENT),
    "starting again": (SERVING, ABSENT, AGAIN),
}


class World:
    """An engine, and a sidecar that cannot always read it; without a view its pod shows no process of others."""

    def __init__(self, *, has_view: bool, knows_pids: bool) -> None:
        self.watch = Watch(processes=())
        self._has_view, self._knows_pids = has_view, knows_pids
        self._cpu_seconds = 0.0

    def look(self, stage: Stage, failures: dict[str, Failure], after_seconds: float = STEP_SECONDS) -> EngineStatus:
        """Look once; a source that fails gives its failure."""
        at = self.watch.at + after_seconds
        self._cpu_seconds += after_seconds if stage.computes else 0.0
        cpu_fields = {"cpu_seconds": self._cpu_seconds, "cpu_pressure_ratio": SHORT_OF_CPU}
        alive = tuple(replace(process, **cpu_fields) for process in stage.processes)
        processes = failures.get("processes", alive if self._has_view else UNSEEN)
        lost = self._knows_pids and isinstance(processes, Failure)
        gpu_sample = replace(card(stage.held_gib), **({"held_bytes": None} if lost else {}))
        gpus: tuple[Gpu, ...] | Failure = failures.get("gpus", (gpu_sample,))
        core = ProbeReadings(present=(probed(scheduler=SchedulerReading(steps_total=1)),) if stage.processes else ())
        return self.watch.look(
            failures.get("page", stage.page(at)),
            processes=processes,
            gpus=gpus,
            probe=failures.get("probe", core),  # type: ignore[arg-type]
            after_seconds=after_seconds,
        )

    def pass_through(self, *stages: Stage) -> EngineStatus:
        """Look at each stage for more than a minute, without a failure."""
        for stage in stages:
            for _ in range(4):
                life = self.look(stage, {}, HALF_A_MINUTE)
        return life


def exits(life: EngineStatus) -> int:
    return sum(count for _, count in life.exits)


PAIRS: Final = [*((source,) for source in SOURCES), *combinations(SOURCES, 2)]


LENGTHS: Final = [(1, STEP_SECONDS), (13, STEP_SECONDS), (20, HALF_A_MINUTE)]
WAYS: Final = [(SILENT, LATE, True), (REFUSED, LATE, False), (REFUSED, UNSEEN, True), (LOGIN, UNSEEN, False)]


def test_sources_that_fail_end_no_run_and_begin_none(subtests: pytest.Subtests) -> None:
    for stages in STAGES.values():
        for sources in PAIRS:
            with subtests.test(stages=stages, sources=sources):
                for (looks, interval_seconds), (page, late, knows_pids) in product(LENGTHS, WAYS):
                    world = World(has_view=True, knows_pids=knows_pids)
                    earlier_engine_status = world.pass_through(*stages)
                    assert earlier_engine_status.state is stages[-1].state
                    failing = {"page": page, "processes": late, "gpus": NO_GPU, "probe": NO_PROBE}
                    failures = {source: failing[source] for source in sources}
                    lives = [world.look(stages[-1], failures, interval_seconds) for _ in range(looks)]
                    lives += [world.look(stages[-1], {}) for _ in range(13)]

                    assert {status.state for status in lives} <= {earlier_engine_status.state, EngineState.UNKNOWN}
                    assert lives[-1].state is earlier_engine_status.state
                    counts = {(exits(live), live.restarts, live.exit_reason) for live in lives}
                    assert counts == {(exits(earlier_engine_status), earlier_engine_status.restarts, None)}


def test_a_sidecar_without_a_view_of_processes_ends_no_run_either(subtests: pytest.Subtests) -> None:
    """There a page that does not answer may be a hang: an end is all that must not be made of it."""
    for name in ["loading", "serving", "asleep"]:
        for sources in PAIRS:
            with subtests.test(name=name, sources=sources):
                for looks, interval_seconds in LENGTHS:
                    world = World(has_view=False, knows_pids=False)
                    earlier_engine_status = world.pass_through(*STAGES[name])
                    failing = {"page": SILENT, "processes": UNSEEN, "gpus": NO_GPU, "probe": NO_PROBE}
                    failures = {source: failing[source] for source in sources}
                    lives = [world.look(STAGES[name][-1], failures, interval_seconds) for _ in range(looks)]
                    lives += [world.look(STAGES[name][-1], {}) for _ in range(3)]

                    assert lives[-1].state is earlier_engine_status.state
                    assert EngineState.DOWN not in {status.state for status in lives}
                    assert {(exits(live), live.restarts) for live in lives} == {
                        (exits(earlier_engine_status), earlier_engine_status.restarts)
                    }


WINDOW: Final = st.tuples(st.sampled_from(PAIRS), st.integers(0, 120), st.integers(1, TEN_MINUTES), st.booleans())
COURSE: Final = (ABSENT, EARLY, STARTING, SERVING, ASLEEP, SERVING, ABSENT, AGAIN, ANEW, ANEW)
HEALED: Final = 20 * COURSE.index(ANEW)
ENDED: Final = 20 * COURSE.index(AGAIN) - 20


@given(windows=st.lists(WINDOW, max_size=4), page=st.sampled_from((SILENT, REFUSED, LOGIN)), knows_pids=st.booleans())
def test_whatever_fails_whenever_a_run_ends_once_and_when_it_did(
    windows: list[tuple[tuple[str, ...], int, int, bool]], page: Failure, *, knows_pids: bool
) -> None:
    world, runs_seen = World(has_view=True, knows_pids=knows_pids), 0
    for turn, stage in enumerate(course_stage for course_stage in COURSE for _ in range(20)):
        failures: dict[str, Failure] = {}
        for sources, begin, length, is_late in windows:
            if begin <= turn < min(begin + length, HEALED):
                late = (
                    LATE if is_late or not world.watch.state.runs.are_processes_visible else UNSEEN
                )  # closed from the start: no view
                failing = {"page": page, "processes": late, "gpus": NO_GPU, "probe": NO_PROBE}
                failures |= {source: failing[source] for source in sources}
        life = world.look(stage, failures)
        if turn < ENDED:
            runs_seen = int(world.watch.state.runs.newest is not None)
            assert (exits(life), life.restarts) == (0, 0)
            assert turn < 2 * 20 or life.state is not EngineState.DOWN

    assert (life.state, exits(life), life.restarts) == (EngineState.SERVING, runs_seen, runs_seen)


def test_a_late_proc_is_no_end_of_an_engine_that_loads() -> None:
    """As beside a real vLLM: one pid, alive throughout, and a /proc that answers now and then."""
    world = World(has_view=True, knows_pids=False)
    for turn in range(20):
        life = world.look(EARLY, {"processes": LATE} if turn % 5 else {})

    assert (life.state, exits(life), life.restarts) == (EngineState.STARTING, 0, 0)


@pytest.mark.parametrize("late", [LATE, UNSEEN])
def test_a_state_is_held_for_a_minute_and_then_unknown(late: Failure) -> None:
    world = World(has_view=True, knows_pids=True)
    world.pass_through(*STAGES["starting"])
    states = [world.look(EARLY, {"processes": late}).state for _ in range(14)]

    assert states == [EngineState.STARTING] * 12 + [EngineState.UNKNOWN] * 2


def test_an_engine_that_ended_stays_down_while_its_port_is_closed_whether_or_not_proc_answers() -> None:
    world = World(has_view=True, knows_pids=True)
    world.pass_through(*STAGES["ended"])

    assert {world.look(ABSENT, {"processes": LATE}).state for _ in range(TEN_MINUTES)} == {EngineState.DOWN}


def test_a_daemon_that_starts_beside_a_late_proc_knows_of_no_end() -> None:
    world = World(has_view=True, knows_pids=False)

    assert {world.look(EARLY, {"processes": LATE}).state for _ in range(TEN_MINUTES)} == {EngineState.UNKNOWN}
    assert world.look(EARLY, {}).state is EngineState.STARTING


def test_a_process_that_is_gone_when_its_page_has_just_answered_has_ended() -> None:
    """The page is read a moment before /proc is."""
    world = World(has_view=True, knows_pids=True)
    world.pass_through(*STAGES["serving"])
    world.look(replace_page(ABSENT, SERVING), {})
    life = world.look(ABSENT, {})

    assert (life.state, dict(life.exits)[ExitReason.GONE]) == (EngineState.DOWN, 1)


def replace_page(stage: Stage, page_stage: Stage) -> Stage:
    return Stage(stage.state, page_stage.page, stage.processes, stage.held_gib)
