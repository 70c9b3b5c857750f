"""What a canary makes of the answers it gets, over real sockets, as the settings say how to reach them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.fakes.engine_server import Answer, EngineServer, cut, hang, page, with_head
from tests.process import eventually
from tests.settings import load
from vllm_headroom.daemon import parts
from vllm_headroom.scrape.http.reader import CanaryRequest, PageReader

HEALTH, SLEEP, TOKEN = PATHS = ("/health", "/is_sleeping", "/v1/completions")
COMPLETION: Final = page('{"choices":[{"text":"2"}],"usage":{"completion_tokens":1}}')
WELL: Final[Mapping[str, Answer]] = {
    HEALTH: page(""),
    SLEEP: page('{"detail":"Not Found"}', status="404 Not Found"),
    TOKEN: COMPLETION,
}
WAKING: Final = page('{"is_sleeping":false}')


class Server(EngineServer):
    """Answers each path as instructed."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = {**WELL, **{f"/{path}": answer for path, answer in answers.items()}}
        super().__init__(self._by_path)

    def _by_path(self, connection: socket.socket, closing: threading.Event) -> None:
        self.answers[self.path](connection, closing)

    @property
    def paths(self) -> list[str]:
        return [head.split()[1] for head in self.requests]


def ask_canary(server: EngineServer, impatient: str = "") -> bool | None:
    """Ask with much time for each path but the impatient one."""
    base = server.url.removesuffix("/metrics")
    readers = [PageReader(url=base + path, timeout_seconds=0.3 if path == impatient else 30) for path in PATHS]
    return asyncio.run(closing(CanaryRequest(health=readers[0], sleep=readers[1], completion=readers[2])))


async def closing(canary: CanaryRequest) -> bool | None:
    try:
        return await canary.ask("m")
    finally:
        await canary.close()


@pytest.mark.parametrize("sleep", [WELL[SLEEP], WAKING, page("", status="405 Method Not Allowed")])
def test_an_engine_that_completes_a_token_has_answered(sleep: Answer) -> None:
    with Server(is_sleeping=sleep) as server:
        assert ask_canary(server) is True

    assert server.paths == [HEALTH, SLEEP, TOKEN]


def test_a_server_without_a_health_check_is_asked_for_its_token() -> None:
    with Server(health=page("", status="404 Not Found")) as server:
        assert ask_canary(server) is True


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_that_says_nothing_has_not_answered(path: str) -> None:
    with Server() as server:
        server.answers[path] = hang

        def has_come() -> bool:
            """Ask; a request that was given up may never have been sent, or not be read yet."""
            assert ask_canary(server, impatient=path) is False
            return path in server.paths

        eventually(has_come, "the server is asked")

    assert set(server.paths) == set(PATHS[: PATHS.index(path) + 1])


@pytest.mark.parametrize(
    "completion",
    [page("{}", status="500 Internal Server Error"), page("{}", status="503 Service Unavailable")],
)
def test_an_engine_that_died_behind_its_page_has_not_answered(completion: Answer) -> None:
    with Server(health=page("", status="503 Service Unavailable")) as server:
        server.answers[TOKEN] = completion
        assert ask_canary(server) is False


def test_a_completion_that_breaks_off_is_no_answer() -> None:
    with Server() as server:
        server.answers[TOKEN] = cut(with_head(b"{", length=99))
        assert ask_canary(server) is False


def test_a_sleeping_engine_is_not_asked_for_a_token() -> None:
    with Server(is_sleeping=page('{"is_sleeping": true}')) as server:
        assert ask_canary(server) is None

    assert server.paths == [HEALTH, SLEEP]


@pytest.mark.parametrize("status", ["401 Unauthorized", "400 Bad Request", "404 Not Found", "429 Too Many Requests"])
def test_a_request_that_is_refused_says_nothing_of_the_engine(status: str) -> None:
    with Server() as server:
        server.answers[TOKEN] = page("{}", status=status)
        assert ask_canary(server) is None


def test_a_server_that_is_not_there_says_nothing_of_a_hang() -> None:
    with Server() as server:
        pass

    assert ask_canary(server) is None


def test_all_it_asks_carries_what_the_settings_say(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret")
    with Server() as server:
        settings = load(
            [],
            {
                "HEADROOM_ENGINE_URL": server.url,
                "HEADROOM_ENGINE_BEARER_TOKEN_FILE": str(token),
                "HEADROOM_ENGINE_HEADERS": '{"X-Tenant": "a"}',
            },
        )
        assert asyncio.run(closing(parts.build_canary_request(settings))) is True

    assert server.paths == [HEALTH, SLEEP, TOKEN]
    for head in server.requests:
        assert "authorization: bearer s3cret\r\n" in head.lower()
        assert "x-tenant: a\r\n" in head.lower()
