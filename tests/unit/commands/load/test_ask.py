"""One request in each way a server can answer, over real connections."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections import Counter
from pathlib import Path

import pytest

from tests.fakes.certificates import server_context, write_self_signed
from tests.fakes.streaming_server import ENGINE_DEAD, LOOPBACK, OUT_OF_MEMORY, StreamingServer, Way
from tests.unit.commands.load.asking import SOON_SECONDS, asker, run, tally, until
from vllm_headroom_tools.history import Histogram
from vllm_headroom_tools.load.prompts import CompletionApi
from vllm_headroom_tools.load.stream import LONGEST_TEXT, Outcome
from vllm_headroom_tools.load.tally import Tally

IS: dict[Way, tuple[Outcome, str]] = {
    Way.STREAM: (Outcome.SUCCEEDED, ""),
    Way.WITHOUT_USAGE: (Outcome.SUCCEEDED, ""),
    Way.CLOSE_AFTER: (Outcome.SUCCEEDED, ""),
    Way.OUT_OF_MEMORY: (Outcome.OUT_OF_MEMORY, f"500: {OUT_OF_MEMORY}"),
    Way.OUT_OF_MEMORY_IN_STREAM: (Outcome.OUT_OF_MEMORY, OUT_OF_MEMORY),
    Way.ENGINE_DEAD: (Outcome.FAILED, f"500: {ENGINE_DEAD}"),
    Way.ABORTED: (Outcome.FAILED, "the engine ended it with finish_reason abort"),
    Way.BAD_REQUEST: (Outcome.FAILED, "400: max_tokens is too large"),
    Way.BUSY: (Outcome.REJECTED, "429: too many requests"),
    Way.UNAVAILABLE: (Outcome.REJECTED, "503: the queue is full"),
    Way.STALL: (Outcome.TIMED_OUT, ""),
    Way.STALL_IN_STREAM: (Outcome.TIMED_OUT, ""),
    Way.CLOSE: (Outcome.CLOSED, ""),
    Way.CUT: (Outcome.CLOSED, ""),
    Way.RESET: (Outcome.CLOSED, ""),
    Way.NO_DONE: (Outcome.FAILED, "no [DONE] at the end"),
    Way.NO_STREAM: (Outcome.FAILED, "it answered 200 with no stream of events"),
    Way.NO_JSON: (Outcome.FAILED, "an event of its stream is no JSON"),
    Way.NO_HTTP: (Outcome.FAILED, "it broke HTTP: illegal status line: bytearray(b'+PONG')"),
}
SILENT = {Way.STALL, Way.STALL_IN_STREAM}


def times(histogram: Histogram) -> int:
    return histogram.counts.total()


def ask_server(server: StreamingServer | int, count: int = 1, **asker_options: object) -> Tally:
    """Ask so many times, one after another."""
    counted = tally()

    async def steps() -> None:
        request_sender = asker(server, **asker_options)  # type: ignore[arg-type]
        for _ in range(count):
            await request_sender.send(counted)
        await request_sender.close()

    run(steps)
    return counted


@pytest.mark.parametrize(
    ("way", "api"),
    [
        (Way.STREAM, CompletionApi.CHAT),
        (Way.OUT_OF_MEMORY_IN_STREAM, CompletionApi.CHAT),
        *((way, CompletionApi.COMPLETIONS) for way in Way if way not in SILENT),
    ],
)
def test_each_way_has_its_outcome(way: Way, api: CompletionApi) -> None:
    outcome, text = IS[way]
    with StreamingServer(lambda _: way) as server:
        counted = ask_server(server, api=api)

        assert server.ways == {way: 1}
    assert counted.outcomes == {outcome: 1}
    assert [reported_text for _, reported_text in counted.texts] == ([text[:LONGEST_TEXT]] if text else [])
    assert counted.is_engine_dead == (way is Way.ENGINE_DEAD)
    assert (counted.started_requests, counted.open_requests, counted.open_streams, counted.most_streams) == (1, 0, 0, 1)


@pytest.mark.parametrize("way", sorted(SILENT))
def test_a_server_that_falls_silent_is_timed_out(way: Way) -> None:
    with StreamingServer(lambda _: way) as server:
        counted = ask_server(server, timeout_seconds=SOON_SECONDS)

    assert counted.outcomes == {IS[way][0]: 1}
    assert (counted.open_requests, counted.open_streams) == (0, 0)


def test_the_clients_counts_are_the_servers() -> None:
    ways = [way for way in Way if way not in SILENT]
    with StreamingServer(lambda number: ways[number % len(ways)]) as server:
        counted = ask_server(server, 2 * len(ways))

        assert counted.outcomes == sum((Counter({IS[way][0]: count}) for way, count in server.ways.items()), Counter())
        assert counted.uncounted_answers == server.ways[Way.WITHOUT_USAGE] == 2
        assert counted.generation_tokens == server.generation_tokens - 2 * 3
        assert counted.prompt_tokens == server.prompt_tokens - 2 * 7
        assert times(counted.first_token_seconds) == times(counted.end_to_end_seconds) == server.finished == 6


def test_every_gap_between_tokens_is_counted() -> None:
    with StreamingServer(interval_seconds=0.01) as server:
        counted = ask_server(server, tokens=5)

    assert times(counted.inter_token_seconds) == 4
    assert times(counted.per_token_seconds) == 1
    first_token_seconds, end_to_end_seconds = (
        counted.first_token_seconds.quantile(1),
        counted.end_to_end_seconds.quantile(1),
    )
    assert first_token_seconds is not None
    assert end_to_end_seconds is not None
    assert 0 < first_token_seconds < end_to_end_seconds


def test_one_connection_carries_one_request_after_another() -> None:
    ways = [Way.STREAM, Way.BUSY, Way.OUT_OF_MEMORY, Way.ABORTED, Way.STREAM]
    with StreamingServer(lambda number: ways[number]) as server:
        ask_server(server, len(ways))

        assert server.connections == 1


@pytest.mark.parametrize("way", [Way.CLOSE_AFTER, Way.CUT, Way.RESET, Way.NO_HTTP, Way.NO_JSON])
def test_a_connection_that_is_over_is_followed_by_another(way: Way) -> None:
    with StreamingServer(lambda number: Way.STREAM if number else way) as server:
        counted = ask_server(server, 2)

        assert server.connections == 2
    assert counted.outcomes[Outcome.SUCCEEDED] == 1 + (way is Way.CLOSE_AFTER)


def test_a_server_that_is_not_there_refuses() -> None:
    with StreamingServer() as server:
        port = server.port
    counted = ask_server(port)

    assert counted.outcomes == {Outcome.REFUSED: 1}
    assert counted.texts == {(Outcome.REFUSED, "Connection refused"): 1}
    assert counted.most_streams == 0


def test_a_server_that_takes_no_connection_times_out() -> None:
    with socket.create_server((LOOPBACK, 0), backlog=0) as silent:
        full = [socket.create_connection(silent.getsockname()) for _ in range(1)]
        counted = ask_server(silent.getsockname()[1], timeout_seconds=SOON_SECONDS)
        for connection in full:
            connection.close()

    assert counted.outcomes == {Outcome.TIMED_OUT: 1}


def test_a_limit_of_this_machine_is_not_the_servers() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    counted = tally()

    async def steps() -> None:
        request_sender = asker(server)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            await request_sender.send(counted)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    with StreamingServer() as server:
        run(steps)

    assert counted.outcomes == {Outcome.NOT_SENT: 1}
    assert counted.texts == {(Outcome.NOT_SENT, "Too many open files"): 1}


def test_a_request_that_is_given_up_is_unfinished_and_the_server_is_reported() -> None:
    counted = tally()

    async def steps() -> None:
        asking = asyncio.create_task(asker(server).send(counted))
        await until(lambda: server.open == 1)
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: server.open == 0)

    with StreamingServer(lambda _: Way.STALL_IN_STREAM) as server:
        run(steps)

    assert counted.outcomes == {Outcome.UNFINISHED: 1}
    assert (counted.open_requests, counted.open_streams) == (0, 0)


def test_it_works_over_tls(tmp_path: Path) -> None:
    certificate, key = write_self_signed(tmp_path)
    with StreamingServer(tls=server_context(certificate, key)) as server:
        trusting = ask_server(server, 3, tls=ssl.create_default_context(cafile=certificate))
        doubting = ask_server(server, 1, tls=ssl.create_default_context())

        assert server.connections >= 1
    assert trusting.outcomes == {Outcome.SUCCEEDED: 3}
    assert doubting.outcomes == {Outcome.REFUSED: 1}
