"""Parts of a load over the local server, as the tests run them."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import uvloop

from tests.fakes.streaming_server import LOOPBACK, MODEL, StreamingServer
from vllm_headroom_tools.load.prompts import PATHS, CompletionApi, build_request_body
from vllm_headroom_tools.load.sender import RequestSender
from vllm_headroom_tools.load.tally import Tally
from vllm_headroom_tools.load.target import Target

T = TypeVar("T")
DEADLINE_SECONDS: Final = 60.0
"""Far beyond what anything here takes: it only ends a test that failed."""

SOON_SECONDS: Final = 0.3
"""Where a test waits for a limit to pass: nothing is expected to come before it."""


def run(steps: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `steps` on the loop that the command uses."""

    async def main() -> T:
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await steps()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def target(port: int, api: CompletionApi = CompletionApi.COMPLETIONS, tls: ssl.SSLContext | None = None) -> Target:
    return Target(
        address=(LOOPBACK, port),
        host=LOOPBACK,
        path=PATHS[api],
        headers=(("Host", "server"), ("Content-Type", "application/json")),
        tls=tls,
    )


def asker(
    server: StreamingServer | int,
    *,
    words: int = 7,
    tokens: int = 3,
    timeout_seconds: float = DEADLINE_SECONDS,
    api: CompletionApi = CompletionApi.COMPLETIONS,
    tls: ssl.SSLContext | None = None,
) -> RequestSender:
    """Return what asks the server, or that port, for so many tokens."""
    port = server if isinstance(server, int) else server.port
    return RequestSender(
        target=target(port, api, tls),
        make_body=lambda: build_request_body(api, MODEL, "word " * words, tokens),
        timeout_seconds=timeout_seconds,
    )


def tally() -> Tally:
    return Tally(time.monotonic())


async def until(condition: Callable[[], object]) -> None:
    """Wait until it holds; `run` ends a test in which it never does."""
    while not condition():  # noqa: ASYNC110 - what changes is another thread's
        await asyncio.sleep(0.005)


def usage(**counts: int) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"
