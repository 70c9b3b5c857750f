"""The HTTP side: four paths over what is published."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, make_asgi_app
from uvicorn.protocols.http.h11_impl import H11Protocol

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole HTTP answer."""

    status: int
    body: str
    content_type: str = "text/plain; charset=utf-8"


def application(
    *,
    registry: CollectorRegistry,
    page: Callable[[], str],
    unhealthy: Callable[[], str | None],
    ready: Callable[[], bool],
) -> Application:
    """Return the ASGI application; `unhealthy` says why the sampling loop is not well, None when it is."""
    metrics: Application = make_asgi_app(registry)

    def health() -> Answer:
        problem = unhealthy()
        return Answer(status=503 if problem else 200, body=f"{problem or 'ok'}\n")

    def readiness() -> Answer:
        return Answer(status=200, body="ok\n") if ready() else Answer(status=503, body="no sample published yet\n")

    answers: dict[str, Callable[[], Answer]] = {
        "/": lambda: Answer(status=200, body=page(), content_type="text/html; charset=utf-8"),
        "/healthz": health,
        "/readyz": readiness,
    }

    async def serve(scope: Message, receive: Receive, send: Send) -> None:
        if scope["method"] not in {"GET", "HEAD"}:
            await _send(send, Answer(status=405, body="only GET and HEAD\n"))
        elif scope["path"] == "/metrics":
            await metrics(scope, receive, send)
        else:
            await _send(send, answers.get(scope["path"], _not_found)())

    return serve


def _not_found() -> Answer:
    return Answer(status=404, body="not found: there are /, /metrics, /healthz and /readyz\n")


async def _send(send: Send, answer: Answer) -> None:
    headers = [(b"content-type", answer.content_type.encode()), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body.encode()})


class Connection(H11Protocol):
    """uvicorn's connection, which also closes when it stays silent before its first request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock that otherwise starts after the first answer: idle sockets must not pile up."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals belong to the daemon."""

    def __init__(self, application: Application) -> None:
        super().__init__(
            uvicorn.Config(
                application,
                loop="none",
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=1,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; an empty `host` means every interface, IPv4 and IPv6 where the machine has both.

    Raises OSError when the address cannot be bound.
    """
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # compiled in but switched off: IPv4 is what there is
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
