from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import uvloop

from tests.fakes import engine_server
from tests.fakes.engine_server import LOOPBACK, Answer, EngineServer, cut, drip, hang, page, raw, with_head
from tests.fakes.ports import free_port
from vllm_headroom.model import Failure
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.vocabulary import REASONS, Reason, Source

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
NO_SUCH_HOST = ".".join(["a" * 60] * 5)  # longer than a name may be: refused before a request is sent


@pytest.fixture(params=LOOPS)
def fail(request: pytest.FixtureRequest) -> Callable[..., Failure]:
    """Fetch once and expect a failure, on each of the loops."""

    def fetch(url: str, timeout_seconds: float = 30) -> Failure:
        async def run() -> str | Failure:
            reader = PageReader(url=url, timeout_seconds=timeout_seconds)
            try:
                return await reader.fetch()
            finally:
                await reader.close()

        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            answer = runner.run(run())
        assert isinstance(answer, Failure), answer
        assert answer.reason in REASONS[Source.ENGINE]
        return answer

    return fetch


Fail = Callable[..., Failure]


def test_a_port_where_nobody_listens_is_unreachable(fail: Fail) -> None:
    url = f"http://{LOOPBACK}:{free_port()}/metrics"

    assert fail(url) == Failure(
        source=Source.ENGINE,
        reason=Reason.UNREACHABLE,
        message=f"no connection to {url} (Connection refused): "
        "check that vLLM runs and that HEADROOM_ENGINE_URL names its host and port",
    )


def give_addresses(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int]) -> None:
    address_infos = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: address_infos)


def test_a_host_with_several_addresses_is_unreachable_when_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    give_addresses(monkeypatch, (LOOPBACK, free_port()), ("127.0.0.2", free_port()))
    reader = PageReader(url="http://vllm/metrics", timeout_seconds=30)

    problem = asyncio.run(reader.fetch())

    assert isinstance(problem, Failure)
    assert problem.reason is Reason.UNREACHABLE
    assert "(Connection refused)" in problem.message


def test_a_host_is_read_at_its_second_address_where_the_first_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with EngineServer(page("a 1\n")) as server:
        give_addresses(monkeypatch, (LOOPBACK, free_port()), (LOOPBACK, server.port))
        answer = asyncio.run(PageReader(url="http://vllm/metrics", timeout_seconds=30).fetch())

    assert answer == "a 1\n"


@contextmanager
def busy_port() -> Iterator[int]:
    """Yield a port of which the kernel answers nobody, since as many wait as it lets."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((LOOPBACK, 0), backlog=0))
        for _ in range(8):
            client = stack.enter_context(socket.socket())
            client.settimeout(0)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_a_host_is_read_at_its_second_address_where_the_first_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with busy_port() as port, EngineServer(page("a 1\n")) as server:
        give_addresses(monkeypatch, (LOOPBACK, port), (LOOPBACK, server.port))
        answer = asyncio.run(PageReader(url="http://vllm/metrics", timeout_seconds=12).fetch())

    assert answer == "a 1\n"


def test_a_server_that_resets_what_it_accepted_listens(fail: Fail) -> None:
    with EngineServer(engine_server.reset) as server:
        assert fail(server.url).reason is Reason.INCOMPLETE


@pytest.mark.parametrize("host", [NO_SUCH_HOST, "a..b", "a" * 64])
def test_a_host_without_an_address_is_distinguished_from_one_that_does_not_answer(fail: Fail, host: str) -> None:
    problem = fail(f"http://{host}:8000/metrics")

    assert problem.reason is Reason.NAME_RESOLUTION
    assert "correct the host in HEADROOM_ENGINE_URL" in problem.message


@pytest.mark.parametrize("answer", [hang, drip("a 1\n" * 10_000)], ids=["hung", "dripping"])
def test_a_page_that_is_not_complete_in_time_is_a_timeout(fail: Fail, answer: Answer) -> None:
    with EngineServer(answer) as server:
        assert fail(server.url, timeout_seconds=0.3) == Failure(
            source=Source.ENGINE,
            reason=Reason.TIMEOUT,
            message=f"{server.url} sent no complete page within 0.3 s: "
            "check whether vLLM hangs, or raise HEADROOM_ENGINE_TIMEOUT_SECONDS",
        )
        server.wait_until_idle()


def test_a_server_too_busy_to_accept_is_a_timeout(fail: Fail) -> None:
    with busy_port() as port:
        assert fail(f"http://{LOOPBACK}:{port}/metrics", timeout_seconds=0.3).reason is Reason.TIMEOUT


def test_a_resolver_that_hangs_is_a_timeout_and_keeps_one_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The token, which is read on that thread, is not blamed for it."""
    answers, asking_threads, token_file = threading.Event(), [], tmp_path / "token"
    token_file.write_text("t0ken")

    def hang(*_: object, **__: object) -> list[object]:
        asking_threads.append(threading.current_thread())
        answers.wait()
        return []

    async def run() -> tuple[str | Failure, ...]:
        reader = PageReader(url="http://vllm:8000/metrics", timeout_seconds=0.5, bearer_token_file=token_file)
        return await reader.fetch(), await reader.fetch()

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        result = asyncio.run(run())
    finally:
        answers.set()

    assert [isinstance(problem, Failure) and problem.reason for problem in result] == [Reason.TIMEOUT, Reason.TIMEOUT]
    assert len(asking_threads) == 1


@pytest.mark.parametrize(
    "answer",
    [
        cut(with_head(b"a 1\n", length=5)),
        cut(with_head(b"", length=5)),
        cut(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\na 1\r\n"),
        cut(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nhello"),
    ],
    ids=["short", "no body", "half chunked", "bad chunks"],
)
def test_a_page_that_breaks_off_is_incomplete(fail: Fail, answer: Answer) -> None:
    with EngineServer(answer) as server:
        problem = fail(server.url)

    assert problem.reason is Reason.INCOMPLETE
    assert "broke off its page" in problem.message


@pytest.mark.parametrize(
    "answer",
    [
        cut(b""),
        cut(b"HTTP/1.1 200 O"),
        raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
        cut(with_head(b"", "302 Found", headers=("Location: http://h:port/",))),
    ],
    ids=["nothing", "half a head", "no HTTP", "bad redirect"],
)
def test_an_answer_that_is_no_http_is_incomplete(fail: Fail, answer: Answer) -> None:
    with EngineServer(answer) as server:
        problem = fail(server.url)

    assert problem.reason is Reason.INCOMPLETE
    assert "hung up or broke HTTP before it answered" in problem.message


def test_a_connection_reset_in_the_middle_of_the_page_is_incomplete(fail: Fail) -> None:
    def answer(connection: socket.socket, closing: threading.Event) -> None:
        connection.sendall(with_head(b"a 1\n", length=100))
        closing.wait(0.2)
        engine_server.reset(connection, closing)

    with EngineServer(answer) as server:
        problem = fail(server.url)

    assert problem.reason is Reason.INCOMPLETE
    assert "broke off its page" in problem.message


@pytest.mark.parametrize(
    ("status", "reason", "advice"),
    [
        ("401 Unauthorized", Reason.UNAUTHORIZED, "set HEADROOM_ENGINE_BEARER_TOKEN_FILE"),
        ("403 Forbidden", Reason.UNAUTHORIZED, "set HEADROOM_ENGINE_BEARER_TOKEN_FILE"),
        ("404 Not Found", Reason.NOT_FOUND, "vLLM serves its metrics at /metrics"),
        ("500 Internal Server Error", Reason.HTTP_STATUS, "whether its PROMETHEUS_MULTIPROC_DIR is full, gone"),
        ("503 Service Unavailable", Reason.HTTP_STATUS, "look for the cause in the engine's log"),
        ("204 No Content", Reason.HTTP_STATUS, "look for the cause in the engine's log"),
        ("304 Not Modified", Reason.HTTP_STATUS, "look for the cause in the engine's log"),
    ],
)
def test_a_status_other_than_200_is_a_failure(fail: Fail, status: str, reason: Reason, advice: str) -> None:
    with EngineServer(page("vllm:x 1\n" if status[0] in "45" else "", status=status)) as server:
        problem = fail(server.url)

    assert problem.reason is reason
    assert problem.http_status == int(status[:3])
    assert problem.message.startswith(f"{server.url} answers {status}: ")
    assert advice in problem.message


@pytest.mark.parametrize("status", ["301 Moved Permanently", "302 Found", "307 Temporary Redirect"])
def test_a_redirect_is_named_and_not_followed(fail: Fail, status: str) -> None:
    with EngineServer(page("", status=status, headers=("Location: http://user:pa55@elsewhere/metrics/",))) as server:
        problem = fail(server.url)

    assert problem.reason is Reason.REDIRECT
    assert "a redirect to http://elsewhere/metrics/: set HEADROOM_ENGINE_URL" in problem.message
    assert "pa55" not in problem.message
    assert len(server.requests) == 1
