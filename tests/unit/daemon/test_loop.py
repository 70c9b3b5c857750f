"""The loops and their end, on a clock that moves only on request."""

from __future__ import annotations

import asyncio
from itertools import chain, repeat

import pytest

from tests.logs import capture_logs
from tests.samples import gpu
from vllm_headroom.daemon.loop import GraceTime, Heartbeat, request_end, run_every
from vllm_headroom.model import Failure
from vllm_headroom.vocabulary import Reason, Source


class ManualClock:
    """Sleeping moves it to the wanted time at once."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def time(self) -> float:
        return 1_760_000_000.0 + self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep_until(self, monotonic_seconds: float) -> None:
        self.slept.append(monotonic_seconds)
        self.now = max(self.now, monotonic_seconds)


class EnoughError(BaseException):
    pass


def turned(durations: list[float], interval: float = 5.0) -> ManualClock:
    """Let a loop turn once per duration; return the clock."""
    clock, remaining_seconds = ManualClock(), list(durations)

    async def step() -> None:
        if not remaining_seconds:
            raise EnoughError
        clock.now += remaining_seconds.pop(0)

    with pytest.raises(EnoughError):
        asyncio.run(run_every(interval, step, clock))
    return clock


def test_a_loop_turns_at_once_and_then_on_its_grid() -> None:
    assert turned([0.0, 1.0, 4.9]).slept == [105.0, 110.0, 115.0]


def test_a_slow_turn_leaves_out_the_points_it_missed() -> None:
    assert turned([12.0, 0.5]).slept == [115.0, 120.0]


def test_a_turn_that_ends_on_the_grid_waits_for_the_next_point() -> None:
    assert turned([5.0]).slept == [110.0]


@pytest.mark.parametrize("error", [IndexError("range"), MemoryError(), ExceptionGroup("several", [MemoryError()])])
def test_a_step_that_raises_is_skipped_and_logged_once(error: Exception) -> None:
    outcomes = chain([None, error, error, None], repeat(EnoughError()))
    clock = ManualClock()

    async def step() -> None:
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome

    with capture_logs() as lines, pytest.raises(EnoughError):
        asyncio.run(run_every(5.0, step, clock))

    assert clock.slept == [105.0, 110.0, 115.0, 120.0]
    assert [line["log_level"] for line in lines] == ["error", "info"]


def test_a_loop_is_ill_after_three_intervals_and_says_for_how_long() -> None:
    clock = ManualClock()
    heartbeat = Heartbeat(5.0, clock, clock.monotonic)

    clock.now += 15.0
    assert heartbeat.find_stall() is None

    clock.now += 0.5
    assert heartbeat.find_stall() == "the sampling loop has not run for 16 s (interval 5 s)"

    heartbeat.beat()
    assert heartbeat.find_stall() is None


def test_a_short_interval_is_not_ill_for_a_hiccup_of_the_machine() -> None:
    clock = ManualClock()
    heartbeat = Heartbeat(0.1, clock, clock.monotonic)

    clock.now += 2.9
    assert heartbeat.find_stall() is None

    clock.now += 0.2
    assert heartbeat.find_stall() is not None


def broken(reason: Reason) -> Failure:
    return Failure(source=Source.NVML, reason=reason, message="it failed")


@pytest.mark.parametrize("reason", [Reason.VERSION_MISMATCH, Reason.UNKNOWN])
def test_what_only_a_new_container_mends_ends_the_daemon_after_the_grace(reason: Reason) -> None:
    grace = GraceTime(60.0)

    assert not grace.update(broken(reason), 0.0)
    assert not grace.update(broken(reason), 59.9)
    assert grace.update(broken(reason), 60.0)


@pytest.mark.parametrize("between", [broken(Reason.DRIVER_MISSING), (gpu(),)])
def test_anything_else_in_between_starts_the_grace_again(between: Failure | tuple[()]) -> None:
    grace = GraceTime(60.0)
    grace.update(broken(Reason.UNKNOWN), 0.0)
    grace.update(between, 30.0)

    assert not grace.update(broken(Reason.UNKNOWN), 60.0)
    assert grace.update(broken(Reason.UNKNOWN), 120.0)


def test_a_missing_driver_never_ends_the_daemon() -> None:
    grace = GraceTime(0.0)

    assert not grace.update(broken(Reason.LIBRARY_MISSING), 0.0)
    assert not grace.update(broken(Reason.LIBRARY_MISSING), 1e9)


def test_the_first_reason_to_stop_is_the_one_that_counts() -> None:
    async def ask_twice() -> int:
        ending: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        request_end(ending, 3)
        request_end(ending, 0)
        return await ending

    assert asyncio.run(ask_twice()) == 3
