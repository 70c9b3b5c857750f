"""Send requests one after another, each over an idle or a new connection."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from time import monotonic
from typing import Final, cast

import h11

from vllm_headroom.scrape.shortage import SHORTAGES
from vllm_headroom_tools.load.stream import (
    Completion,
    Outcome,
    Stream,
    StreamError,
    parse_refusal,
    shorten_text,
)
from vllm_headroom_tools.load.tally import Tally
from vllm_headroom_tools.load.target import Target

MOST_CONNECTING: Final = 256
"""The maximum number of connections being established at the same time. More connections would
overflow the queue of the server's listening socket. Connecting would then take seconds.
"""

KEEP_SECONDS: Final = 4.0
"""How long an idle connection is kept. vLLM's uvicorn closes idle connections after 5 s
(VLLM_HTTP_TIMEOUT_KEEP_ALIVE). A request sent at that moment would be lost.
"""

OK: Final = 200
MOST_BODY_BYTES: Final = 2**16
"""The number of bytes kept from an answer that is not a stream. This is enough for a server's error
message.
"""

NO_TIME_WAIT: Final = struct.pack("ii", 1, 0)
"""The SO_LINGER value that ends a connection with RST. If a connection ends with FIN, its local
port is blocked for a minute. There are only 28,000 local ports.
"""


class RequestSender:
    """Sends requests to the target, with the bodies that `make_body` returns.

    `timeout_seconds` limits a whole request, including the time to connect.
    """

    def __init__(
        self, *, target: Target, make_body: Callable[[], bytes], timeout_seconds: float
    ) -> None:
        self._target = target
        self._make_body = make_body
        self._timeout_seconds = timeout_seconds
        self._connecting = asyncio.Semaphore(MOST_CONNECTING)
        # The connections that may be reused, each with the time at which it became idle.
        self._idle: list[tuple[float, ClientConnection]] = []

    async def send(self, tally: Tally) -> Outcome:
        """Send one request, record it in `tally` and return its outcome.

        A cancelled request is recorded as unfinished.
        """
        tally.started_requests += 1
        completion = Completion(outcome=Outcome.UNFINISHED)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                completion = await self._exchange(tally)
        except TimeoutError:
            completion = Completion(outcome=Outcome.TIMED_OUT)
        except OSError as error:
            # a shortage, such as of ports, is this machine's fault, unlike other errors
            outcome = Outcome.NOT_SENT if error.errno in SHORTAGES else Outcome.REFUSED
            text = shorten_text(error.strerror or str(error))
            completion = Completion(outcome=outcome, text=text)
        finally:
            tally.add_end(completion)
        return completion.outcome

    async def _exchange(self, tally: Tally) -> Completion:
        """Send a request, read its answer and return how the request ended.

        Raises OSError if no connection can be established.
        """
        connection, connecting_seconds = await self._find_connection()
        stream = Stream(tally.inter_token_seconds.add)
        answering = connection.send(self._target, self._make_body(), stream)
        # The time spent connecting is attributed to the server. The time spent building the body or
        # waiting for a turn to connect is attributed to this machine.
        start_seconds = monotonic() - connecting_seconds
        tally.open_stream()
        try:
            completion = await answering
        finally:
            tally.close_stream()
        end_seconds = monotonic()
        if connection.is_reusable:
            self._idle.append((end_seconds, connection))
        if completion.outcome is Outcome.SUCCEEDED:
            tally.add_success(
                completion,
                start_seconds=start_seconds,
                # If an answer has no tokens, its end counts as the first token.
                first_token_seconds=stream.first_token_seconds or end_seconds,
                end_seconds=end_seconds,
            )
        return completion

    async def _find_connection(self) -> tuple["ClientConnection", float]:
        """Return an idle or new connection, and how many seconds connecting took.

        The number of seconds is 0 for an idle connection. The number does not include the time
        spent waiting for a turn to connect.
        """
        # Try the most recently used connection first. It is the least likely to have been closed.
        while self._idle:
            since_seconds, connection = self._idle.pop()
            if connection.is_reusable and monotonic() - since_seconds < KEEP_SECONDS:
                return connection, 0.0
            connection.close()
        host, port = self._target.address
        tls = self._target.tls
        async with self._connecting:
            start_seconds = monotonic()
            _, connection = await asyncio.get_running_loop().create_connection(
                ClientConnection,
                host,
                port,
                ssl=tls,
                server_hostname=self._target.host if tls else None,
            )
            return connection, monotonic() - start_seconds

    async def close(self) -> None:
        """Close the idle connections."""
        for _, connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # The loop releases the closed connections in its next iteration.


class ClientConnection(asyncio.Protocol):
    """Carries one request at a time, followed by another if `is_reusable` is true."""

    def __init__(self) -> None:
        self.is_reusable = False
        self._http = h11.Connection(h11.CLIENT)
        self._completion: asyncio.Future[Completion] | None = None
        self._transport: asyncio.Transport | None = None
        self._stream: Stream | None = None
        self._status = 0
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the connected transport and set its socket options."""
        # uvloop's transport is not a subclass of asyncio's
        self._transport = cast("asyncio.Transport", transport)
        connection_socket = transport.get_extra_info("socket")
        connection_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_TIME_WAIT)

    async def send(self, target: Target, body: bytes, stream: Stream) -> Completion:
        """Send a request and return how it ended; `stream` receives the answer's bytes.

        The connection is closed if the request is cancelled, or if the answer rules out another
        request.
        """
        self._completion = asyncio.get_running_loop().create_future()
        self._stream = stream
        self._body = b""
        self.is_reusable = False
        if self._transport is None or self._transport.is_closing():
            return Completion(outcome=Outcome.CLOSED)
        headers = [*target.headers, ("Content-Length", str(len(body)))]
        head = self._http.send(h11.Request(method="POST", target=target.path, headers=headers))
        data = self._http.send(h11.Data(body))
        self._http.send(h11.EndOfMessage())
        self._transport.write((head or b"") + (data or b""))
        # 10,000 requests may be open at once; bodies are not kept during the answers
        del body, data
        try:
            return await self._completion
        finally:
            if not self.is_reusable:
                self.close()

    def data_received(self, data: bytes) -> None:
        """Process bytes from the server; invalid HTTP or an invalid stream ends the request."""
        try:
            self._http.receive_data(data)
            self._read_events()
        except h11.RemoteProtocolError as error:
            self._fail(shorten_text(f"it broke HTTP: {error}"))
        except StreamError as error:
            self._fail(str(error))

    def _read_events(self) -> None:
        """Process the received bytes until the answer is complete or more bytes are needed."""
        # A single read from the socket may contain several events.
        while self._completion is not None and not self._completion.done():
            event = self._http.next_event()
            match event:
                case h11.Response():
                    self._status = event.status_code
                case h11.Data() if self._status != OK:
                    self._body = (self._body + bytes(event.data))[:MOST_BODY_BYTES]
                case h11.Data() if self._stream is not None:
                    self._stream.feed(bytes(event.data), monotonic())
                case h11.EndOfMessage():
                    self._finish_answer()
                case h11.NEED_DATA | h11.PAUSED | h11.ConnectionClosed():
                    return

    def _finish_answer(self) -> None:
        """Set the result of a request whose answer is complete."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            self.is_reusable = True
        if self._status != OK:
            self._complete(parse_refusal(self._status, self._body))
            return
        assert self._stream is not None  # noqa: S101 - an answer follows a request
        self._complete(self._stream.build_completion())

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request, because the connection has ended.

        In HTTP/1.0, the end of the connection normally marks the end of the answer. In other
        versions, it means that the answer was cut off.
        """
        self.is_reusable = False
        if exc is None:
            with contextlib.suppress(h11.RemoteProtocolError, StreamError):
                self._http.receive_data(b"")
                self._read_events()
        self._complete(Completion(outcome=Outcome.CLOSED))

    def _fail(self, text: str) -> None:
        self._complete(Completion(outcome=Outcome.FAILED, text=text))

    def _complete(self, completion: Completion) -> None:
        """Set the result of the request, unless it already has one."""
        if self._completion is not None and not self._completion.done():
            self._completion.set_result(completion)

    def close(self) -> None:
        """Close the connection immediately, without the TLS closing handshake, which takes time."""
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()
