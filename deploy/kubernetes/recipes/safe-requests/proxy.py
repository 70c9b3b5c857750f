# ruff: noqa: INP001, S310 - a program of one file, and its URLs are the operator's
"""A proxy before one vLLM that turns away what would not fit, by the sidecar's series.

Python's standard library only. Environment: VLLM_URL, HEADROOM_URL, LISTEN_PORT. A request that
does not fit gets 413; one that fits alone, but not beside the prompts in flight, gets 503 with
Retry-After. Where a series is absent, the proxy turns nothing away.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VLLM_URL = os.environ.get("VLLM_URL", "http://127.0.0.1:8000").rstrip("/")
HEADROOM_URL = os.environ.get("HEADROOM_URL", "http://127.0.0.1:9839").rstrip("/")
LISTEN_PORT = int(os.environ.get("LISTEN_PORT", "8080"))

READ_SECONDS = 1.0
"""How often the sidecar's page is read: it has new values once in its sampling interval."""

SERIES = re.compile(
    r"^headroom_engine_(safe_prompt_tokens|safe_prompt_logprobs_tokens)\{[^}]*\} (\S+)$",
    re.MULTILINE,
)
MAX_BODY_BYTES = 64 << 20
HOP_HEADERS = {"connection", "transfer-encoding", "content-length", "host", "keep-alive"}

limits: dict[str, int] = {}
"""The least of each series over the engine's GPUs; replaced as a whole."""

in_flight_tokens = 0
in_flight_lock = threading.Lock()


def read_limits() -> dict[str, int]:
    """Return the present limits; raises OSError where the sidecar does not answer."""
    with urllib.request.urlopen(f"{HEADROOM_URL}/metrics", timeout=READ_SECONDS) as page:
        found: dict[str, int] = {}
        for name, value in SERIES.findall(page.read().decode()):
            found[name] = min(int(float(value)), found.get(name, 1 << 62))
        return found


def watch_limits() -> None:
    """Read the limits for ever; without an answer there are none."""
    global limits  # noqa: PLW0603 - one value of the process
    while True:
        try:
            limits = read_limits()
        except OSError:
            limits = {}
        time.sleep(READ_SECONDS)


def count_tokens(body: dict[str, Any], least_limit: int) -> int:
    """Return the tokens of the largest prompt; ask vLLM only where the text may be too long."""
    prompt = body.get("prompt")
    prompts = (
        prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        else [prompt]
    )
    tokens = [len(one) for one in prompts if isinstance(one, list)]
    texts: list[dict[str, Any]] = [{"prompt": one} for one in prompts if isinstance(one, str)]
    if "messages" in body:
        texts.append({"messages": body["messages"]})
    for text in texts:
        # A token has at least one byte.
        most_tokens = len(json.dumps(text))
        if most_tokens <= least_limit:
            tokens.append(most_tokens // 4)
            continue
        content = json.dumps({"model": body.get("model"), **text}).encode()
        request = urllib.request.Request(
            f"{VLLM_URL}/tokenize", content, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            tokens.append(int(json.load(answer)["count"]))
    return max(tokens, default=0)


def refuse(body: dict[str, Any], tokens: int, other_tokens: int) -> tuple[int, str] | None:
    """Return status and reason where the request does not fit; None where it does."""
    prompt_limit = limits.get("safe_prompt_tokens")
    logprobs_limit = limits.get("safe_prompt_logprobs_tokens")
    if (
        body.get("prompt_logprobs") is not None
        and logprobs_limit is not None
        and tokens > logprobs_limit
    ):
        return (
            413,
            f"{tokens} tokens with prompt logprobs do not fit: at most {logprobs_limit} do now",
        )
    if prompt_limit is not None and tokens > prompt_limit:
        return 413, f"{tokens} prompt tokens do not fit: at most {prompt_limit} do now"
    if prompt_limit is not None and tokens + other_tokens > prompt_limit:
        return 503, f"{tokens} prompt tokens do not fit beside {other_tokens} in flight"
    return None


class Proxy(BaseHTTPRequestHandler):
    """Passes each request on, or turns it away."""

    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        """Pass a request without a body on."""
        self.forward(None, 0)

    def do_POST(self) -> None:
        """Pass a request with a body on, if it fits."""
        length = int(self.headers.get("Content-Length") or 0)
        if length > MAX_BODY_BYTES:
            self.answer(413, "the body is too large")
            return
        content = self.rfile.read(length)
        try:
            body = json.loads(content)
        except ValueError:
            body = None
        tokens = 0
        if (
            isinstance(body, dict)
            and limits
            and self.path.startswith(("/v1/completions", "/v1/chat/completions"))
        ):
            with contextlib.suppress(OSError, ValueError, KeyError):
                tokens = count_tokens(body, min(limits.values()))
        self.admit(content, body if isinstance(body, dict) else {}, tokens)

    def admit(self, content: bytes, body: dict[str, Any], tokens: int) -> None:
        """Pass a request on where it fits beside the prompts in flight."""
        global in_flight_tokens  # noqa: PLW0603 - one value of the process
        with in_flight_lock:
            refusal = refuse(body, tokens, in_flight_tokens)
            if refusal is None:
                in_flight_tokens += tokens
        if refusal is not None:
            self.answer(*refusal)
            return
        self.forward(content, tokens)

    def forward(self, content: bytes | None, tokens: int) -> None:
        """Pass the request on; its prompt is in flight until the answer begins."""
        global in_flight_tokens  # noqa: PLW0603 - one value of the process
        headers = {
            name: value for name, value in self.headers.items() if name.lower() not in HOP_HEADERS
        }
        request = urllib.request.Request(
            VLLM_URL + self.path, content, headers, method=self.command
        )
        try:
            answer = urllib.request.urlopen(request, timeout=3600)
        except urllib.error.HTTPError as error:
            answer = error
        except OSError as error:
            self.answer(502, str(error))
            return
        finally:
            with in_flight_lock:
                in_flight_tokens -= tokens
        with answer:
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in HOP_HEADERS:
                    self.send_header(name, value)
            self.end_headers()
            while chunk := answer.read1(1 << 16):
                self.wfile.write(chunk)
                self.wfile.flush()

    def answer(self, status: int, reason: str) -> None:
        """Answer in the form of an error of vLLM."""
        content = json.dumps(
            {"error": {"message": reason, "type": "headroom", "code": status}}
        ).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing of requests that pass."""


if __name__ == "__main__":
    threading.Thread(target=watch_limits, daemon=True).start()
    ThreadingHTTPServer(("", LISTEN_PORT), Proxy).serve_forever()
