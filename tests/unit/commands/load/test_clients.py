"""Steps of many clients, and what bounds them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import stdev
from typing import Any

import httpx
import pytest

from tests.fakes.streaming_server import MODEL, StreamingServer, Way
from tests.unit.commands.load.asking import SOON_SECONDS, asker, run, tally, until
from vllm_headroom_tools.load.clients import RETRY_PAUSE_SECONDS, Clients
from vllm_headroom_tools.load.prompts import PATHS, CompletionApi, build_request_body
from vllm_headroom_tools.load.stream import Outcome
from vllm_headroom_tools.load.tally import Tally

LONG_SECONDS = 3600.0
ASKED = (CompletionApi.COMPLETIONS, MODEL, "word " * 7, 3)


def make(
    server: StreamingServer | int,
    *,
    most_requests: int | None = None,
    requests_per_second: float | None = None,
    grace_seconds: float = LONG_SECONDS,
) -> Clients:
    return Clients(
        sender=asker(server),
        grace_seconds=grace_seconds,
        most_requests=most_requests,
        requests_per_second=requests_per_second,
    )


def step(
    server: StreamingServer,
    clients: int,
    seconds: float,
    *,
    steps: int = 1,
    meanwhile: Callable[[Clients], object] | None = None,
    **bounds: Any,
) -> tuple[Tally, ...]:
    """Run steps; `meanwhile` is called with the clients when all of them wait for an answer."""
    counted = tuple(tally() for _ in range(steps))

    async def main() -> None:
        client_pool = make(server, **bounds)
        for step_tally in counted:
            running = asyncio.create_task(client_pool.run(clients, seconds, step_tally, 1.0))
            if meanwhile is not None:
                await until(lambda: server.open == clients)
                meanwhile(client_pool)
            await running
        await client_pool._sender.close()
        assert client_pool.is_used_up == (bounds.get("most_requests") is not None)

    run(main)
    return counted


def test_so_many_streams_are_open_at_once() -> None:
    with StreamingServer(least_open=40) as server:
        (counted,) = step(server, 40, LONG_SECONDS, most_requests=200)

        assert server.most_open == counted.most_streams == 40
        assert server.finished == counted.outcomes[Outcome.SUCCEEDED] == counted.started_requests == 200


def test_clients_ask_again_until_the_time_is_over_and_what_is_open_then_may_end() -> None:
    with StreamingServer() as server:
        (counted,) = step(server, 3, SOON_SECONDS)

        assert server.finished == counted.outcomes.total() == counted.outcomes[Outcome.SUCCEEDED]
    assert counted.started_requests >= 3


def test_what_is_open_after_the_grace_is_given_up() -> None:
    with StreamingServer(lambda number: Way.STALL_IN_STREAM if number < 5 else Way.STREAM) as server:
        (counted,) = step(server, 8, SOON_SECONDS, grace_seconds=SOON_SECONDS)

        assert counted.started_requests == server.ways.total()
        assert counted.outcomes[Outcome.UNFINISHED] == server.ways[Way.STALL_IN_STREAM] == 5
        assert counted.outcomes[Outcome.SUCCEEDED] == server.ways[Way.STREAM]


def test_a_stop_gives_up_what_is_open_at_once_and_begins_nothing_more() -> None:
    with StreamingServer(lambda _: Way.STALL) as server:
        (counted,) = step(server, 6, LONG_SECONDS, meanwhile=Clients.stop)

        assert counted.outcomes == {Outcome.UNFINISHED: 6}
        assert server.ways.total() == 6


def test_a_stop_ends_those_who_wait_for_their_turn_too() -> None:
    with StreamingServer() as server:
        counted = tally()

        async def steps() -> None:
            client_pool = make(server, requests_per_second=1e-9)
            running = asyncio.create_task(client_pool.run(4, LONG_SECONDS, counted, 1.0))
            await asyncio.sleep(SOON_SECONDS)
            client_pool.stop()
            await running
            await client_pool.run(4, LONG_SECONDS, counted, 1.0)
            await client_pool._sender.close()

        run(steps)

    assert counted.started_requests == 0


def test_the_cap_is_of_all_steps_together() -> None:
    with StreamingServer() as server:
        first_tally, second = step(server, 2, LONG_SECONDS, steps=2, most_requests=7)

        assert (first_tally.started_requests, second.started_requests, server.ways.total()) == (7, 0, 7)


def test_an_open_loop_offers_its_rate_whatever_the_server_answers() -> None:
    async def drawn() -> list[float]:
        open_loop, times = make(0, requests_per_second=1000.0), []
        await open_loop.run(0, 0.0, tally(), 0.5)
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
    with StreamingServer(lambda _: Way.BUSY) as server:
        (counted,) = step(server, 2, LONG_SECONDS, most_requests=30, requests_per_second=500)

    assert counted.outcomes[Outcome.REJECTED] == 30


def test_a_turn_that_comes_after_the_end_is_not_taken() -> None:
    async def steps() -> None:
        slow = make(0, most_requests=1, requests_per_second=1e-9)
        await slow.run(0, 0.0, tally(), 1.0)

        assert not await slow.wait_turn(time.monotonic() + LONG_SECONDS / 100)
        assert not slow.is_used_up

    run(steps)


def test_a_client_whose_request_did_not_succeed_waits_before_the_next() -> None:
    seconds = 2.5 * RETRY_PAUSE_SECONDS
    with StreamingServer(lambda _: Way.BUSY) as server:
        (counted,) = step(server, 2, seconds)

        assert server.ways.total() == counted.outcomes[Outcome.REJECTED]
    assert 2 <= counted.started_requests <= 2 * 3


def test_the_rate_that_is_achieved_is_that_of_an_independent_client() -> None:
    """The server's pauses bound both, so that neither depends on the speed of the machine."""
    requests, at_once = 24, 4
    with StreamingServer(interval_seconds=0.1) as server:
        (counted,) = step(server, at_once, LONG_SECONDS, most_requests=requests)
        url, body = f"{server.url}{PATHS[CompletionApi.COMPLETIONS]}", build_request_body(*ASKED)

        async def ask_by_httpx() -> float:
            began = time.monotonic()
            async with httpx.AsyncClient(trust_env=False, timeout=LONG_SECONDS) as client:

                async def one() -> None:
                    for _ in range(requests // at_once):
                        (await client.post(url, content=body)).raise_for_status()

                await asyncio.gather(*(one() for _ in range(at_once)))
            return requests / (time.monotonic() - began)

        independent = run(ask_by_httpx)

    assert counted.outcomes[Outcome.SUCCEEDED] == requests
    assert counted.outcomes[Outcome.SUCCEEDED] / counted.served_seconds == pytest.approx(independent, rel=0.5)
