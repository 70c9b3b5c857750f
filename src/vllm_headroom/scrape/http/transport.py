"""Send HTTP requests on the event loop, with bounds on what their answers may cost."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, cast

import h11
import httpx

_MOST_HEAD_BYTES: Final = 64 * 2**10
"""The most bytes of the head of an answer."""

_MOST_HINTS: Final = 256
"""The most informational answers, such as `100 Continue`, before the answer; each costs 12 us."""

_MOST_PARTS: Final = 16_384
"""The most parts in which an answer may come; each costs 7 us. A page of 5,000 lines may have a
part for each line.
"""

_PARTS_PER_TURN: Final = 64
"""After so many parts, which cost 0.5 ms, the other tasks of the event loop get their turn."""

_MOST_UNREAD_BYTES: Final = 128 * 2**10
"""So many bytes are received ahead, before the server has to wait."""

_MOST_IDLE_SECONDS: Final = 2.0
"""A connection is used again only within this time: vLLM closes one that is idle for 5 s."""

Resolve = Callable[[httpx.URL], Awaitable[Sequence[tuple[str, int]]]]
"""Returns each IP address of a URL's host, with the URL's port; raises OSError."""


class TooManyParts(httpx.RemoteProtocolError):
    """An answer comes in parts so small that they cost too much CPU."""


class PageTransport(httpx.AsyncBaseTransport):
    """Sends requests to one server, one after another.

    httpx's own asynchronous transport takes almost three times the CPU. There are no cookies,
    redirects or proxies. `tls` verifies the server; it is None if the server speaks plain http.

    Where requests follow each other within _MOST_IDLE_SECONDS, they share a connection. It is
    dropped as soon as bytes arrive that no request has asked for, so that no answer is taken for
    the answer to another request.
    """

    def __init__(self, resolve: Resolve, tls: ssl.SSLContext | None) -> None:
        self._resolve = resolve
        self._tls = tls
        self._idle_connection: _Connection | None = None
        """The connection of the last request, if the next request may use it."""
        self._request_seconds: float | None = None
        """When the last request was sent, on the event loop's clock; None before the first."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the answer, of which only the head was received.

        The request's body must be in memory. Only connecting has a time limit, the extension
        `timeout` for each address of the host. Raises httpx.TransportError.
        """
        # Only a GET may be sent a second time, which an idle connection can make necessary.
        can_share = self._note_request() and request.method == "GET"
        connection = self._idle_connection
        self._idle_connection = None
        if connection is not None and not can_share:
            connection.close()
        elif connection is not None and connection.is_open:
            try:
                return await self._exchange(connection, request, can_share=True)
            except (httpx.ReadError, httpx.RemoteProtocolError):
                # The server may have closed the idle connection just before.
                if connection.has_answer:
                    raise
        connection = await self._connect(request)
        return await self._exchange(connection, request, can_share=can_share)

    async def aclose(self) -> None:
        """Close the idle connection."""
        if self._idle_connection is not None:
            self._idle_connection.close()
            self._idle_connection = None

    def _note_request(self) -> bool:
        """Note that a request is sent now; return whether the last one was sent shortly before."""
        last_seconds = self._request_seconds
        self._request_seconds = asyncio.get_running_loop().time()
        if last_seconds is None:
            return False
        return self._request_seconds - last_seconds <= _MOST_IDLE_SECONDS

    async def _exchange(
        self, connection: "_Connection", request: httpx.Request, *, can_share: bool
    ) -> httpx.Response:
        """Send a request and return its answer.

        `can_share` keeps the connection for the next request.
        """
        try:
            head = await connection.send(request)
        except BaseException:
            connection.close()
            raise

        def release() -> None:
            """Keep the connection if the answer was received as a whole; close it otherwise."""
            if can_share and connection.finish():
                self._idle_connection = connection
            else:
                connection.close()

        return httpx.Response(
            head.status_code, headers=head.headers.raw_items(), stream=_Body(connection, release)
        )

    async def _connect(self, request: httpx.Request) -> "_Connection":
        """Return a connection to the first address of the host that accepts one.

        If no address does, the function raises the error of the last one.
        """
        loop = asyncio.get_running_loop()
        server_name = None if self._tls is None else request.url.host
        problem: httpx.TransportError = httpx.ConnectError("the host has no address")
        for address, port in await self._resolve(request.url):
            try:
                async with asyncio.timeout(request.extensions["timeout"]["connect"]):
                    _transport, connection = await loop.create_connection(
                        _Connection, address, port, ssl=self._tls, server_hostname=server_name
                    )
            except TimeoutError:
                problem = httpx.ConnectTimeout("no connection within the time")
            except OSError as error:
                problem = httpx.ConnectError(str(error))
                problem.__cause__ = error
            else:
                return connection
        raise problem


class _Body(httpx.AsyncByteStream):
    """The body of an answer, which is received as it is read."""

    def __init__(self, connection: "_Connection", release: Callable[[], None]) -> None:
        self._connection = connection
        self._release = release

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body."""
        while True:
            event = await self._connection.receive()
            if not isinstance(event, h11.Data):
                return
            yield event.data

    async def aclose(self) -> None:
        self._release()


class _Connection(asyncio.Protocol):
    """A connection to a server, for one request after another."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_HEAD_BYTES)
        self.transport: asyncio.Transport
        """The open connection; `connection_made` sets it before anything is received."""
        self._problem: Exception | None = None
        """Why the connection was lost; None while it is open, or if its end was regular."""
        self._arrival = asyncio.Event()
        """Is set when anything is received, and when the connection is closed."""
        self._unread_bytes = 0
        self._parts = 0
        """How many parts of the answer were received."""
        self._is_idle = True
        """Whether no answer is expected."""
        self.has_answer = False
        """Whether anything was received since the request was sent."""

    @property
    def is_open(self) -> bool:
        """Return whether a request may be sent."""
        return not self.transport.is_closing()

    async def send(self, request: httpx.Request) -> h11.Response:
        """Send a request, and return the head of its answer.

        Raises httpx.LocalProtocolError if HTTP cannot carry a header, and the errors of `receive`.
        """
        self._is_idle = False
        self._parts = 0
        self.has_answer = False
        try:
            head = h11.Request(
                method=request.method, target=request.url.raw_path, headers=request.headers.raw
            )
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error)) from error
        events = (head, h11.Data(data=request.content), h11.EndOfMessage())
        content = b"".join(self._http.send(event) or b"" for event in events)
        self.transport.write(content)
        for _ in range(_MOST_HINTS):
            event = await self.receive()
            if isinstance(event, h11.Response):
                return event
        raise httpx.RemoteProtocolError("informational answers do not end")

    async def receive(self) -> object:
        """Return the next part of the answer, an event of h11.

        Raises TooManyParts, and httpx.RemoteProtocolError or httpx.ReadError if the server breaks
        HTTP or the connection.
        """
        while True:
            self._parts += 1
            if self._parts > _MOST_PARTS:
                raise TooManyParts("the answer comes in too many parts")
            if self._parts % _PARTS_PER_TURN == 0:
                await asyncio.sleep(0)
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                # The cause is the better explanation: a lost connection also breaks HTTP.
                if self._problem is not None:
                    raise httpx.ReadError(str(self._problem)) from self._problem
                raise httpx.RemoteProtocolError(str(error)) from error
            if event is not h11.NEED_DATA:
                return event
            self._unread_bytes = 0
            self.transport.resume_reading()
            self._arrival.clear()
            await self._arrival.wait()

    def finish(self) -> bool:
        """End the exchange; return whether another request may be sent.

        That is so if the whole answer was received, with nothing behind it.
        """
        is_complete = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        if not self.is_open or not is_complete or self._http.trailing_data != (b"", False):
            return False
        self._http.start_next_cycle()
        self._is_idle = True
        return True

    def close(self) -> None:
        """Close the connection without waiting for the server."""
        # Not by `close`, which with TLS waits for the server's answer.
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; a server may send bytes before `create_connection` returns."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take the next bytes of the answer; drop the connection if no answer is expected."""
        if self._is_idle:
            self.close()
            return
        self.has_answer = True
        self._http.receive_data(data)
        self._unread_bytes += len(data)
        if self._unread_bytes > _MOST_UNREAD_BYTES:
            self.transport.pause_reading()
        self._arrival.set()

    def eof_received(self) -> None:
        """Note that the server sends no more."""
        self._http.receive_data(b"")
        self._arrival.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection is closed; `exc` is None if its end was regular."""
        self._problem = exc
        self._http.receive_data(b"")
        self._arrival.set()
