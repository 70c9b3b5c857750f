from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.fakes import engine_server
from tests.fakes.engine_server import EngineServer, page, raw, with_head
from vllm_headroom.model import Failure
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


def test_each_fetch_has_its_own_connection() -> None:
    with EngineServer(page("a 1\n")) as server:
        assert fetch(server.url, times=3) == ["a 1\n"] * 3

    assert (server.connections, len(server.requests)) == (3, 3)


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
        assert fetch(server.url, times=2) == ["a 1\n"] * 2

    assert server.connections == 2


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

    first, problem, second = asyncio.run(run())

    assert (first, second) == ("a 1\n", "a 2\n")
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


def test_a_request_given_up_leaves_its_thread_free_for_the_next_one() -> None:
    """A server that sends a byte now and then would hold it for as long as it likes."""

    async def run(server: EngineServer) -> list[str | Failure]:
        reader = PageReader(url=server.url, timeout_seconds=30)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await reader.fetch()
        server.answer = page("a 1\n")
        while isinstance(answer := await reader.fetch(), Failure):
            assert answer.reason is Reason.TIMEOUT
            await asyncio.sleep(0.01)
        await reader.close()
        return [answer]

    def hint(connection: socket.socket, closing: threading.Event) -> None:
        while not closing.wait(0.001):
            connection.sendall(b"HTTP/1.1 103 Early Hints\r\n\r\n")

    with EngineServer(hint) as server:
        assert asyncio.run(asyncio.wait_for(run(server), 20)) == ["a 1\n"]
