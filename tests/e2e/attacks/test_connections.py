"""Clients that connect and do nothing, or half of it, cost the others nothing."""

from __future__ import annotations

import contextlib
import resource
import socket
from pathlib import Path

import httpx
import pytest

from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import LOOPBACK, EngineServer, page
from tests.process import NO_TLS, Daemon, Page, daemon, eventually, peak_bytes

RECORDED = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()
MIB = 2**20


def connected(running: Daemon, sends: bytes) -> socket.socket:
    client = socket.create_connection((LOOPBACK, int(running.url.rpartition(":")[2])), timeout=30)
    client.sendall(sends)
    return client


def healthy(running: Daemon) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return running.get("/healthz").status_code == 200
    return False


@pytest.mark.parametrize("descriptors", [300, 64])
@pytest.mark.parametrize("sends", [b"GET /met", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["half", "idle"])
def test_clients_that_only_stay_do_not_use_up_the_descriptors(sends: bytes, descriptors: int) -> None:
    """One that has asked may stay for 90 s: longer than is waited for here."""
    settings = {"SAMPLE_INTERVAL_SECONDS": "1", "ENGINE_TIMEOUT_SECONDS": "1"}
    with EngineServer(page(RECORDED, headers=("Connection: close",))) as engine, contextlib.ExitStack() as stack:
        running = stack.enter_context(daemon(ENGINE_URL=engine.url, **settings))
        resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))
        for _ in range(descriptors + 100):
            stack.enter_context(contextlib.closing(connected(running, sends)))

        eventually(lambda: healthy(running), "/healthz answers")
        old_count = len(engine.requests)
        eventually(lambda: len(engine.requests) >= old_count + 2, "the engine is read over new connections")


def test_a_daemon_that_can_open_nothing_says_nothing_of_the_engine() -> None:
    with (
        EngineServer(page(RECORDED, headers=("Connection: close",))) as engine,
        daemon(ENGINE_URL=engine.url, SAMPLE_INTERVAL_SECONDS="0.2") as running,
        httpx.Client(base_url=running.url, verify=NO_TLS) as scraper,
    ):
        running.sees(lambda page: page.value("engine_state", state="serving") == 1, "the engine answers")
        scraper.get("/metrics")
        old_count = len(running.log())  # on a busy machine its first answer may have been too late
        resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (0, 0))

        def blind() -> bool:
            blind_page = Page(scraper.get("/metrics").text)
            assert blind_page.value("engine_state", state="down") == 0
            failures = "source_failures_total"
            return all(
                blind_page.value(failures, source=source, reason="unavailable") > 3 for source in ("engine", "process")
            )

        eventually(blind, "it could not ask, time and again")
        assert f"{engine.url} cannot be asked (Too many open files): raise that limit" in running.log()
        assert "engine is down" not in running.log()[old_count:]


def test_half_a_request_is_not_waited_for() -> None:
    with daemon() as running, connected(running, b"GET /metrics HTTP/1.1\r\nHost: x\r\n") as client:
        assert client.recv(1) == b""


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    request = b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    with daemon() as running, connected(running, request) as client:
        received = b""
        while chunk := client.recv(4096):
            received += chunk

    assert received.startswith(b"HTTP/1.1 405 ")


def deaf(running: Daemon) -> socket.socket:
    """Ask for page after page in one go, with room for less than one of them."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect((LOOPBACK, int(running.url.rpartition(":")[2])))
    client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
    return client


def test_clients_that_ask_and_never_read_hold_up_nobody_and_are_let_go() -> None:
    with EngineServer(page(RECORDED)) as engine, contextlib.ExitStack() as stack:
        running = stack.enter_context(daemon(ENGINE_URL=engine.url, SAMPLE_INTERVAL_SECONDS="1"))
        descriptors = Path(f"/proc/{running.process.pid}/fd")
        for _ in range(300):
            stack.enter_context(contextlib.closing(deaf(running)))

        eventually(lambda: healthy(running), "/healthz answers")
        old_count = len(engine.requests)
        eventually(lambda: len(engine.requests) >= old_count + 3, "samples go on")
        eventually(lambda: len(list(descriptors.iterdir())) < 50, "those who take nothing are let go")

        assert peak_bytes(running.process.pid) < 128 * MIB


def test_a_format_of_no_version_is_answered_with_the_usual_one() -> None:
    with daemon() as running:
        for version in ("abc", "1..0", "1.0.0-beta", "1.0.0.\xe9", "", "=;="):
            for kind in ("text/plain", "application/openmetrics-text"):
                for path in ("/metrics", "/metrics?name[]=headroom_build_info"):
                    accept = (b"Accept", f"{kind};version={version}".encode("latin-1"))
                    answer = httpx.get(running.url + path, headers=[accept], timeout=10, verify=NO_TLS)
                    assert (answer.status_code, "headroom_build_info" in answer.text) == (200, True)

        assert "Traceback" not in running.log()
