"""The recipe's proxy between a client, a vLLM and a sidecar: what it lets through, and what it turns away."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import httpx
import pytest

from tests.assets.kubernetes.rendering import DEPLOY
from tests.process import NO_TLS, eventually

LOCAL: Final = "127.0.0.1"
PROXY: Final = DEPLOY / "recipes" / "safe-requests" / "proxy.py"


@dataclass
class Backend:
    """vLLM and the sidecar: a completion is answered once `may_answer` is set."""

    page: str = ""
    may_answer: threading.Event = field(default_factory=threading.Event)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    counted: list[dict[str, Any]] = field(default_factory=list)

    def limit(self, prompt: int | None, prompt_logprobs: int | None = None) -> None:
        limits = {"prompt": prompt, "prompt_logprobs": prompt_logprobs}
        self.page = "".join(
            f'headroom_engine_safe_{name}_tokens{{gpu="{gpu}",uuid="GPU-{gpu}"}} {tokens + gpu}.0\n'
            for name, tokens in limits.items()
            if tokens is not None
            for gpu in range(2)
        )


@contextmanager
def serve(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer((LOCAL, 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://{LOCAL}:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def answering(backend: Backend) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(backend.page.encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                backend.counted.append(body)
                text = body.get("prompt") or body["messages"][0]["content"]
                self.reply(json.dumps({"count": len(text.split())}).encode())
                return
            backend.bodies.append(body)
            assert backend.may_answer.wait(60)
            self.reply(b"{}")

        def reply(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@pytest.fixture
def backend() -> Backend:
    new_backend = Backend()
    new_backend.may_answer.set()
    return new_backend


@pytest.fixture
def proxy(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, before the backend; `url` is where it listens."""
    with serve(answering(backend)) as url:
        monkeypatch.setenv("VLLM_URL", url)
        monkeypatch.setenv("HEADROOM_URL", url)
        specification = importlib.util.spec_from_file_location("safe_requests_proxy", PROXY)
        assert specification is not None
        assert specification.loader is not None
        module: Any = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        with serve(module.Proxy) as module.url:
            yield module


def post(proxy: Any, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(proxy.url + path, json=body, timeout=60, verify=NO_TLS)


def read(proxy: Any, backend: Backend, prompt: int | None, prompt_logprobs: int | None = None) -> None:
    backend.limit(prompt, prompt_logprobs)
    proxy.readings.append(proxy.read_limits())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": [1] * 100}, 200),
        ({"prompt": [1] * 101}, 413),
        ({"prompt": [[1] * 60, [1] * 40]}, 200),
        ({"prompt": [[1] * 60, [1] * 41]}, 413),
        ({"prompt": [[1] * 20, [1] * 21], "prompt_logprobs": 1}, 413),
        ({"prompt": "w " * 100}, 200),
        ({"prompt": "w " * 101}, 413),
        ({"prompt": ["w", "w " * 101]}, 413),
        ({"prompt": [1] * 40, "prompt_logprobs": 0}, 200),
        ({"prompt": [1] * 41, "prompt_logprobs": 0}, 413),
        ({"prompt": [1] * 41, "echo": True, "logprobs": 0}, 413),
        ({"prompt": [1] * 41, "echo": True}, 200),
        ({"prompt": [1] * 41, "logprobs": 5}, 200),
        ({"prompt": [{"strange": 1}]}, 200),
        ({"prompt": 3}, 200),
        ({}, 200),
    ],
)
def test_a_prompt_above_the_limit_of_its_kind_is_turned_away(
    proxy: Any, backend: Backend, body: dict[str, Any], status: int
) -> None:
    read(proxy, backend, 100, 40)
    answer = post(proxy, **body)

    assert answer.status_code == status
    assert backend.bodies == ([body] if status == 200 else [])
    if status == 413:
        assert "at most" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("request_fields", "status"), [({}, 200), ({"echo": True, "top_logprobs": 1}, 413), ({"prompt_logprobs": 1}, 413)]
)
def test_a_chat_is_counted_by_vllm(proxy: Any, backend: Backend, request_fields: dict[str, Any], status: int) -> None:
    read(proxy, backend, 100, 40)
    messages = [{"role": "user", "content": "w " * 41}]

    assert post(proxy, "/v1/chat/completions", model="m", messages=messages, **request_fields).status_code == status
    assert backend.counted == [{"model": "m", "messages": messages}]


def test_without_a_limit_nothing_is_counted_or_turned_away(proxy: Any, backend: Backend) -> None:
    read(proxy, backend, None)

    assert post(proxy, prompt="w " * 10_000).status_code == 200
    assert post(proxy, "/v1/embeddings", input="w").status_code == 200
    assert httpx.get(f"{proxy.url}/health", verify=NO_TLS).status_code == 200
    assert backend.counted == []


def test_what_fitted_lately_may_come_again(proxy: Any, backend: Backend) -> None:
    read(proxy, backend, 500)
    read(proxy, backend, 100)
    answer = post(proxy, prompt=[1] * 300)

    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert post(proxy, prompt=[1] * 502).status_code == 413


def send_in_flight(proxy: Any, backend: Backend, tokens: int, **body: Any) -> threading.Thread:
    """Send a prompt that vLLM does not answer yet."""
    sender = threading.Thread(target=post, args=(proxy,), kwargs={"prompt": [1] * tokens, **body})
    count = len(backend.bodies)
    sender.start()
    eventually(lambda: len(backend.bodies) > count, "vLLM has the prompt")
    return sender


def test_a_prompt_is_admitted_beside_the_prompts_in_flight(proxy: Any, backend: Backend) -> None:
    read(proxy, backend, 100)
    backend.may_answer.clear()
    senders = [send_in_flight(proxy, backend, tokens) for tokens in (30, 40)]
    refused = [post(proxy, prompt=[1] * 31), post(proxy, prompt=[[1] * 16, [1] * 15])]
    senders.append(send_in_flight(proxy, backend, 30))
    backend.may_answer.set()
    for sender in senders:
        sender.join()

    assert [answer.status_code for answer in refused] == [503, 503]
    assert "31 prompt tokens do not fit beside 70 in flight" in refused[0].text
    assert post(proxy, prompt=[1] * 100).status_code == 200
    assert proxy.in_flight == []


def test_where_a_full_step_fits_only_prompt_logprobs_in_flight_are_added(
    proxy: Any, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "MAX_NUM_BATCHED_TOKENS", 100)
    read(proxy, backend, 100, 40)
    backend.may_answer.clear()
    senders = [send_in_flight(proxy, backend, 90) for _ in range(3)]
    senders.append(send_in_flight(proxy, backend, 30, prompt_logprobs=1))
    # The logprobs of one request are still held while those of the next are computed.
    refused = post(proxy, prompt=[1] * 11, prompt_logprobs=1)
    senders.append(send_in_flight(proxy, backend, 10, prompt_logprobs=1))
    backend.may_answer.set()
    for sender in senders:
        sender.join()

    assert refused.status_code == 503
    assert "11 tokens with prompt logprobs do not fit beside 30 in flight" in refused.text
    assert len(backend.bodies) == 5


def test_a_vllm_that_is_gone_is_a_bad_gateway(proxy: Any, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    read(proxy, backend, 100)
    monkeypatch.setattr(proxy, "VLLM_URL", f"http://{LOCAL}:1")

    assert post(proxy, prompt=[1]).status_code == 502
    assert proxy.in_flight == []
