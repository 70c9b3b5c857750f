"""What recorded deaths, hangs and restarts of a real server are taken for."""

from __future__ import annotations

from typing import Final

import pytest

from tests.contract.recorded import CAPTURES
from tests.unit.derive.life.watch import CORE, REFUSED, SERVER, Watch
from vllm_headroom.derive.life.progress import STALLED_SECONDS
from vllm_headroom.derive.pages import count_running
from vllm_headroom.model import Failure
from vllm_headroom.vocabulary import EngineState, ExitReason

HUNG: Final = "vllm-0.32.0-engine-hung"
SLEPT: Final = "vllm-0.32.0-sleep"
DEAD: Final = "vllm-0.32.0-engine-dead"
SERIES: Final = sorted(name for name in CAPTURES if name.startswith("vllm-0.32.0-series/"))
STEPPED: Final = sorted({name.split("/")[0] for name in CAPTURES if name.endswith("/load-nowaiting")})


def state(watch: Watch, name: str, *, after_seconds: float = 5.0) -> EngineState:
    return watch.state_of(CAPTURES[name].read(), after_seconds=after_seconds)


def test_an_engine_that_was_stopped_is_stalled_after_a_minute_and_serves_when_it_goes_on() -> None:
    watch = Watch()

    assert state(watch, f"{HUNG}/before-engine-stop") is EngineState.SERVING
    assert state(watch, f"{HUNG}/engine-hung-3s") is EngineState.SERVING, "what moved until the stop is seen here"
    assert state(watch, f"{HUNG}/engine-hung-8s-5-more-sent", after_seconds=STALLED_SECONDS - 1) is EngineState.SERVING
    assert state(watch, f"{HUNG}/engine-hung-8s-5-more-sent", after_seconds=1) is EngineState.STALLED
    assert state(watch, f"{HUNG}/engine-resumed") is EngineState.SERVING


def test_what_is_frozen_in_a_sleeper_is_no_stall_at_its_wake() -> None:
    watch = Watch()

    assert state(watch, f"{SLEPT}/asleep-keep") is EngineState.ASLEEP
    assert state(watch, f"{SLEPT}/asleep-keep", after_seconds=3600) is EngineState.ASLEEP
    assert count_running(CAPTURES[f"{SLEPT}/asleep-keep"].read()) == 0
    assert state(watch, f"{SLEPT}/woken") is EngineState.SERVING
    assert count_running(CAPTURES[f"{SLEPT}/woken"].read()) == 3


def test_no_series_tells_a_pause_from_a_hang() -> None:
    watch = Watch()

    assert state(watch, f"{SLEPT}/paused") is EngineState.SERVING
    assert state(watch, f"{SLEPT}/paused", after_seconds=STALLED_SECONDS) is EngineState.STALLED


def test_the_last_page_of_a_dead_engine_is_stalled_by_its_processes_and_then_down() -> None:
    watch = Watch(processes=(SERVER, CORE))
    assert state(watch, f"{DEAD}/right-after-engine-kill") is EngineState.SERVING

    last_status = watch.look(CAPTURES[f"{DEAD}/right-after-engine-kill"].read(), processes=(SERVER,), after_seconds=0.1)
    assert (last_status.state, last_status.is_in_service) == (EngineState.STALLED, False)

    down = watch.look(REFUSED, processes=(), after_seconds=4)
    assert (down.state, dict(down.exits)[ExitReason.GONE]) == (EngineState.DOWN, 1)


def test_a_restart_on_the_same_port_is_a_second_run() -> None:
    watch = Watch(processes=Failure(source=REFUSED.source, reason=REFUSED.reason, message="not seen"))
    lives = []
    for name in SERIES:
        if name.endswith("t030"):
            watch.look(REFUSED, after_seconds=1)
        life = watch.look(CAPTURES[name].read(), after_seconds=1)
        lives.append((life.state, life.restarts))

    assert {state for state, _ in lives} == {EngineState.SERVING}
    assert [restarts for _, restarts in lives].index(1) == SERIES.index("vllm-0.32.0-series/t030")


@pytest.mark.parametrize("folder", STEPPED)
def test_every_version_counts_its_steps(folder: str) -> None:
    """Between two pages of one server more steps were taken, as more tokens came of them."""
    early, late = (CAPTURES[f"{folder}/{page}"].read().engines[0] for page in ("load-waiting", "load-nowaiting"))

    assert early.steps_total is not None
    assert late.steps_total is not None
    assert 0 < early.steps_total < late.steps_total
