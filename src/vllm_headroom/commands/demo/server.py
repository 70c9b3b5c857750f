"""The simulated engine's web server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

from prometheus_client import CollectorRegistry, make_asgi_app

from vllm_headroom.commands.demo.page import VllmCollector
from vllm_headroom.commands.demo.world import World
from vllm_headroom.expose.server import Application, Message, Receive, Send, Server, listen

SHUTDOWN_SECONDS: Final = 0.3
"""What the daemon's exit within a second leaves for the simulated engine's."""


def engine_application(now: Callable[[], World], epoch_seconds: float) -> Application:
    """Return the ASGI application of the world that `now` returns, which began at `epoch_seconds`.

    It answers /metrics, with 503 while the engine is down or loads.
    """
    registry = CollectorRegistry()
    registry.register(VllmCollector(now(), epoch_seconds))
    metrics: Application = make_asgi_app(registry)

    async def serve(scope: Message, receive: Receive, send: Send) -> None:
        if scope["path"] != "/metrics":
            await _refuse(send, 404, b"not found: there is /metrics\n")
        elif not now().serves:
            await _refuse(send, 503, b"the simulated engine is down\n")
        else:
            await metrics(scope, receive, send)

    return serve


@contextlib.asynccontextmanager
async def serving(application: Application) -> AsyncIterator[str]:
    """Serve `application` on a free port of 127.0.0.1 while the block runs; the block gets the URL of /metrics."""
    listener = listen("127.0.0.1", 0)
    server = Server(application)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
    finally:
        server.should_exit = True
        await asyncio.wait({task}, timeout=SHUTDOWN_SECONDS)
        task.cancel()


async def _refuse(send: Send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": body})
