"""The four paths, over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.logs import capture_logs
from tests.unit.expose.loop import run
from vllm_headroom import catalog
from vllm_headroom.expose import server
from vllm_headroom.expose.answers import Request, Response, build_application, respond_text
from vllm_headroom.expose.metrics import HeadroomCollector, MetricsPage
from vllm_headroom.expose.page import respond_html
from vllm_headroom.expose.server import Server, listen
from vllm_headroom.model import Published, Sample

RUNNING = b'headroom_engine_requests_running{engine="0",model_name="m"} 7.0\n'


@asynccontextmanager
async def served(problem: str | None = None, *, ready: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    sample = Sample(catalog.ENGINE_RUNNING, ("m", "0"), 7.0)
    published = Published(samples=(sample,), monotonic_seconds=100.0)
    handler = build_application(
        metrics=MetricsPage(HeadroomCollector(lambda: published, lambda: 107.5, ("1.2.3", "abc", "3.11.7"))),
        page=lambda _: respond_html("<p>hello</p>"),
        snapshot=lambda _: respond_text(200, "{}"),
        find_problem=lambda: problem,
        has_sample=lambda: ready,
    )
    listener = listen("127.0.0.1", 0)
    serving = asyncio.create_task(Server(handler).serve(listener))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            yield client
    finally:
        serving.cancel()


def fetched(path: str, method: str = "GET", headers: dict[str, str] | None = None, **state: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with served(**state) as client:
            return await client.request(method, path, headers=headers)

    return run(ask())


def test_metrics_are_text_unless_openmetrics_is_asked_for() -> None:
    plain = fetched("/metrics")
    openmetrics = fetched("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})

    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert RUNNING.decode() in plain.text
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")


def test_metrics_are_compressed_only_when_asked_for() -> None:
    async def raw(encoding: str) -> tuple[str | None, bytes]:
        async with (
            served() as client,
            client.stream("GET", "/metrics", headers={"accept-encoding": encoding}) as response,
        ):
            return response.headers.get("content-encoding"), b"".join([part async for part in response.aiter_raw()])

    encoding, body = run(raw("gzip"))
    assert encoding == "gzip"
    assert RUNNING in gzip.decompress(body)

    encoding, body = run(raw("identity"))
    assert encoding is None
    assert RUNNING in body


def test_a_clock_beyond_the_year_9999_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 253_402_300_800.0)

    assert fetched("/healthz").headers["date"] == "Fri, 31 Dec 9999 23:59:59 GMT"


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

    assert (missing.status_code, missing.text) == (
        404,
        "not found: there are /, /metrics, /snapshot.json, /healthz, /readyz and /gate/ready\n",
    )
    refused = fetched("/metrics", method="POST")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")


def test_a_head_request_has_headers_and_no_body() -> None:
    head = fetched("/metrics", method="HEAD")

    assert (head.status_code, head.text) == (200, "")


def test_an_address_in_use_is_an_error_of_the_system() -> None:
    with listen("127.0.0.1", 0) as occupied, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", occupied.getsockname()[1])


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

    run(crowd())


def test_a_crowd_that_does_not_read_its_answers_drops_no_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "find_connection_limit", lambda: 3)
    monkeypatch.setattr(server, "SLOW_CLIENT_SECONDS", 0.0)
    answered = asyncio.Event()

    def handler(_: Request) -> Response:
        answered.set()
        return Response(status=200, body=bytes(2**24), content_type="text/plain")

    async def crowd() -> bytes:
        listener = listen("127.0.0.1", 0)
        serving, address, clients = asyncio.create_task(Server(handler).serve(listener)), listener.getsockname(), []

        async def ask_and_not_read() -> None:
            answered.clear()
            clients.append(client := socket.create_connection(address))
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await answered.wait()

        for _ in range(3):
            await ask_and_not_read()
        reader, writer = await asyncio.open_connection(*address)
        await ask_and_not_read()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        line = await reader.readline()
        for client in clients:
            client.close()
        writer.close()
        serving.cancel()
        return line

    assert run(crowd()) == b"HTTP/1.1 200 OK\r\n"


def test_a_handler_that_fails_costs_its_answer_only() -> None:
    def handler(request: Request) -> Response:
        if request.path == "/broken":
            raise ZeroDivisionError
        return Response(
            status=200, body=b"ok", content_type="text/\N{SNOWMAN}" if request.path == "/odd" else "text/plain"
        )

    async def ask() -> list[int]:
        listener = listen("127.0.0.1", 0)
        serving = asyncio.create_task(Server(handler).serve(listener))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            statuses = [(await client.get(path)).status_code for path in ("/broken", "/odd", "/")]
        serving.cancel()
        return statuses

    assert run(ask()) == [500, 500, 200]


@pytest.mark.parametrize("path", ["/", "/metrics", "/snapshot.json", "/healthz", "/gate/ready", "/elsewhere"])
def test_what_is_said_is_taken_for_what_it_is_and_not_kept(path: str) -> None:
    headers = fetched(path).headers

    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"


def test_the_page_for_people_may_load_nothing_and_be_framed_by_nobody() -> None:
    headers = fetched("/").headers

    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET /\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"x" * 20_000]
)
def test_what_is_not_http_is_refused_and_the_connection_closed(sent: bytes) -> None:
    async def say() -> bytes:
        async with served() as client:
            reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
            writer.write(sent)
            reply = await reader.read()
            writer.close()
            return reply

    assert run(say()).startswith(b"HTTP/1.1 4")


class ClosedTransport(asyncio.Transport):
    """A transport as uvloop leaves it behind once its opening was cancelled: whatever is called raises."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cancelled = False
        self.is_aborted = False

    def check(self, *_: object, **__: object) -> None:
        if self.is_cancelled:
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    set_write_buffer_limits = pause_reading = resume_reading = write = check

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize("opened", ["before", "after"])
def test_a_connection_whose_opening_is_cancelled_is_forgotten(opened: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request was read in the same turn of the loop, as at the stop or for the oldest of too many handshakes."""
    protocols: list[asyncio.Protocol] = []
    transport = ClosedTransport()

    async def open_then_hang(build: Any, *_: object, **__: object) -> None:
        protocol = build()
        protocols.append(protocol)
        if opened == "before":
            protocol.connection_made(transport)
            protocol.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4)
        await asyncio.Event().wait()

    async def cancel_opening() -> Server:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(type(loop), "connect_accepted_socket", lambda _, *args, **kw: open_then_hang(*args, **kw))
        own = Server(lambda _: respond_text(200, "hello"))
        with socket.socket() as client:
            opening = asyncio.create_task(own._open(client))
            await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait([opening])
        transport.is_cancelled = True
        if opened == "after":
            protocols[0].connection_made(transport)
        answering = asyncio.create_task(own._answer_in_turn())
        for _ in range(5):
            await asyncio.sleep(0)
        protocols[0].data_received(b"GET / HTTP/1.1\r\n")
        answering.cancel()
        return own

    with capture_logs() as lines:
        own = asyncio.run(cancel_opening())

    assert not own.connections
    assert not lines
    assert transport.is_aborted == (opened == "after")


def test_a_connection_that_cannot_be_opened_costs_its_client_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise IndexError("range")

    async def open_connection() -> int:
        own = Server(lambda _: respond_text(200, "hello"))
        with socket.socket() as client, monkeypatch.context() as patch:
            patch.setattr(type(asyncio.get_running_loop()), "connect_accepted_socket", fail)
            await own._open(client)
            return client.fileno()

    with capture_logs() as lines:
        assert asyncio.run(open_connection()) == -1, "it is closed"
    assert [line["event"] for line in lines] == ["a connection could not be opened"]


def test_an_answer_that_cannot_be_sent_twice_costs_its_client_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer fails half-way, so that the status 500 cannot be sent either; the next client is answered."""
    answer = server.Connection.answer
    calls = []

    def fail(connection: server.Connection, response: Response) -> None:
        calls.append(response.status)
        if len(calls) <= 2:
            raise RuntimeError("half-way")
        answer(connection, response)

    monkeypatch.setattr(server.Connection, "answer", fail)

    async def ask() -> int:
        async with served() as client:
            with pytest.raises(httpx.HTTPError):
                await client.get("/healthz")
            return (await client.get("/healthz")).status_code

    assert run(ask()) == 200
    assert calls == [200, 500, 200]
