"""A connection to the server, which carries one request after another.

h11 reads and writes HTTP on the loop's own transport. Measured with 10,000 streams of an event a second: 4 KiB a stream
and 16 us of CPU an event; a bare connection of httpcore's took 18 KiB and 110 us. A pool of httpx's took 390 us with
1,000 streams already, because it looks at all of them for each.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from time import monotonic
from typing import Final, cast

import h11

from vllm_headroom.commands.load.stream import Completion, NotUnderstood, Outcome, Stream, refusal, shown
from vllm_headroom.commands.load.target import Target

OK: Final = 200
NO_TIME_WAIT: Final = struct.pack("ii", 1, 0)
"""Ends a connection with RST: with FIN its local port could not be used for a minute, and there are 28,000 of them."""

LOST: Final = Completion(outcome=Outcome.CLOSED)
MOST_BODY_BYTES: Final = 2**16
"""Of an answer that is no stream; enough for what a server says of an error."""


class ClientConnection(asyncio.Protocol):
    """Carries one request at a time; `reusable` tells whether another may follow."""

    def __init__(self) -> None:
        self.reusable = False
        self._http = h11.Connection(h11.CLIENT)
        self._reply: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._stream: Stream | None = None
        self._status = 0
        self._body = b""

    def send(self, target: Target, body: bytes, stream: Stream) -> None:
        """Send a request, whose answer `stream` will follow."""
        if self._reply.done():
            self._reply = asyncio.get_running_loop().create_future()
        self._stream, self._body, self.reusable = stream, b"", False
        if self._transport is None or self._transport.is_closing():
            self._end(LOST)
            return
        headers = [*target.headers, ("Content-Length", str(len(body)))]
        head = self._http.send(h11.Request(method="POST", target=target.path, headers=headers))
        data = self._http.send(h11.Data(body))
        self._http.send(h11.EndOfMessage())
        self._transport.write((head or b"") + (data or b""))

    async def answer(self) -> Completion:
        """Return what the request came to. Cancelling hangs up."""
        try:
            return await self._reply
        finally:
            if not self.reusable:
                self.close()

    def close(self) -> None:
        """Hang up, without the farewell that TLS would wait for."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport that the loop has connected."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_TIME_WAIT)

    def data_received(self, data: bytes) -> None:
        """Take what the server sent."""
        try:
            self._http.receive_data(data)
            self._take()
        except h11.RemoteProtocolError as error:
            self._end(Completion(outcome=Outcome.FAILED, text=shown(f"it broke HTTP: {error}")))
        except NotUnderstood as error:
            self._end(Completion(outcome=Outcome.FAILED, text=str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        """Take the end of the connection, which in HTTP/1.0 is the end of the answer too."""
        self.reusable = False
        if exc is None:
            with contextlib.suppress(h11.RemoteProtocolError, NotUnderstood):
                self._http.receive_data(b"")
                self._take()
        self._end(LOST)

    def _take(self) -> None:
        while not self._reply.done():
            event = self._http.next_event()
            match event:
                case h11.Response():
                    self._status = event.status_code
                case h11.Data():
                    self._read(bytes(event.data))
                case h11.EndOfMessage():
                    self._finish()
                case h11.NEED_DATA | h11.PAUSED | h11.ConnectionClosed():
                    return

    def _read(self, data: bytes) -> None:
        if self._status != OK:
            self._body = (self._body + data)[:MOST_BODY_BYTES]
        elif self._stream is not None:
            self._stream.feed(data, monotonic())

    def _finish(self) -> None:
        assert self._stream is not None  # noqa: S101 - an answer follows a question
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            self.reusable = True
        self._end(self._stream.answer() if self._status == OK else refusal(self._status, self._body))

    def _end(self, answer: Completion) -> None:
        if not self._reply.done():
            self._reply.set_result(answer)
