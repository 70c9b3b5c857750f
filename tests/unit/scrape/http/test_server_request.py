"""What the server's other pages are taken for."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Final

import pytest

from tests.fakes.engine_server import EngineServer, hang, page
from tests.fakes.ports import free_port
from vllm_headroom.model import ServerReply
from vllm_headroom.scrape.http.reader import PageReader, ServerRequest
from vllm_headroom.vocabulary import ServerAnswer

OK, ERROR, DEAD, GATEWAY, LOGIN, MISSING = (
    "200 OK",
    "500 Internal Server Error",
    "503 Service Unavailable",
    "502 Bad Gateway",
    "401 Unauthorized",
    "404 Not Found",
)
SILENCE: Final = ""


def ask(url: str) -> ServerReply:
    async def asked() -> ServerReply:
        health, models, load = (
            PageReader(url=url.replace("/metrics", path), timeout_seconds=0.3)
            for path in ("/health", "/v1/models", "/load")
        )
        request = ServerRequest(health=health, models=models, load=load)
        reply = await request.send()
        await request.close()
        return reply

    return asyncio.run(asked())


def serve(health: str, models: str, load: str, load_text: str = '{"server_load": 0}') -> tuple[ServerReply, list[str]]:
    def answer(connection: socket.socket, closing: threading.Event) -> None:
        status = {"/health": health, "/v1/models": models, "/load": load}[server.path]
        if status == SILENCE:
            hang(connection, closing)
        text = load_text if server.path == "/load" else ""
        page(text, status=status)(connection, closing)

    with EngineServer(answer) as server:
        return ask(server.url), server.requests


@pytest.mark.parametrize(
    ("health", "models", "load", "answer"),
    [
        (OK, OK, OK, ServerAnswer.HEALTHY),
        (OK, LOGIN, MISSING, ServerAnswer.HEALTHY),
        (MISSING, OK, MISSING, ServerAnswer.HEALTHY),
        (SILENCE, OK, MISSING, ServerAnswer.HEALTHY),
        (DEAD, OK, OK, ServerAnswer.UNHEALTHY),
        (DEAD, DEAD, DEAD, ServerAnswer.UNHEALTHY),
        (ERROR, OK, OK, ServerAnswer.UNHEALTHY),
        (ERROR, ERROR, ERROR, ServerAnswer.UNCLEAR),
        (GATEWAY, GATEWAY, GATEWAY, ServerAnswer.SILENT),
        (SILENCE, SILENCE, SILENCE, ServerAnswer.SILENT),
        (MISSING, LOGIN, MISSING, ServerAnswer.UNCLEAR),
        (SILENCE, MISSING, MISSING, ServerAnswer.UNCLEAR),
    ],
)
def test_the_answers_are_one_word(health: str, models: str, load: str, answer: ServerAnswer) -> None:
    reply, requests = serve(health, models, load)

    assert reply.answer is answer
    assert [request.split()[:2] for request in requests] == [
        ["GET", "/health"],
        ["GET", "/v1/models"],
        ["GET", "/load"],
    ]


def test_a_closed_port_is_silence() -> None:
    assert ask(f"http://127.0.0.1:{free_port()}/metrics").answer is ServerAnswer.SILENT


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        ('{"server_load": 3}', 3.0),
        ('{"server_load": 0}', 0.0),
        ('{"server_load": -1}', None),
        ('{"server_load": 1e300}', None),
        ('{"server_load": "3"}', None),
        ('{"server_load": null}', None),
        ("{}", None),
        ("[3]", None),
        ("[" * 10_000, None),
        ("<html>", None),
    ],
)
def test_the_requests_in_the_server_are_a_count_or_unknown(text: str, requests: float | None) -> None:
    assert serve(OK, OK, OK, text)[0].requests == requests


def test_an_error_has_no_count() -> None:
    assert serve(OK, OK, ERROR, '{"server_load": 3}')[0].requests is None
