"""Steps of many clients, and what bounds them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import stdev

import pytest

from tests.fakes.streaming_server import StreamingServer, Way
from tests.unit.commands.load.asking import SOON_SECONDS, asker, run, tally, until
from vllm_headroom_tools.load.clients import PAUSE_SECONDS, Clients, Pace
from vllm_headroom_tools.load.stream import Outcome, Tally

LONG_SECONDS = 3600.0


def pace(most_requests: int | None = None, requests_per_second: float | None = None) -> Pace:
    return Pace(most_requests=most_requests, requests_per_second=requests_per_second)


def step(
    server: StreamingServer,
    clients: int,
    seconds: float,
    *,
    with_pace: Pace | None = None,
    grace_seconds: float = LONG_SECONDS,
    meanwhile: Callable[[Clients], object] | None = None,
) -> Tally:
    """Run one step; `meanwhile` is called with the clients when all of them wait for an answer."""
    counted = tally()

    async def steps() -> None:
        asking = asker(server)
        made = Clients(asker=asking, pace=with_pace or pace(), grace_seconds=grace_seconds)
        running = asyncio.create_task(made.run(clients, seconds, counted))
        if meanwhile is not None:
            await until(lambda: server.open == clients)
            meanwhile(made)
        await running
        await asking.close()

    run(steps)
    return counted


def test_so_many_streams_are_open_at_once() -> None:
    with StreamingServer(least_open=40) as server:
        counted = step(server, 40, LONG_SECONDS, with_pace=pace(most_requests=200))

        assert server.most_open == counted.most_streams == 40
        assert server.finished == counted.outcomes[Outcome.SUCCEEDED] == counted.began == 200


def test_clients_ask_again_until_the_time_is_over_and_what_is_open_then_may_end() -> None:
    with StreamingServer() as server:
        counted = step(server, 3, SOON_SECONDS)

        assert server.finished == counted.outcomes.total() == counted.outcomes[Outcome.SUCCEEDED]
    assert counted.began >= 3


def test_what_is_open_after_the_grace_is_given_up() -> None:
    with StreamingServer(lambda number: Way.STALL_IN_STREAM if number < 5 else Way.STREAM) as server:
        counted = step(server, 8, SOON_SECONDS, grace_seconds=SOON_SECONDS)

        assert counted.began == server.ways.total()
        assert counted.outcomes[Outcome.UNFINISHED] == server.ways[Way.STALL_IN_STREAM] == 5
        assert counted.outcomes[Outcome.SUCCEEDED] == server.ways[Way.STREAM]


def test_a_stop_gives_up_what_is_open_at_once_and_begins_nothing_more() -> None:
    with StreamingServer(lambda _: Way.STALL) as server:
        counted = step(server, 6, LONG_SECONDS, meanwhile=Clients.stop)

        assert counted.outcomes == {Outcome.UNFINISHED: 6}
        assert server.ways.total() == 6


def test_a_stop_ends_those_who_wait_for_their_turn_too() -> None:
    with StreamingServer() as server:
        counted = tally()

        async def steps() -> None:
            slow, asking = pace(requests_per_second=1e-9), asker(server)
            slow.begin(1.0)
            made = Clients(asker=asking, pace=slow, grace_seconds=LONG_SECONDS)
            running = asyncio.create_task(made.run(4, LONG_SECONDS, counted))
            await asyncio.sleep(SOON_SECONDS)
            made.stop()
            await running
            await made.run(4, LONG_SECONDS, counted)
            await asking.close()

        run(steps)

    assert counted.began == 0


def test_the_cap_is_of_all_steps_together() -> None:
    with StreamingServer() as server:
        shared = pace(most_requests=7)
        first = step(server, 2, LONG_SECONDS, with_pace=shared)
        second = step(server, 2, LONG_SECONDS, with_pace=shared)

        assert shared.is_used_up
        assert (first.began, second.began, server.ways.total()) == (7, 0, 7)


def test_an_open_loop_offers_its_rate_whatever_the_server_answers() -> None:
    async def drawn() -> list[float]:
        open_loop, times = pace(requests_per_second=1000.0), []
        open_loop.begin(0.5)
        until_seconds = time.monotonic() + 2.0
        while await open_loop.wait_turn(until_seconds):
            times.append(open_loop._next_seconds)
        return times

    times = asyncio.run(drawn())
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 500, rel=0.2)
    assert stdev(gaps) == pytest.approx(mean, rel=0.2)  # of an exponential distribution


def test_an_open_loop_does_not_pause_after_a_failure() -> None:
    fast = pace(most_requests=30, requests_per_second=500)
    fast.begin(1.0)
    with StreamingServer(lambda _: Way.BUSY) as server:
        counted = step(server, 2, LONG_SECONDS, with_pace=fast)

    assert counted.outcomes[Outcome.REJECTED] == 30


def test_a_turn_that_comes_after_the_end_is_not_taken() -> None:
    async def steps() -> None:
        slow = pace(most_requests=1, requests_per_second=1e-9)
        slow.begin(1.0)

        assert not await slow.wait_turn(time.monotonic() + LONG_SECONDS / 100)
        assert not slow.is_used_up

    run(steps)


def test_a_client_whose_request_did_not_succeed_waits_before_the_next() -> None:
    seconds = 2.5 * PAUSE_SECONDS
    with StreamingServer(lambda _: Way.BUSY) as server:
        counted = step(server, 2, seconds)

        assert server.ways.total() == counted.outcomes[Outcome.REJECTED]
    assert 2 <= counted.began <= 2 * 3
