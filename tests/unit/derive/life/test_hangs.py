"""Hangs that begin idle: the page shows no work, and the signs of a hang are elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Final

import pytest
from msgspec.structs import replace

from tests.samples import probed
from tests.unit.derive.life.watch import CORE, SERVER, SILENT, STEP_SECONDS, UNSEEN, WORKER, Watch, working
from vllm_headroom.derive.life.engine import EngineMemory, update_engine
from vllm_headroom.model import EnginePage, EngineProcess, Failure, HangSign, ProbeReadings, SchedulerReading, Snapshot
from vllm_headroom.trace.entries import HEADER, build_record, encode_line
from vllm_headroom.vocabulary import EngineState, Reason, Source
from vllm_headroom_tools.trace import parse_trace

SERVING, UNKNOWN, STALLED = EngineState.SERVING, EngineState.UNKNOWN, EngineState.STALLED
IDLE: Final = working(20, running=0.0)
WRITES: Final = probed(scheduler=SchedulerReading(steps_total=9))
TWO_MINUTES: Final = int(120 / STEP_SECONDS)
TEN_MINUTES: Final = int(600 / STEP_SECONDS)
LATE: Final = Failure(source=Source.PROCESS, reason=Reason.TIMEOUT, message="late")


class Idle:
    """An engine that has been idle for ten minutes, and what each reading shows of it."""

    def __init__(self, step_seconds: float = STEP_SECONDS) -> None:
        self.watch = Watch()
        self.snapshots: list[Snapshot] = []
        self.states: list[EngineState] = []
        self._step_seconds = step_seconds
        for _ in range(int(600 / step_seconds)):
            self.look()
        assert set(self.states) == {SERVING}
        self.states.clear()

    def look(
        self,
        *,
        core: str = "S",
        worker: str = "S",
        server: str = "S",
        is_mute: bool = False,
        writes: bool = True,
        wait: float | None = None,
        page: EnginePage = IDLE,
        is_late: bool = False,
    ) -> EngineState:
        """Look once; `wait` is for how long a request had no answer."""
        processes: tuple[EngineProcess, ...] = (
            replace(SERVER, state=server, wait_seconds=wait, cpu_pressure_ratio=0.1, cpu_seconds=5.0),
            replace(CORE, state=core),
            replace(WORKER, state=worker),
        )
        other_probes = (probed(),) if writes else ()
        probe = (
            ProbeReadings(present=other_probes, silent=(WRITES,))
            if is_mute
            else ProbeReadings(present=(*other_probes, WRITES))
        )
        self.watch.look(page, processes=LATE if is_late else processes, probe=probe, after_seconds=self._step_seconds)
        assert self.watch.seen is not None
        assert self.watch.seen.engine_status is not None
        self.snapshots.append(self.watch.seen)
        self.states.append(self.watch.seen.engine_status.state)
        return self.states[-1]

    @property
    def signs(self) -> tuple[HangSign, ...]:
        assert self.watch.seen is not None
        assert self.watch.seen.engine_status is not None
        return self.watch.seen.engine_status.hang_signs


SIGNS: Final[dict[str, Callable[[float], dict[str, object]]]] = {
    "stopped": lambda _: {"core": "T"},
    "traced": lambda _: {"core": "t"},
    "blocked": lambda _: {"worker": "D"},
    "mute": lambda _: {"is_mute": True},
    "unanswered": lambda seconds: {"wait": seconds if seconds >= 40 else None},
}
PAIRS: Final = [pair for pair in combinations(SIGNS, 2) if not set(pair) <= {"stopped", "traced", "blocked"}]


def look_long(engine: Idle, names: tuple[str, ...], looks: int, step_seconds: float = STEP_SECONDS) -> None:
    for turn in range(1, looks + 1):
        shown = {name: value for sign in names for name, value in SIGNS[sign](turn * step_seconds).items()}
        engine.look(**shown)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SIGNS)
def test_one_sign_makes_the_state_unknown_and_never_stalled(name: str) -> None:
    engine = Idle()
    look_long(engine, (name,), TEN_MINUTES)

    assert engine.states[:3] == [SERVING] * 3
    assert engine.states[TWO_MINUTES:] == [UNKNOWN] * (TEN_MINUTES - TWO_MINUTES)
    assert len(engine.signs) == 1
    assert engine.look() is SERVING


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
@pytest.mark.parametrize("step_seconds", [1.0, STEP_SECONDS, 30.0])
def test_two_signs_make_it_stalled_within_two_minutes(names: tuple[str, ...], step_seconds: float) -> None:
    engine = Idle(step_seconds)
    look_long(engine, names, int(120 / step_seconds), step_seconds)

    assert engine.states[0] is SERVING
    assert engine.states[-1] is STALLED
    assert len(engine.signs) == 2
    assert engine.look() is SERVING


def test_all_signs_of_one_kind_are_one() -> None:
    engine = Idle()
    for _ in range(TEN_MINUTES):
        engine.look(core="T", worker="D")

    assert (engine.states[-1], engine.signs) == (UNKNOWN, (HangSign.STUCK,))


def test_a_healthy_engine_that_looks_like_one_that_hangs_is_serving() -> None:
    """D at one reading, or of another process at the next; a probe that restarts; a folder that is full."""
    engine = Idle()
    for turn in range(TEN_MINUTES):
        engine.look(core="D" if turn % 3 == 0 else "S", is_mute=turn % 5 == 0)
        engine.look(core="D", worker="S", is_mute=False)
        engine.look(core="S", worker="D", is_mute=True, writes=False)
        engine.look(core="R", server="R")
    for _ in range(TEN_MINUTES):
        engine.look(is_mute=True, writes=False)
    for _ in range(TEN_MINUTES):
        engine.look(server="D")

    assert set(engine.states) == {SERVING}


def test_a_client_that_never_sent_the_rest_of_its_request_hides_no_healthy_engine() -> None:
    engine = Idle()
    for turn in range(1, TEN_MINUTES):
        minutes, wait = turn * STEP_SECONDS // 60, turn * STEP_SECONDS + 200
        engine.look(wait=wait, page=working(21 + minutes, running=0.0))

    assert set(engine.states) == {SERVING}


def test_with_visible_work_the_page_decides() -> None:
    engine = Idle()
    for turn in range(1, TEN_MINUTES):
        engine.look(core="T", is_mute=True, wait=STEP_SECONDS * turn, page=working(20 + turn))

    assert set(engine.states) == {SERVING}
    assert engine.signs == ()


def test_an_engine_that_sleeps_is_asleep_whatever_it_shows() -> None:
    engine = Idle()
    for _ in range(TWO_MINUTES):
        engine.look(core="T", is_mute=True, page=working(20, running=0.0, awake=False))

    assert set(engine.states) == {EngineState.ASLEEP}


def test_a_stall_lasts_while_one_sign_does_and_ends_with_work() -> None:
    engine = Idle()
    look_long(engine, ("stopped", "unanswered"), TWO_MINUTES)

    assert engine.look(core="T") is STALLED, "the client has gone"
    assert engine.look(wait=130.0) is STALLED, "it goes on, and no token has come"
    assert engine.look(wait=135.0, page=working(20, running=1.0)) is SERVING
    assert engine.look(page=working(21, running=0.0)) is SERVING


def test_signs_stay_while_proc_is_late_and_do_not_age() -> None:
    engine = Idle()
    engine.look(core="D")
    for _ in range(TWO_MINUTES):
        engine.look(is_late=True)
    assert set(engine.states) == {SERVING}, "seen once"

    look_long(engine, ("blocked", "unanswered"), TWO_MINUTES)
    assert {engine.look(is_late=True) for _ in range(TWO_MINUTES)} == {STALLED}


def spinning(looks: int, page: Failure, pressure: float | None) -> tuple[list[EngineState], list[Snapshot]]:
    """Return the states of an engine whose server computes and gives no page any more."""
    watch, states, snapshots = Watch(), list[EngineState](), list[Snapshot]()
    for turn in range(-12, looks):
        server = replace(SERVER, cpu_seconds=1000.0 + 4.0 * turn, cpu_pressure_ratio=pressure)
        watch.look(page if turn >= 0 else working(turn + 20), processes=(server, CORE, WORKER))
        assert watch.seen is not None
        assert watch.seen.engine_status is not None
        states.append(watch.seen.engine_status.state)
        snapshots.append(watch.seen)
    return states[12:], snapshots


@pytest.mark.parametrize("pressure", [None, 0.0, 0.79])
def test_a_server_that_spins_is_stalled_after_three_minutes(pressure: float | None) -> None:
    states, _ = spinning(TEN_MINUTES, SILENT, pressure)

    assert states == [SERVING] * 12 + [UNKNOWN] * 24 + [STALLED] * (TEN_MINUTES - 36)


def test_a_server_that_is_starved_is_unknown() -> None:
    states, _ = spinning(TEN_MINUTES, SILENT, 0.8)

    assert states == [SERVING] * 12 + [UNKNOWN] * (TEN_MINUTES - 12)


@pytest.mark.parametrize("reason", [Reason.UNREACHABLE, Reason.UNAUTHORIZED])
def test_a_server_that_finishes_its_last_requests_or_refuses_us_does_not_spin(reason: Reason) -> None:
    states, _ = spinning(TEN_MINUTES, replace(SILENT, reason=reason), 0.0)

    assert states == [SERVING] * 12 + [UNKNOWN] * (TEN_MINUTES - 12)


def replay(snapshots: list[Snapshot]) -> list[EngineState]:
    """Return the states that a trace of these snapshots shows."""
    lines = [encode_line(HEADER), *(encode_line(build_record(snapshot)) for snapshot in snapshots)]
    state, states = EngineMemory(), list[EngineState]()
    for snapshot in parse_trace(lines):
        state, judged = update_engine(state, snapshot)
        assert judged.engine_status is not None
        states.append(judged.engine_status.state)
    return states


@pytest.mark.parametrize("names", [*((name,) for name in SIGNS), *PAIRS], ids="+".join)
def test_a_trace_shows_the_same_hang(names: tuple[str, ...]) -> None:
    engine = Idle()
    look_long(engine, names, TWO_MINUTES)

    assert replay(engine.snapshots)[-TWO_MINUTES:] == engine.states


@pytest.mark.parametrize("pressure", [None, 0.0, 0.99])
@pytest.mark.parametrize("reason", [Reason.TIMEOUT, Reason.UNREACHABLE])
def test_a_trace_shows_the_same_silence(reason: Reason, pressure: float | None) -> None:
    states, snapshots = spinning(TEN_MINUTES, replace(SILENT, reason=reason), pressure)

    assert replay(snapshots)[12:] == states


def test_a_trace_of_an_older_version_shows_no_sign() -> None:
    engine = Idle()
    look_long(engine, ("stopped", "unanswered"), TWO_MINUTES)
    older = []
    for snapshot in engine.snapshots:
        assert not isinstance(snapshot.processes, Failure)
        processes = (replace(process, state=None, wait_seconds=None) for process in snapshot.processes)
        older.append(replace(snapshot, processes=tuple(processes)))

    assert set(replay(older)) == {SERVING}


def test_without_a_view_of_processes_there_is_no_sign() -> None:
    watch = Watch(processes=UNSEEN)
    states = {
        watch.state_of(IDLE, probe=ProbeReadings(silent=(WRITES,), present=(probed(),))) for _ in range(TEN_MINUTES)
    }

    assert states == {SERVING}
