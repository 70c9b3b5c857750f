"""Send HTTP requests on the event loop, and limit the cost of their responses."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, cast

import h11
import httpx

_MOST_HEAD_BYTES: Final = 64 * 2**10
"""The maximum size of a response head."""

_MOST_HINTS: Final = 256
"""The maximum number of informational responses, such as `100 Continue`; each costs 12 µs."""

_MOST_PARTS: Final = 16_384
"""The maximum number of parts in a response; each costs 7 µs. A page of 5,000 lines may arrive in
one part per line.
"""

_PARTS_PER_TURN: Final = 64
"""After this many parts (0.5 ms), other tasks on the event loop get a turn."""

_MOST_UNREAD_BYTES: Final = 128 * 2**10
"""The number of unread bytes that are buffered before the server has to wait."""

_MOST_IDLE_SECONDS: Final = 2.0
"""A connection is reused only if it has been idle for less than this. For comparison, vLLM closes
connections that have been idle for 5 s.
"""

Resolve = Callable[[httpx.URL], Awaitable[Sequence[tuple[str, int]]]]
"""Returns each IP address of a URL's host, along with the URL's port; raises OSError."""


class TooManyParts(httpx.RemoteProtocolError):
    """A response arrives in too many small parts to read cheaply."""


class PageTransport(httpx.AsyncBaseTransport):
    """Sends requests to one server, one after another.

    httpx's own asynchronous transport uses almost three times as much CPU time. Cookies, redirects
    and proxies are not supported. `tls` verifies the server; `tls` is None for plain http. Requests
    that follow each other within _MOST_IDLE_SECONDS share a connection. The connection is dropped
    as soon as unrequested bytes arrive. Unrequested bytes could be mistaken for the response to the
    next request.
    """

    def __init__(self, resolve: Resolve, tls: ssl.SSLContext | None) -> None:
        self._resolve = resolve
        self._tls = tls
        self._idle_connection: _Connection | None = None
        """The connection of the last request, if the next request may use it."""
        self._request_seconds: float | None = None
        """When the last request was sent, on the event loop's clock. None before the first request.
        """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the response once its head has been received.

        The request's body must be in memory. Only connecting has a time limit. The limit is in the
        request's extension `timeout` and applies to each address of the host. Raises
        httpx.TransportError.
        """
        # If the server has closed an idle connection, the request is sent again. Therefore, only
        # GET requests use idle connections.
        can_share = self._note_request() and request.method == "GET"
        connection = self._idle_connection
        self._idle_connection = None
        if connection is not None and not can_share:
            connection.close()
        elif connection is not None and connection.is_open:
            try:
                return await self._exchange(connection, request, can_share=True)
            except (httpx.ReadError, httpx.RemoteProtocolError):
                # The server may have just closed the idle connection.
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
        """Record that a request is being sent; return whether the previous request was recent."""
        last_seconds = self._request_seconds
        self._request_seconds = asyncio.get_running_loop().time()
        if last_seconds is None:
            return False
        return self._request_seconds - last_seconds <= _MOST_IDLE_SECONDS

    async def _exchange(
        self, connection: "_Connection", request: httpx.Request, *, can_share: bool
    ) -> httpx.Response:
        """Send a request and return its response.

        If `can_share` is set, the connection is kept for the next request.
        """
        try:
            head = await connection.send(request)
        except BaseException:
            connection.close()
            raise

        def release() -> None:
            """Keep the connection if the whole response was received; close it otherwise."""
            if can_share and connection.finish():
                self._idle_connection = connection
            else:
                connection.close()

        return httpx.Response(
            head.status_code, headers=head.headers.raw_items(), stream=_Body(connection, release)
        )

    async def _connect(self, request: httpx.Request) -> "_Connection":
        """Return a connection to the first address of the host that accepts one.

        If no address accepts a connection, raises the error from the last address.
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
    """The body of a response, received while it is being read."""

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
    """A connection to a server that handles one request at a time."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_HEAD_BYTES)
        self.transport: asyncio.Transport
        """The open connection; `connection_made` sets it before anything is received."""
        self._problem: Exception | None = None
        """Why the connection was lost. None while the connection is open or if it was closed
        cleanly.
        """
        self._arrival = asyncio.Event()
        """Set when anything is received and when the connection is closed."""
        self._unread_bytes = 0
        self._parts = 0
        """The number of parts of the response received so far."""
        self._is_idle = True
        """Whether no response is expected."""
        self.has_answer = False
        """Whether anything has been received since the request was sent."""

    @property
    def is_open(self) -> bool:
        """Return whether a request may be sent."""
        return not self.transport.is_closing()

    async def send(self, request: httpx.Request) -> h11.Response:
        """Send a request and return the head of its response.

        Raises httpx.LocalProtocolError if a header is not valid in HTTP. Also raises the same
        errors as `receive`.
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
        """Return the next part of the response, which is an h11 event.

        Raises TooManyParts if there are too many parts. Raises httpx.RemoteProtocolError if the
        server violates HTTP, and httpx.ReadError if the connection is lost.
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
                # A lost connection can look like a violation of HTTP. The loss is reported instead.
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

        Another request may be sent if the response is complete and no bytes follow.
        """
        is_complete = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        if not self.is_open or not is_complete or self._http.trailing_data != (b"", False):
            return False
        self._http.start_next_cycle()
        self._is_idle = True
        return True

    def close(self) -> None:
        """Close the connection without waiting for the server."""
        # `close` is not used because, with TLS, it waits for the server to respond.
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, because bytes may arrive before `create_connection` returns."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Handle the next bytes of the response; drop the connection if no response is expected."""
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
        """Record that the server will not send anything else."""
        self._http.receive_data(b"")
        self._arrival.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Record that the connection is closed; `exc` is None if it was closed cleanly."""
        self._problem = exc
        self._http.receive_data(b"")
        self._arrival.set()
