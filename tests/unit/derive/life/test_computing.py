"""A server that gives no page and computes is not said to hang; one that is stopped is."""

from __future__ import annotations

from typing import Final

import pytest
from msgspec.structs import replace

from tests.unit.derive.life.watch import CORE, REFUSED, SERVER, SILENT, WHOLE, WORKER, Watch, serving, working
from vllm_headroom.derive.life.progress import STALLED_SECONDS
from vllm_headroom.model import EngineProcess, Failure
from vllm_headroom.vocabulary import EngineState

STEPS: Final = int(3 * STALLED_SECONDS / 5)


def computing(*, server: float, core: float = 0.0, worker: float = 0.0) -> tuple[EngineProcess, ...]:
    """Return the engine's processes with the CPU time that they have taken."""
    pairs = ((SERVER, server), (CORE, core), (WORKER, worker))
    return tuple(replace(process, cpu_seconds=seconds) for process, seconds in pairs)


def served() -> Watch:
    """Return a watch over an engine whose server has taken a thousand seconds of CPU time."""
    watch = serving(processes=computing(server=0.0))
    watch.look(working(30), processes=computing(server=1000.0))
    return watch


@pytest.mark.parametrize("page_failure", [SILENT, REFUSED])
def test_a_server_that_gets_one_second_of_cpu_time_a_minute_is_not_said_to_hang(page_failure: Failure) -> None:
    watch = served()

    states = [
        watch.state_of(page_failure, processes=computing(server=1000 + step * 5 / STALLED_SECONDS * 1.2))
        for step in range(STEPS)
    ]

    assert EngineState.STALLED not in states
    assert states[0] is EngineState.SERVING
    assert states[-1] is EngineState.UNKNOWN, "nor to serve"


@pytest.mark.parametrize("page_failure", [SILENT, REFUSED])
def test_a_stopped_server_is_stalled_after_a_minute_however_busy_it_was(page_failure: Failure) -> None:
    watch = served()

    states = [watch.state_of(page_failure) for _ in range(13)]

    assert states == [EngineState.SERVING] * 12 + [EngineState.STALLED]


def test_a_core_and_workers_that_spin_say_nothing_of_their_server() -> None:
    watch = served()

    for second in range(int(STALLED_SECONDS) + 1):
        spinning = computing(server=1000.0, core=second, worker=second)
        state = watch.state_of(SILENT, processes=spinning, after_seconds=1)

    assert state is EngineState.STALLED


def test_cpu_time_does_not_speak_for_a_page_that_answers_and_shows_no_progress() -> None:
    watch = served()

    for second in range(int(STALLED_SECONDS) + 1):
        state = watch.state_of(working(30), processes=computing(server=1000.0 + second), after_seconds=1)

    assert state is EngineState.STALLED


@pytest.mark.parametrize(("a_step", "state"), [(0.0, EngineState.STALLED), (0.1, EngineState.UNKNOWN)])
def test_of_two_servers_one_that_ends_does_not_speak_for_the_other(a_step: float, state: EngineState) -> None:
    other_server = replace(SERVER, pid=14, cpu_seconds=500.0)
    watch = served()
    watch.look(working(31), processes=(*computing(server=1000.0), other_server))

    states = [watch.state_of(SILENT, processes=computing(server=1000.0 + a_step * step)) for step in range(STEPS)]

    assert states[-1] is state


def test_cpu_time_that_is_not_reported_leaves_the_silence() -> None:
    watch = serving()
    assert all(process.cpu_seconds is None for process in WHOLE)

    assert watch.state_of(SILENT) is EngineState.SERVING
    assert watch.state_of(SILENT, after_seconds=STALLED_SECONDS) is EngineState.STALLED
