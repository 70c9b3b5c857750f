"""The four paths, over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from vllm_headroom.expose.server import Server, application, listen


@asynccontextmanager
async def served(problem: str | None = None, *, ready: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    registry = CollectorRegistry()
    Gauge("headroom_test", "A test.", registry=registry).set(7)
    app = application(registry=registry, page=lambda: "<p>hello</p>", unhealthy=lambda: problem, ready=lambda: ready)
    server, listener = Server(app), listen("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            yield client
    finally:
        server.should_exit = True
        await serving


def fetched(path: str, method: str = "GET", headers: dict[str, str] | None = None, **state: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with served(**state) as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(ask())


def test_metrics_are_text_unless_openmetrics_is_asked_for() -> None:
    plain = fetched("/metrics")
    openmetrics = fetched("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})

    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "headroom_test 7.0\n" in plain.text
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")


def test_metrics_are_compressed_only_when_asked_for() -> None:
    async def raw(encoding: str) -> tuple[str | None, bytes]:
        async with (
            served() as client,
            client.stream("GET", "/metrics", headers={"accept-encoding": encoding}) as response,
        ):
            return response.headers.get("content-encoding"), b"".join([part async for part in response.aiter_raw()])

    encoding, body = asyncio.run(raw("gzip"))
    assert encoding == "gzip"
    assert b"headroom_test 7.0" in gzip.decompress(body)

    encoding, body = asyncio.run(raw("identity"))
    assert encoding is None
    assert b"headroom_test 7.0" in body


def test_healthz_gives_the_reason_when_the_loop_is_ill() -> None:
    assert (fetched("/healthz").status_code, fetched("/healthz").text) == (200, "ok\n")

    ill = fetched("/healthz", problem="the sampling loop has not turned")

    assert (ill.status_code, ill.text) == (503, "the sampling loop has not turned\n")


def test_readyz_waits_for_the_first_sample() -> None:
    assert fetched("/readyz", ready=False).status_code == 503
    assert fetched("/readyz").status_code == 200


def test_the_page_for_people_is_html() -> None:
    page = fetched("/")

    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text == "<p>hello</p>"


def test_other_paths_say_which_there_are_and_other_methods_are_refused() -> None:
    missing = fetched("/metric")

    assert (missing.status_code, missing.text) == (404, "not found: there are /, /metrics, /healthz and /readyz\n")
    assert fetched("/metrics", method="POST").status_code == 405


def test_a_head_request_has_headers_and_no_body() -> None:
    head = fetched("/metrics", method="HEAD")

    assert (head.status_code, head.text) == (200, "")


def test_an_address_in_use_is_an_error_of_the_system() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", taken.getsockname()[1])


def reached(port: int, family: socket.AddressFamily, address: str) -> bool:
    with socket.socket(family) as client:
        client.settimeout(5)
        return client.connect_ex((address, port)) == 0


def test_no_host_means_every_interface_of_both_families() -> None:
    with listen("", 0) as listener:
        port = listener.getsockname()[1]

        assert reached(port, socket.AF_INET, "127.0.0.1")
        if listener.family is socket.AF_INET6:
            assert reached(port, socket.AF_INET6, "::1")


def test_a_crowd_of_silent_connections_is_served_past_and_then_closed() -> None:
    async def crowd() -> None:
        async with served() as client:
            silent = [await asyncio.open_connection("127.0.0.1", client.base_url.port) for _ in range(200)]
            assert (await client.get("/healthz")).status_code == 200

            async with asyncio.timeout(60):
                for reader, writer in silent:
                    assert await reader.read() == b""
                    writer.close()

    asyncio.run(crowd())
