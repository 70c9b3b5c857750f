"""Crowds of clients over real sockets: who is answered when."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.expose.loop import run
from vllm_headroom.expose.answers import Request, Response, respond_text
from vllm_headroom.expose.server import Connection, Server, listen


def test_between_two_answers_the_loop_turns() -> None:
    turns, answered_at = 0, []

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def handler(_request: Request) -> Response:
        answered_at.append(turns)
        return respond_text(200, "ok")

    async def crowd() -> None:
        listener = listen("127.0.0.1", 0)
        serving = asyncio.create_task(Server(handler).serve(listener))
        clients = [await asyncio.open_connection(*listener.getsockname()) for _ in range(50)]
        for _, writer in clients:
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4)
        counting = asyncio.create_task(count())
        for reader, writer in clients:
            for _ in range(4):
                await reader.readuntil(b"\nok\n")
            writer.close()
        counting.cancel()
        serving.cancel()

    run(crowd())

    assert len(answered_at) == 200
    assert len(set(answered_at)) == 200, "what a tick has to do waits for one answer at most"


def order(*paths: str) -> list[str]:
    """Return the order in which requests are answered that are all here before the first answer."""
    answered: list[str] = []

    def handler(request: Request) -> Response:
        answered.append(request.path)
        return respond_text(200, "ok")

    async def ask() -> None:
        server, listener = Server(handler), listen("127.0.0.1", 0)
        for path in paths:
            server.admit(Connection(server), Request(method="GET", path=path, headers={}))
        serving = asyncio.create_task(server.serve(listener))
        async with asyncio.timeout(60):
            while len(answered) < len(paths):  # noqa: ASYNC110 - the loop has to turn between answers
                await asyncio.sleep(0)
        serving.cancel()

    run(ask())
    return answered


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/gate/ready"])
def test_what_a_kubelet_asks_does_not_wait_for_a_crowd_of_scrapers(path: str) -> None:
    answered = order(*["/snapshot.json"] * 200, path)

    assert answered.index(path) < 2


def test_a_crowd_of_short_questions_keeps_no_scraper_waiting() -> None:
    answered = order(*["/healthz"] * 200, "/metrics", "/metrics")

    assert [place for place, path in enumerate(answered) if path == "/metrics"] == [1, 3]
    assert len(answered) == 202
