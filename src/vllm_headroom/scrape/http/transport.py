"""HTTP/1.1 to one server over one connection, as httpx's transport: 0.3 ms of CPU a page, with httpx's own 0.8."""

from __future__ import annotations

import asyncio
import ipaddress
import select
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any, Final

import h11
import httpx

from vllm_headroom.worker import Worker

KEEP_ALIVE_SECONDS: Final = 4.0
"""vLLM's uvicorn closes a connection that idles 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE); a request sent then is lost."""

_READ_BYTES: Final = 64 * 2**10
_HEAD_BYTES: Final = 64 * 2**10
"""The largest head of an answer: vLLM's has 200 bytes, a proxy's cookies may add kilobytes."""


_MOST_HINTS: Final = 8
"""Informational answers (1xx) before the real one; HTTP sets no end to them."""


class OneConnection(httpx.AsyncBaseTransport):
    """Sends requests to one server, one after another; `tls` is for an https one."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._resolver = Worker[list[Any]]("resolver")  # uvloop's own threads end the process when one cannot start
        self._connection: _Connection | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the answer as soon as its head has come; raise httpx's errors with their cause."""
        connection = await self._ready(request.url)
        try:
            head = await connection.ask(request)
        except BaseException:
            self._drop()
            raise
        return httpx.Response(
            status_code=head.status_code,
            headers=head.headers.raw_items(),
            stream=_Body(connection),
            extensions={"reason_phrase": head.reason},
        )

    async def aclose(self) -> None:
        """Drop the connection; no request may follow."""
        self._drop()
        self._resolver.stop()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()

    async def _ready(self, url: httpx.URL) -> _Connection:
        if self._connection is None or not self._connection.is_fresh():
            self._drop()
            try:
                self._connection = _Connection(*await self._connect(url))
            except OSError as error:  # SSLError and gaierror are among them
                raise httpx.ConnectError(str(error)) from error
        return self._connection

    async def _connect(self, url: httpx.URL) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first address of the host that answers; raise the last one's OSError."""
        tls, port = self._tls, url.port or (443 if self._tls else 80)
        problem = OSError("the host has no address")
        for address in await self._addresses(url.raw_host, port):
            try:
                return await asyncio.open_connection(address, port, ssl=tls, server_hostname=url.host if tls else None)
            except ssl.SSLError:
                raise
            except OSError as error:
                problem = error
        raise problem

    async def _addresses(self, host: bytes, port: int) -> list[str]:
        name = host.decode("ascii")
        try:
            return [str(ipaddress.ip_address(name))]
        except ValueError:
            pass
        # bytes: a str would be encoded by a codec that refuses names the resolver has to refuse
        try:
            found = await self._resolver.begin(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except TimeoutError as error:  # an abandoned query has not returned
            raise httpx.ConnectTimeout("the resolver hangs") from error
        return [str(address[0]) for *_, address in found]


class _Connection:
    """One socket and its h11 state."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        self._now = asyncio.get_running_loop().time
        self._rested_at_seconds = self._now()

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress on it."""
        return self._http.our_state is h11.IDLE and not self._writer.is_closing()

    def is_fresh(self) -> bool:
        """Return whether another request may be sent on it."""
        return self.is_idle and self._now() - self._rested_at_seconds < KEEP_ALIVE_SECONDS and self._is_silent()

    def drop(self) -> None:
        """Abort it: data that is still on its way is not wanted."""
        self._writer.transport.abort()

    async def ask(self, request: httpx.Request) -> h11.Response:
        """Send the request; return the head of the answer."""
        try:
            head = h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw)
            self._writer.write(self._http.send(head) or b"")
            if content := request.content:
                self._writer.write(self._http.send(h11.Data(data=content)) or b"")
            self._http.send(h11.EndOfMessage())
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error)) from error
        for _ in range(_MOST_HINTS):
            event = await self._event()
            if isinstance(event, h11.Response):
                return event
            if isinstance(event, h11.ConnectionClosed):
                raise httpx.RemoteProtocolError("hung up before it answered")
        raise httpx.RemoteProtocolError("hints at an answer over and over")

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes; afterwards the connection takes the next request, if the server keeps it."""
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                yield bytes(event.data)
        more, _ = self._http.trailing_data  # not requested: it would count as the next answer
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE and not more:
            self._http.start_next_cycle()
            self._rested_at_seconds = self._now()

    def _is_silent(self) -> bool:
        """Return whether nothing came: unrequested data means that the server closes."""
        waiting = select.poll()
        waiting.register(self._writer.get_extra_info("socket").fileno(), select.POLLIN)
        return not waiting.poll(0)

    async def _event(self) -> object:
        """Return the server's next event."""
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(_READ_BYTES))
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        except OSError as error:
            raise httpx.ReadError(str(error)) from error
        return event


class _Body(httpx.AsyncByteStream):
    """The body of an answer; closing it before its end drops the connection."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._connection.body():
            yield part

    async def aclose(self) -> None:
        """Keep the connection only if the body was read to its end."""
        if not self._connection.is_idle:
            self._connection.drop()
