"""The HTTP server: a bounded number of connections, answered one by one between what else the loop has to do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from typing import Final

import structlog

from vllm_headroom.expose.answers import Answer, Handler, Request, text
from vllm_headroom.expose.connection import Connection, Phase

log = structlog.get_logger()

MOST_CONNECTIONS: Final = 256
"""Scrapers of one sidecar are few; one more than this and the one that has waited longest for its client is closed."""

PATIENCE_SECONDS: Final[dict[Phase, float]] = {Phase.HEAD: 5.0, Phase.SENDING: 10.0, Phase.IDLE: 90.0}
"""How long a client may take over a request and an answer, and may keep its connection: Prometheus scrapes every minute
at the least often."""

SWEEP_SECONDS: Final = 1.0
FAREWELL_SECONDS: Final = 0.5
"""How long scrapes in progress may take after the stop, so that the whole exit stays within a second."""


class Server:
    """Answers requests with `handler`, which is quick.

    Between two answers the loop turns once: whatever scrapers do, sampling waits for one answer at most.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._connections: set[Connection] = set()
        self._waiting: deque[tuple[Connection, Request]] = deque()
        self._has_work = asyncio.Event()

    async def serve(self, listener: socket.socket) -> None:
        """Serve on the socket until cancelled; requests that are here by then are answered, half a second long."""
        listening = await asyncio.get_running_loop().create_server(lambda: Connection(self), sock=listener)
        tasks = {asyncio.create_task(self._answer()), asyncio.create_task(self._sweep())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            listening.close()
            await self._farewell()
            for task in tasks:
                task.cancel()
            for connection in tuple(self._connections):
                connection.drop()

    async def _farewell(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                while any(connection.phase in (Phase.TURN, Phase.SENDING) for connection in self._connections):  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(0.01)

    def opened(self, connection: Connection) -> None:
        """Take a connection in; where there are too many, for one whose client does nothing with it."""
        if len(self._connections) >= MOST_CONNECTIONS:
            idle = [other for other in self._connections if other.phase in (Phase.HEAD, Phase.IDLE)]
            oldest = min(idle or self._connections, key=lambda other: other.since_seconds)
            self._connections.discard(oldest)
            oldest.drop()
        self._connections.add(connection)

    def asked(self, connection: Connection, request: Request) -> None:
        """Queue a request for its turn."""
        self._waiting.append((connection, request))
        self._has_work.set()

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        self._connections.discard(connection)

    async def _answer(self) -> None:
        while True:
            await self._has_work.wait()
            connection, request = self._waiting.popleft()
            if not self._waiting:
                self._has_work.clear()
            connection.answer(self._handled(request))
            await asyncio.sleep(0)

    def _handled(self, request: Request) -> Answer:
        try:
            return self._handler(request)
        except Exception:
            log.exception("a request could not be answered", path=request.path)
            return text(500, "this is a fault of the daemon, its log says more")

    async def _sweep(self) -> None:
        """Close the connections whose clients take too long."""
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for connection in tuple(self._connections):
                if now() - connection.since_seconds > PATIENCE_SECONDS.get(connection.phase, float("inf")):
                    connection.drop()


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
