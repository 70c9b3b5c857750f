"""The simulated engine's web server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from vllm_headroom.commands.demo.page import VllmCollector
from vllm_headroom.commands.demo.world import World
from vllm_headroom.expose.answers import Answer, Handler, Request, text
from vllm_headroom.expose.server import Server, listen

SHUTDOWN_SECONDS: Final = 0.3
"""What the daemon's exit within a second leaves for the simulated engine's."""


def engine_application(now: Callable[[], World], epoch_seconds: float) -> Handler:
    """Return what answers for the world that `now` returns, which began at `epoch_seconds`.

    It answers /metrics, with 503 while the engine is down or loads.
    """
    registry = CollectorRegistry()
    registry.register(VllmCollector(now(), epoch_seconds))

    def answer(request: Request) -> Answer:
        if request.path != "/metrics":
            return text(404, "not found: there is /metrics")
        if not now().serves:
            return text(503, "the simulated engine is down")
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Answer(status=200, body=encode(registry), content_type=content_type)

    return answer


@contextlib.asynccontextmanager
async def serving(application: Handler) -> AsyncIterator[str]:
    """Serve `application` on a free port of 127.0.0.1 while the block runs; the block gets the URL of /metrics."""
    listener = listen("127.0.0.1", 0)
    server = Server(application)
    task = asyncio.create_task(server.serve(listener))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=SHUTDOWN_SECONDS)
        listener.close()  # a task that had not begun never took it over
