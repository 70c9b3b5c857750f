# ruff: noqa: INP001, S310 - a program of one file, and its URLs are the operator's
"""A proxy before one vLLM that turns away what would not fit, by the sidecar's series.

Python's standard library only. Environment: VLLM_URL, HEADROOM_URL, LISTEN_PORT, and optionally
MAX_NUM_BATCHED_TOKENS. A request that is too large gets 413; one that fits at another time, or
without the prompts in flight, gets 503 with Retry-After. Where a series is absent, the proxy turns
nothing away.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

VLLM_URL = os.environ.get("VLLM_URL", "http://127.0.0.1:8000").rstrip("/")
HEADROOM_URL = os.environ.get("HEADROOM_URL", "http://127.0.0.1:9839").rstrip("/")
LISTEN_PORT = int(os.environ.get("LISTEN_PORT", "8080"))

MAX_NUM_BATCHED_TOKENS = int(os.environ.get("MAX_NUM_BATCHED_TOKENS", "0"))
"""vLLM's option: the most tokens of a step. Where a prompt of so many tokens fits, every step fits,
however many prompts are in flight. 0 if unknown."""

READ_SECONDS = 1.0
"""How often the sidecar's page is read: it has new values once in its sampling interval."""

REMEMBERED_READINGS = 600
"""The readings of ten minutes. A prompt that fitted at one of them may fit again: it gets 503."""

SHORT_SHARE = 1 / 32
"""A text with fewer bytes than this share of the limit counts as one token a byte. Longer texts are
counted by vLLM."""

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
MAX_BODY_BYTES = 64 << 20
HOP_HEADERS = {"connection", "transfer-encoding", "content-length", "host", "keep-alive"}
SERIES = re.compile(
    r"^headroom_engine_safe_(prompt|prompt_logprobs)_tokens\{[^}]*\} (\S+)$", re.MULTILINE
)


KINDS = {"prompt": "prompt tokens", "prompt_logprobs": "tokens with prompt logprobs"}
"""The words for the series' names."""


class Prompts(NamedTuple):
    """The size of a request."""

    largest_tokens: int = 0
    total_tokens: int = 0
    """The tokens of all its prompts: a request may have several."""
    has_logprobs: bool = False


class Refusal(NamedTuple):
    """Why a request is turned away."""

    status: int
    reason: str


readings: deque[dict[str, int]] = deque([{}], REMEMBERED_READINGS)
"""The limits at each reading, the newest at the end: the least of each series over the engine's
GPUs."""

in_flight: list[Prompts] = []
"""The requests that were passed on and have no answer yet."""
in_flight_lock = threading.Lock()


def read_limits() -> dict[str, int]:
    """Return the present limits; raises OSError where the sidecar does not answer."""
    with urllib.request.urlopen(f"{HEADROOM_URL}/metrics", timeout=READ_SECONDS) as page:
        text = page.read().decode()
    limits: dict[str, int] = {}
    for name, value in SERIES.findall(text):
        tokens = int(float(value))
        limits[name] = min(tokens, limits.get(name, tokens))
    return limits


def watch_limits() -> None:
    """Read the limits for ever; without an answer there are none."""
    while True:
        try:
            readings.append(read_limits())
        except OSError:
            readings.append({})
        time.sleep(READ_SECONDS)


def has_prompt_logprobs(body: dict[str, Any]) -> bool:
    """Return whether vLLM will compute the logprobs of the prompt: it also does to echo them."""
    if body.get("prompt_logprobs") is not None:
        return True
    name = "top_logprobs" if "messages" in body else "logprobs"
    return bool(body.get("echo")) and body.get(name) is not None


def measure(body: dict[str, Any], limit: int) -> Prompts:
    """Return the size of a request; raises OSError or ValueError where vLLM counts no tokens."""
    prompt = body.get("prompt")
    is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    prompts = [prompt] if is_one else (prompt or [])
    tokens = []
    for content in prompts:
        if isinstance(content, str):
            tokens.append(count_tokens(body, "prompt", content, limit))
        else:
            tokens.append(len(content))
    if "messages" in body:
        tokens.append(count_tokens(body, "messages", body["messages"], limit))
    return Prompts(max(tokens, default=0), sum(tokens), has_prompt_logprobs(body))


def count_tokens(body: dict[str, Any], name: str, content: Any, limit: int) -> int:  # noqa: ANN401
    """Return the tokens of a text or a chat, or its bytes if those are few beside the limit."""
    content_bytes = len(json.dumps(content))
    if content_bytes < SHORT_SHARE * limit:
        return content_bytes
    question = json.dumps({"model": body.get("model"), name: content}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{VLLM_URL}/tokenize", question, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(json.load(answer)["count"])


def refuse(prompts: Prompts, others: list[Prompts]) -> Refusal | None:
    """Return why a request does not fit beside the others in flight; None where it fits."""
    limits = readings[-1]
    limit = limits.get("prompt_logprobs")
    if limit is not None and prompts.has_logprobs:
        # vLLM still holds the logprobs of one prompt while it computes those of the next.
        refusal = refuse_sum(prompts.total_tokens, others, "prompt_logprobs", limit)
        if refusal is not None:
            return refusal
    limit = limits.get("prompt")
    if limit is None:
        return None
    if 0 < MAX_NUM_BATCHED_TOKENS <= limit:
        return refuse_sum(prompts.largest_tokens, [], "prompt", limit)
    return refuse_sum(prompts.total_tokens, others, "prompt", limit)


def refuse_sum(tokens: int, others: list[Prompts], name: str, limit: int) -> Refusal | None:
    """Return why so many tokens are above a limit, alone or with the others in flight.

    Alone it is final, unless they fitted at a recent reading.
    """
    kind = KINDS[name]
    if tokens > limit:
        highest_limit = max(reading.get(name, 0) for reading in list(readings))
        status = 413 if tokens > highest_limit else 503
        return Refusal(status, f"{tokens} {kind} do not fit: at most {limit} do now")
    is_plain = name == "prompt"
    other_tokens = sum(other.total_tokens for other in others if is_plain or other.has_logprobs)
    if other_tokens + tokens > limit:
        return Refusal(503, f"{tokens} {kind} do not fit beside {other_tokens} in flight")
    return None


class Proxy(BaseHTTPRequestHandler):
    """Passes each request on, or turns it away."""

    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        """Pass a request without a body on."""
        self.forward(None, Prompts())

    def do_POST(self) -> None:
        """Pass a request with a body on, if it fits."""
        length = int(self.headers.get("Content-Length") or 0)
        if length > MAX_BODY_BYTES:
            self.answer(Refusal(413, "the body is too large"))
            return
        content = self.rfile.read(length)
        self.admit(content, self.measure(content))

    def measure(self, content: bytes) -> Prompts:
        """Return the size of a request; 0 where there is no limit, or it has no prompt."""
        limits = readings[-1]
        if not limits or not self.path.startswith(COMPLETIONS):
            return Prompts()
        try:
            return measure(json.loads(content), min(limits.values()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            # vLLM answers what is wrong with it.
            return Prompts()

    def admit(self, content: bytes, prompts: Prompts) -> None:
        """Pass a request on where it fits beside the prompts in flight."""
        with in_flight_lock:
            refusal = refuse(prompts, in_flight)
            if refusal is None:
                in_flight.append(prompts)
        if refusal is None:
            self.forward(content, prompts)
        else:
            self.answer(refusal)

    def forward(self, content: bytes | None, prompts: Prompts) -> None:
        """Pass the request on; its prompts are in flight until the answer begins."""
        headers = {
            name: value for name, value in self.headers.items() if name.lower() not in HOP_HEADERS
        }
        url = VLLM_URL + self.path
        request = urllib.request.Request(url, content, headers, method=self.command)
        answer: Any = None
        reason = ""
        try:
            answer = urllib.request.urlopen(request, timeout=3600)
        except urllib.error.HTTPError as error:
            answer = error
        except OSError as error:
            reason = str(error)
        finally:
            if content is not None:
                with in_flight_lock:
                    in_flight.remove(prompts)
        if answer is None:
            self.answer(Refusal(502, reason))
            return
        with answer:
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in HOP_HEADERS:
                    self.send_header(name, value)
            self.end_headers()
            while chunk := answer.read1(1 << 16):
                self.wfile.write(chunk)
                self.wfile.flush()

    def answer(self, refusal: Refusal) -> None:
        """Answer in the form of an error of vLLM."""
        error = {"message": refusal.reason, "type": "headroom", "code": refusal.status}
        content = json.dumps({"error": error}).encode()
        self.send_response(refusal.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if refusal.status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing of requests that pass."""


if __name__ == "__main__":
    threading.Thread(target=watch_limits, daemon=True).start()
    ThreadingHTTPServer(("", LISTEN_PORT), Proxy).serve_forever()
