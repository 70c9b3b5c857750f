"""What the probe adds to what is known of a run: steps, silence, and the error it died of."""

from __future__ import annotations

import pytest

from tests.samples import probed
from tests.unit.derive.life.watch import BEGAN, NEXT, REFUSED, card, serving, working
from vllm_headroom.derive.configured import complete_page
from vllm_headroom.model import EnginePage, EngineStatus, OomRecord, ProbedProcess, ProbeReadings, SchedulerReading
from vllm_headroom.vocabulary import EngineState, ExitReason


def core(steps: int) -> ProbedProcess:
    return probed(scheduler=SchedulerReading(steps_total=steps))


def stepped(page: EnginePage, probe: ProbeReadings) -> EnginePage:
    completed_page = complete_page(page, probe, None)
    assert isinstance(completed_page, EnginePage)
    return completed_page


def test_an_engine_that_steps_moves_though_its_page_stands_still() -> None:
    watch = serving()
    for minute in range(1, 5):
        probe = ProbeReadings(present=(core(100 * minute),))
        life = watch.look(stepped(working(20), probe), probe=probe, after_seconds=50)
        assert life.state is EngineState.SERVING

    standing = ProbeReadings(present=(core(400),))
    assert watch.look(stepped(working(20), standing), probe=standing, after_seconds=60).state is EngineState.STALLED


def test_a_core_that_hangs_and_writes_nothing_is_stalled_after_twenty_seconds() -> None:
    watch = serving()
    probe = ProbeReadings(silent=(core(100),), present=(probed(),))
    watch.look(stepped(working(20), probe), probe=probe)

    assert watch.look(stepped(working(20), probe), probe=probe, after_seconds=19).state is EngineState.SERVING
    assert watch.look(stepped(working(20), probe), probe=probe, after_seconds=1).state is EngineState.STALLED


def test_silence_without_work_or_of_another_process_is_no_stall() -> None:
    idle, other_watch = serving(), serving()
    silent = ProbeReadings(silent=(core(100),))
    for _ in range(10):
        state = idle.look(working(20, running=0.0), probe=silent).state
        assert state is EngineState.SERVING, "no probe writes: the folder may be the cause"
    for _ in range(10):
        state = other_watch.look(working(20), probe=ProbeReadings(silent=(probed(),), present=(core(100),))).state
        assert state is EngineState.SERVING


def died(oom: OomRecord, *, written: float, replaced: bool = False) -> dict[ExitReason, int]:
    """Return the exits after a death at second 10 of the run, which left that record."""
    watch = serving()
    probe_readings = ProbeReadings(others=(probed(oom=oom, written_at_seconds=BEGAN + written),))
    life: EngineStatus = (
        watch.look(working(0, started=BEGAN + 9000), processes=NEXT, probe=probe_readings)
        if replaced
        else watch.look(REFUSED, processes=(), gpus=(card(0.5),), probe=probe_readings)
    )
    return {reason: count for reason, count in life.exits if count}


@pytest.mark.parametrize("replaced", [False, True])
def test_an_error_that_a_process_did_not_outlive_is_what_it_died_of(*, replaced: bool) -> None:
    record = OomRecord(at_seconds=BEGAN + 8)

    assert died(record, written=8, replaced=replaced) == {ExitReason.OUT_OF_MEMORY: 1}


def test_an_error_that_was_survived_is_not() -> None:
    assert died(OomRecord(at_seconds=BEGAN + 8), written=69) == {ExitReason.GONE: 1}


def test_an_error_of_the_run_before_is_not() -> None:
    assert died(OomRecord(at_seconds=BEGAN - 100), written=-100) == {ExitReason.GONE: 1}
