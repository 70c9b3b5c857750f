"""When a pod leaves its Service, and that it always comes back."""

from __future__ import annotations

from typing import Any, Final

import pytest
from msgspec.structs import replace

from tests.samples import A_GPU, engine, failure, gpu, page, snapshot
from vllm_headroom import catalog
from vllm_headroom.derive.gates import CLOSE_AFTER_SECONDS, GROUPS, OPEN_AFTER_SECONDS, OVER, Ready, Rules, place, ready
from vllm_headroom.model import Life, Sample, Snapshot, Values
from vllm_headroom.units import GIB, MIB
from vllm_headroom.vocabulary import EngineState, Source

LEAST: Final = 600.0
MOST: Final = 900.0
STEP: Final = 5.0
EPOCH: Final = 1_760_000_000.0 // (GROUPS * MOST) * (GROUPS * MOST)
"""The beginning of the first group's turn."""

FIRST, SECOND = "vllm-0", "vllm-1"


def at(seconds: float, *, life: EngineState = EngineState.SERVING, **known: Any) -> Snapshot:
    seen = {"engines": page(engine(running=4.0, waiting=0.0, finished_total=seconds)), "gpus": (gpu(),), **known}
    made = replace(snapshot(at=seconds, **seen), time_seconds=EPOCH + seconds)
    return replace(made, life=Life(state=life))


def left(seconds: float) -> Values:
    return Values([Sample(catalog.TIME_TO_OOM_LOWER, A_GPU, seconds)])


NOTHING: Final = Values(())


class Gate:
    """A gate on its own clock."""

    def __init__(self, name: str = SECOND) -> None:
        self.now, self.state = 0.0, Ready()
        self.rules = Rules(ready_seconds=LEAST, ready_most_seconds=MOST, live_seconds=None, name=name)

    def goes_on(self, seconds: float, values: Values = NOTHING, **seen: Any) -> str | None:
        """Let time go by; return why the gate is closed then."""
        until = self.now + seconds
        while self.now < until:
            self.now += STEP
            self.state = ready(self.state, at(self.now, **seen), values, self.rules)
        return self.state.reason


def test_it_is_open_while_nothing_is_known() -> None:
    assert Gate().goes_on(600) is None
    assert Gate().goes_on(600, gpus=failure(Source.NVML), engines=failure(Source.ENGINE)) is None


def test_it_closes_when_the_end_may_be_near_and_says_so() -> None:
    assert Gate().goes_on(60, left(LEAST - 1)) == "GPU 0 may be out of memory in 9 min 59 s"
    assert Gate().goes_on(60, left(LEAST)) is None


def test_it_says_which_instance_of_a_gpu() -> None:
    soon = Values([Sample(catalog.TIME_TO_OOM_LOWER, ("0", "MIG-11111111-2222"), 400.0)])

    assert Gate().goes_on(60, soon) == "GPU 0 MIG-11111111 may be out of memory in 6 min 40 s"


def test_the_hosts_end_closes_it_as_well() -> None:
    host = Values([Sample(catalog.HOST_TIME_TO_OOM_LOWER, (), 400.0)])

    assert Gate().goes_on(60, host) == "the host may be out of memory in 6 min 40 s"


def test_one_sample_closes_nothing() -> None:
    gate = Gate()

    assert gate.goes_on(STEP, left(10.0)) is None
    assert gate.goes_on(STEP) is None
    assert gate.goes_on(STEP, left(10.0)) is None
    assert gate.goes_on(CLOSE_AFTER_SECONDS, left(10.0)) is not None


def test_it_opens_a_minute_after_the_danger_has_passed_and_not_at_its_edge() -> None:
    gate = Gate()
    assert gate.goes_on(60, left(LEAST - 1)) is not None

    assert gate.goes_on(120, left(LEAST + 1)) is not None
    assert gate.goes_on(OPEN_AFTER_SECONDS - STEP) is not None
    assert gate.goes_on(2 * STEP) is None


@pytest.mark.parametrize("seconds_left", [500.0, 1.0])
def test_it_never_stays_closed_longer_than_is_set_and_rests_as_long(seconds_left: float) -> None:
    gate = Gate()
    closed = [gate.goes_on(STEP, left(seconds_left)) is not None for _ in range(int(3 * MOST / STEP))]

    stretches = "".join("x" if each else "." for each in closed).split(".")
    longest = max(len(stretch) for stretch in stretches)
    opened = "".join("x" if each else "." for each in closed).strip(".").split("x")
    assert 0 < longest <= MOST / STEP + 1
    assert any(len(stretch) >= MOST / STEP - 1 for stretch in opened)


def test_a_replica_whose_turn_it_is_stays_open_for_the_others() -> None:
    assert Gate(FIRST).goes_on(60, left(500.0)) is None
    assert Gate(SECOND).goes_on(60, left(500.0)) is not None


def test_minutes_before_its_own_end_nobody_stays() -> None:
    assert Gate(FIRST).goes_on(60, left(200.0)) is not None


@pytest.mark.parametrize("replicas", [2, 3, 4, 5])
def test_of_neighbours_in_a_statefulset_one_is_always_open_and_one_may_close(replicas: int) -> None:
    all_rules = [Gate(f"vllm-{number}").rules for number in range(replicas)]

    for turn in range(6):
        assert {each.has_the_watch(EPOCH + turn * MOST) for each in all_rules} == {True, False}


def test_names_of_a_deployment_are_spread_evenly() -> None:
    counts = [0] * GROUPS
    for number in range(1000):
        counts[place(f"vllm-7d9f8c-{number:05x}z") % GROUPS] += 1

    assert min(counts) > 400


def test_it_closes_when_a_burst_would_not_fit_again() -> None:
    total, gate = 80 * GIB, Gate()

    def card(free: int, peak: int = 0) -> Any:
        return (gpu(total=total, used=total - free, used_peak_bytes=total - free + peak),)

    assert gate.goes_on(60, gpus=card(500 * MIB, 300 * MIB)) is None
    assert gate.goes_on(60, gpus=card(200 * MIB)) == (
        "GPU 0 has 200 MiB free, and a burst took 300 MiB within ten minutes"
    )
    assert gate.goes_on(700, gpus=card(200 * MIB)) is None


def test_what_was_cached_after_a_burst_is_no_burst_to_come() -> None:
    total, gate = 80 * GIB, Gate()
    peak = total - 400 * MIB
    gate.goes_on(STEP, gpus=(gpu(total=total, used=total - 700 * MIB, used_peak_bytes=total - 700 * MIB),))

    assert gate.goes_on(300, gpus=(gpu(total=total, used=peak, used_peak_bytes=peak),)) is None


def test_it_closes_while_what_waits_cannot_be_served() -> None:
    gate = Gate()

    def queue(waiting: float, per_second: float) -> Any:
        return page(engine(running=4.0, waiting=waiting, finished_total=per_second * gate.now))

    for _ in range(60):
        assert gate.goes_on(STEP, engines=queue(waiting=10.0, per_second=1.0)) is None
    for _ in range(30):
        gate.goes_on(STEP, engines=queue(waiting=4000.0, per_second=1.0))
    assert gate.state.reason == "4000 requests wait and 60.0 a minute are finished"


def test_it_closes_while_the_engine_is_stalled() -> None:
    assert Gate().goes_on(60, life=EngineState.STALLED) == "the engine should make progress and makes none"


def test_clocks_that_step_leave_it_usable() -> None:
    gate = Gate()
    gate.goes_on(60, left(10.0))
    gate.now -= 50.0

    assert gate.goes_on(3 * MOST) is None


def test_while_it_waits_to_open_it_does_not_say_what_is_over() -> None:
    gate = Gate()

    assert gate.goes_on(30, life=EngineState.STALLED) == "the engine should make progress and makes none"
    assert gate.goes_on(OPEN_AFTER_SECONDS - STEP) == OVER
    assert gate.goes_on(STEP, life=EngineState.STALLED) == "the engine should make progress and makes none"
    assert gate.goes_on(OPEN_AFTER_SECONDS + STEP) is None
