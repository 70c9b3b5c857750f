from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.fakes import engine_server
from tests.fakes.engine_server import Answer, EngineServer, drip, page, raw, with_head
from vllm_headroom.model import Failure
from vllm_headroom.scrape.http import transport
from vllm_headroom.scrape.http.reader import PageReader, is_here
from vllm_headroom.vocabulary import Reason, Source


def fetch(url: str, times: int = 1, *, timeout_seconds: float = 30, **settings: Any) -> list[str | Failure]:
    """Fetch the page `times` times with one reader, on uvloop as the daemon does."""

    async def run() -> list[str | Failure]:
        reader = PageReader(url=url, timeout_seconds=timeout_seconds, **settings)
        pages = [await reader.fetch() for _ in range(times)]
        await reader.close()
        return pages

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def failure(url: str, **settings: Any) -> Failure:
    (problem,) = fetch(url, **settings)
    assert isinstance(problem, Failure)
    assert problem.source is Source.ENGINE
    return problem


def test_a_page_is_its_text() -> None:
    with EngineServer(page("vllm:x 1\n")) as server:
        assert fetch(server.url) == ["vllm:x 1\n"]


def test_the_request_says_what_it_wants() -> None:
    with EngineServer(page("")) as server:
        fetch(server.url, headers={"X-Tenant": "a", "Accept-Encoding": "br"})

    head = server.requests[0].lower()
    assert head.startswith("get /metrics http/1.1\r\n")
    assert "accept: text/plain\r\n" in head
    assert "x-tenant: a\r\n" in head
    assert head.count("accept-encoding:") == 1
    assert "accept-encoding: identity\r\n" in head


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    with EngineServer(raw(with_head(b'a{b="\xff"} 1\n'))) as server:
        assert fetch(server.url) == ['a{b="�"} 1\n']


def test_a_chunked_page_is_put_together() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\na 1\r\n1\r\n\n\r\n0\r\n\r\n"
    with EngineServer(raw(chunked)) as server:
        assert fetch(server.url) == ["a 1\n"]


def test_fetches_that_follow_each_other_share_a_connection() -> None:
    """The first one cannot know that others follow."""
    with EngineServer(page("a 1\n")) as server:
        assert fetch(server.url, times=4) == ["a 1\n"] * 4

    assert (server.connections, len(server.requests)) == (2, 4)


def test_fetches_at_the_usual_interval_do_not_share_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM closes a connection that is idle for so long."""
    monkeypatch.setattr(transport, "_MOST_IDLE_SECONDS", 0.0)
    with EngineServer(page("a 1\n")) as server:
        assert fetch(server.url, times=3) == ["a 1\n"] * 3

    assert server.connections == 3


def close_after(answers: int, close: Answer) -> Answer:
    """Return what answers so many requests, and closes the connection of each further one that comes on it."""
    connections: Counter[socket.socket] = Counter()

    def answer(connection: socket.socket, closing: threading.Event) -> None:
        connections[connection] += 1
        if connections[connection] > answers:
            close(connection, closing)
            raise engine_server.Hangup
        page("a 1\n")(connection, closing)

    return answer


@pytest.mark.parametrize("close", [engine_server.cut(b""), engine_server.reset], ids=["closed", "reset"])
def test_a_request_is_sent_again_where_the_server_closes_the_shared_connection(close: Answer) -> None:
    with EngineServer(close_after(1, close)) as server:
        assert fetch(server.url, times=3) == ["a 1\n"] * 3

    assert server.connections == 3


def test_half_an_answer_on_a_shared_connection_is_incomplete() -> None:
    with EngineServer(close_after(1, engine_server.cut(b"HTTP/1.1 200 OK\r\nConte"))) as server:
        *pages, problem = fetch(server.url, times=3)

    assert pages == ["a 1\n"] * 2
    assert isinstance(problem, Failure)
    assert problem.reason is Reason.INCOMPLETE
    assert server.connections == 2


def test_a_server_that_closes_after_each_answer_is_asked_on_new_connections() -> None:
    with EngineServer(raw(with_head(b"a 1\n", headers=("Connection: close",)))) as server:
        assert fetch(server.url, times=3) == ["a 1\n"] * 3

    assert server.connections == 3


def test_a_named_host_is_resolved_again_after_a_close() -> None:
    async def run(url: str) -> list[str | Failure]:
        reader = PageReader(url=url, timeout_seconds=30)
        pages = [await reader.fetch()]
        await reader.close()
        pages.append(await reader.fetch())
        await reader.close()
        return pages

    with EngineServer(page("a 1\n")) as server:
        assert asyncio.run(run(server.url.replace("127.0.0.1", "localhost"))) == ["a 1\n"] * 2

    assert f"host: localhost:{server.port}" in server.requests[0].lower()


def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next_one() -> None:
    with EngineServer(raw(with_head(b"a 1\n") + with_head(b"b 2\n"))) as server:
        assert fetch(server.url, times=3) == ["a 1\n"] * 3

    assert server.connections == 3


def test_a_connection_is_dropped_where_bytes_come_that_no_request_asked_for() -> None:
    is_read, is_dropped = threading.Event(), threading.Event()

    def answer(connection: socket.socket, _closing: threading.Event) -> None:
        connection.sendall(with_head(b"a 1\n"))
        if server.connections == 2:
            is_read.wait(30)
            connection.sendall(with_head(b"b 2\n"))
            with contextlib.suppress(OSError):
                connection.recv(1)
            is_dropped.set()

    async def run() -> list[str | Failure]:
        reader = PageReader(url=server.url, timeout_seconds=30)
        pages = [await reader.fetch(), await reader.fetch()]
        is_read.set()
        assert await asyncio.to_thread(is_dropped.wait, 30)
        pages.append(await reader.fetch())
        await reader.close()
        return pages

    with EngineServer(answer) as server:
        assert asyncio.run(run()) == ["a 1\n"] * 3
        assert server.connections == 3


class LateLoop(asyncio.SelectorEventLoop):
    """A loop on which a server's first bytes arrive before the connection is handed over."""

    async def create_connection(self, *arguments: Any, **options: Any) -> Any:
        connection, protocol = await super().create_connection(*arguments, **options)
        while not connection.is_closing():  # noqa: ASYNC110 - a transport has no event for it
            await asyncio.sleep(0.001)
        return connection, protocol


def test_a_server_that_speaks_before_it_is_asked_is_incomplete() -> None:
    """As SSH does; the bytes come while the connection is still being opened."""
    problems: list[dict[str, Any]] = []

    def greet(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9\r\n")
            connection.recv(1)

    async def run(port: int) -> str | Failure:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: problems.append(context))
        reader = PageReader(url=f"http://127.0.0.1:{port}/metrics", timeout_seconds=30)
        page_or_failure = await reader.fetch()
        await reader.close()
        return page_or_failure

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        ThreadPoolExecutor() as threads,
        asyncio.Runner(loop_factory=LateLoop) as runner,
    ):
        threads.submit(greet, listener)
        reply = runner.run(run(listener.getsockname()[1]))

    assert isinstance(reply, Failure)
    assert reply.reason is Reason.INCOMPLETE
    assert problems == []


def test_the_reader_outlives_the_engine() -> None:
    async def run() -> list[str | Failure]:
        server = EngineServer(page("a 1\n"))
        reader = PageReader(url=server.url, timeout_seconds=30)
        pages = [await reader.fetch()]
        server.close()
        pages.append(await reader.fetch())
        with EngineServer(page("a 2\n"), port=server.port):
            pages.append(await reader.fetch())
            await reader.close()
        return pages

    first_page, problem, second = asyncio.run(run())

    assert (first_page, second) == ("a 1\n", "a 2\n")
    assert isinstance(problem, Failure)
    assert problem.reason is Reason.UNREACHABLE


def test_a_reader_that_was_closed_can_fetch_again() -> None:
    async def run(url: str) -> list[str | Failure]:
        reader = PageReader(url=url, timeout_seconds=30)
        await reader.close()
        pages = []
        for _ in range(2):
            pages.append(await reader.fetch())
            await reader.close()
        return pages

    with EngineServer(page("a 1\n")) as server:
        assert asyncio.run(run(server.url)) == ["a 1\n"] * 2

    assert server.connections == 2


def test_the_environments_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with EngineServer(page("a 1\n")) as server:
        assert fetch(server.url) == ["a 1\n"]


def test_cancelling_a_fetch_cancels_it() -> None:
    async def run(url: str) -> None:
        reader = PageReader(url=url, timeout_seconds=30)
        task = asyncio.create_task(reader.fetch())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await reader.close()

    with EngineServer(engine_server.hang) as server:
        asyncio.run(run(server.url))


def test_a_token_is_no_part_of_a_failure(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("s3cret")
    with EngineServer(page("", status="500 s3cret k3y")) as server:
        url = server.url.replace("://", "://user:pa55@")
        problem = failure(url, bearer_token_file=token_file, headers={"X-Key": "k3y"})

    assert problem.reason is Reason.HTTP_STATUS
    assert f"{server.url} answers 500 Internal Server Error" in problem.message
    assert not any(secret in repr(problem) for secret in ("s3cret", "pa55", "user", "k3y"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "0.0.0.0"])
def test_an_address_of_this_machine_is_here(host: str) -> None:
    assert is_here(host)


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "vllm", "", "1.2.3"])
def test_an_address_of_another_machine_and_a_name_are_not(host: str) -> None:
    assert not is_here(host)


def test_a_request_given_up_is_no_part_of_the_next_one() -> None:
    """A server that sends a byte now and then would hold it for as long as it likes."""

    async def run(server: EngineServer) -> str | Failure:
        reader = PageReader(url=server.url, timeout_seconds=30)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await reader.fetch()
        server.answer = page("a 1\n")
        answer = await reader.fetch()
        await reader.close()
        return answer

    with EngineServer(drip("a 1\n" * 10_000)) as server:
        assert asyncio.run(run(server)) == "a 1\n"
