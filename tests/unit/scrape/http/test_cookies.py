"""The engine's cookies are not sent back: nobody logs in here, and a cookie would be one more secret to guard."""

from __future__ import annotations

import asyncio

import httpx

from tests.fakes.engine_server import EngineServer, page
from vllm_headroom.scrape.http.reader import PageReader

SETS_ONE = page("vllm:x 1\n", headers=("Set-Cookie: id=c00kie",))


async def asked_twice(url: str) -> None:
    reader = PageReader(url=url, timeout_seconds=30)
    try:
        assert [await reader.fetch(), await reader.fetch()] == ["vllm:x 1\n"] * 2
    finally:
        await reader.close()


def test_none_is_sent() -> None:
    with EngineServer(SETS_ONE) as engine:
        asyncio.run(asked_twice(engine.url))

        assert len(engine.requests) == 2
        assert not any("cookie" in head.lower() for head in engine.requests)


def test_httpx_by_itself_would_keep_and_send_it() -> None:
    with EngineServer(SETS_ONE) as engine, httpx.Client(trust_env=False) as client:
        assert [client.get(engine.url).text, client.get(engine.url).text] == ["vllm:x 1\n"] * 2

        assert "cookie: id=c00kie" in engine.requests[1].lower()
