from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from vllm_headroom.clock import Clock, SystemClock
from vllm_headroom_tools.demo.run import ScaledClock

FAST = 3_600.0
STEP = 1e-3
"""The real and the monotonic time are two clocks, each slewed by itself: s."""


def test_the_scaled_clock_starts_at_the_real_time() -> None:
    started_seconds = time.time()
    simulated = ScaledClock(1.0).time()

    assert started_seconds - STEP <= simulated <= time.time() + STEP


def test_the_scaled_clock_runs_speed_times_as_fast() -> None:
    started_seconds = time.monotonic()
    clock = ScaledClock(FAST)
    created_seconds = time.monotonic()
    began = clock.monotonic()
    time.sleep(0.02)
    shortest_seconds = (time.monotonic() - created_seconds) * FAST
    passed = clock.monotonic() - began
    longest_seconds = (time.monotonic() - started_seconds) * FAST

    assert 0.02 * FAST <= passed <= longest_seconds
    assert shortest_seconds <= longest_seconds


def test_both_times_of_the_scaled_clock_advance_together() -> None:
    clock = ScaledClock(FAST)

    def least_and_most_difference() -> tuple[float, float]:
        monotonic_before, simulated, monotonic_after = clock.monotonic(), clock.time(), clock.monotonic()
        return simulated - monotonic_after, simulated - monotonic_before

    first_difference = least_and_most_difference()
    time.sleep(0.01)
    second = least_and_most_difference()

    assert max(first_difference[0], second[0]) <= min(first_difference[1], second[1]) + 1e-3


@pytest.mark.parametrize("clock", [SystemClock(), ScaledClock(FAST)], ids=["system", "scaled"])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_sleeping_never_ends_early(clock: Clock, new_loop: type[asyncio.AbstractEventLoop]) -> None:
    async def overslept() -> list[float]:
        late = []
        for part in range(40):
            until = clock.monotonic() + 0.0007 * part
            await clock.sleep_until(until)
            late.append(clock.monotonic() - until)
        return late

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert min(runner.run(overslept())) >= 0.0


def test_an_hour_of_simulated_sleep_takes_far_less_of_real_time() -> None:
    clock = ScaledClock(FAST * 100)
    began = time.monotonic()
    asyncio.run(clock.sleep_until(clock.monotonic() + FAST))

    assert 0.009 <= time.monotonic() - began < 60.0


def test_a_time_that_has_passed_lets_others_run_and_returns() -> None:
    async def order() -> list[str]:
        run_order: list[str] = []
        clock = SystemClock()
        asyncio.get_running_loop().call_soon(run_order.append, "another")
        await clock.sleep_until(clock.monotonic() - 5.0)
        return [*run_order, "awake"]

    assert asyncio.run(order()) == ["another", "awake"]
