"""The engine's cookies have two protections: none is kept, and none would be sent; each holds without the other."""

from __future__ import annotations

import asyncio
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx
import pytest

from tests.fakes.engine_server import EngineServer, page
from vllm_headroom.scrape.http import reader as subject

SETS_ONE = page("vllm:x 1\n", headers=("Set-Cookie: id=c00kie",))


class Greedy(DefaultCookiePolicy):
    """Keeps all that it is given."""

    def __init__(self, **_: object) -> None:
        super().__init__()


async def asked_twice(url: str) -> CookieJar:
    """Return what the client keeps after two pages."""
    reader = subject.PageReader(url=url, timeout_seconds=30)
    try:
        assert [await reader.fetch(), await reader.fetch()] == ["vllm:x 1\n"] * 2
        assert reader._client is not None
        return reader._client.cookies.jar
    finally:
        await reader.close()


def test_none_is_kept() -> None:
    with EngineServer(SETS_ONE) as engine:
        assert list(asyncio.run(asked_twice(engine.url))) == []


def test_one_that_is_kept_all_the_same_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "DefaultCookiePolicy", Greedy)
    with EngineServer(SETS_ONE) as engine:
        jar = asyncio.run(asked_twice(engine.url))

        assert [cookie.value for cookie in jar] == ["c00kie"]
        assert not any("cookie" in head.lower() for head in engine.requests)


def test_httpx_by_itself_would_keep_and_send_it() -> None:
    with EngineServer(SETS_ONE) as engine, httpx.Client(trust_env=False) as client:
        assert [client.get(engine.url).text, client.get(engine.url).text] == ["vllm:x 1\n"] * 2

        assert "cookie: id=c00kie" in engine.requests[1].lower()
