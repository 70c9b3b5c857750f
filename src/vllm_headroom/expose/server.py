"""Serve HTTP on a limited number of connections, one response at a time."""

import asyncio
import contextlib
import re
import resource
import socket
import time
from collections import deque
from collections.abc import Coroutine
from email.utils import format_datetime
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, Final

import h11

from vllm_headroom.expose.answers import Handler, Request, Response, respond_text
from vllm_headroom.expose.web.door import Door
from vllm_headroom.log import Log
from vllm_headroom.units import to_datetime

log = Log(__name__)

MOST_HEAD_BYTES: Final = 16 * 2**10
"""The maximum number of bytes read from the head of a request. Prometheus sends 300 bytes, and a
browser with cookies sends a few thousand.
"""

MOST_CONNECTIONS: Final = 256
"""The maximum number of open connections. A sidecar has few scrapers. To make room for another
connection, the server closes the connection that has waited for its client the longest. To make
room for another handshake, the server cancels the oldest handshake or password check.
"""

SLOW_CLIENT_SECONDS: Final = 1.0
"""A client that takes longer than this to read its response counts as idle. So does a client that
sends nothing.
"""

SOCKET_BUFFER_BYTES: Final = 64 * 2**10
"""The size requested for each of a connection's two kernel buffers. The kernel doubles it. With the
default size, 2.5 MB of unread responses would count against the container's limit. A slow client
would also look idle.
"""

ACCEPT_RETRY_SECONDS: Final = 0.1
"""The pause after a failure to accept a connection (our choice)."""

SWEEP_SECONDS: Final = 2.0
"""The interval at which the server looks for clients that take too long (our choice)."""

SHORT_PREFIXES: Final = ("/healthz", "/readyz", "/gate/")
"""The path prefixes of short requests, which do not wait for scrapes. A kubelet waits one second
for a response, and restarts the container after several failures.
"""

DRAIN_SECONDS: Final = 0.5
"""The time limit for scrapes in progress at shutdown. The limit for the entire exit is one second.
"""

DRAIN_CHECK_SECONDS: Final = 0.01
"""How often a stopping server checks whether all clients have received their responses (our
choice).
"""

AUTHORITY: Final = re.compile(r"^https?://[^/?]*", re.IGNORECASE)
"""The scheme and host that a client sends to a proxy before the path. A server must accept such a
request (RFC 9112, 3.2.2).
"""


class Phase(Enum):
    """What a connection is waiting for.

    A connection goes through the phases in this order. From IDLE, the next request leads back to
    HEAD.
    """

    HEAD = auto()  # Waiting for the client's request.
    TURN = auto()  # Waiting for the request's turn.
    SENDING = auto()  # Waiting for the client to read the response.
    IDLE = auto()  # Waiting for the client's next request.


CLIENT_PATIENCE_SECONDS: Final = {
    Phase.HEAD: 5.0,
    Phase.TURN: 10.0,
    Phase.SENDING: 10.0,
    Phase.IDLE: 90.0,
}
"""How long a connection may stay in each phase. The time in TURN includes the password check.
Prometheus can keep its connection within the limit for IDLE, because it usually scrapes at least
once a minute.
"""


class Connection(asyncio.Protocol):
    """An HTTP/1.1 connection based on h11.

    No bytes are read from the client while a request is waiting for its turn.
    """

    def __init__(self, server: "Server") -> None:
        self.certificate: dict[str, object] | None = None
        """The client's verified certificate, or None if there is none."""
        self.address = ""
        """The client's address; empty if unknown."""
        self._server = server
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEAD_BYTES)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        """The transport, or None before the connection is made and after it is lost."""
        self._is_abandoned = False
        """Whether opening the connection has been cancelled."""
        self._is_blocked = False
        """Whether the client has not yet received everything that was written."""
        self._method = b""
        """The method of the current request; empty for a rejected request."""
        self._enter(Phase.HEAD)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.since_seconds = self._loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register with the server."""
        if self._is_abandoned:
            transport.abort()
            return
        # With these limits, `pause_writing` is called even if one byte is waiting to be sent. A
        # limit of high=0 is not used. With it, uvloop's TLS would also pause a connection with
        # nothing to send.
        transport.set_write_buffer_limits(high=1, low=0)
        self._transport = transport
        self.certificate = transport.get_extra_info("peercert")
        peer = transport.get_extra_info("peername")
        if peer:
            self.address = str(peer[0])
        self._server.add(self)

    def data_received(self, data: bytes) -> None:
        """Process received bytes."""
        self._http.receive_data(data)
        # A request's time limit starts with its first byte, not with the last response.
        if self.phase is Phase.IDLE:
            self._enter(Phase.HEAD)
        if self.phase is Phase.HEAD:
            self._read_request()

    def _read_request(self) -> None:
        """Parse the next request from the received bytes, and queue it with the server.

        Does nothing if the request is incomplete. If the bytes are not HTTP, the request is
        rejected. If the client has closed its side, the connection is closed.
        """
        if self._transport is None:
            return
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint)
            return
        if isinstance(event, h11.Request):
            self._method = event.method
            self._enter(Phase.TURN)
            # Nothing else is read until this request has been answered.
            self._transport.pause_reading()
            self._server.admit(self, _build_request(event))
        elif isinstance(event, h11.ConnectionClosed):
            self._transport.close()

    def _refuse(self, status: int) -> None:
        """Respond with an error status; if it is too late, drop the client."""
        self._method = b""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.answer(respond_text(status, "not an HTTP request that is understood here"))
        else:
            self.drop()

    def answer(self, answer: Response) -> None:
        """Send a response, unless the client has left."""
        if self._transport is None or self._transport.is_closing():
            return
        self._enter(Phase.SENDING)
        headers = [
            ("Content-Type", answer.content_type),
            ("Content-Length", str(len(answer.body))),
            # RFC 9110, 6.6.1: a server with a clock must send the date.
            ("Date", format_datetime(to_datetime(time.time()), usegmt=True)),
            *answer.headers,
        ]
        reason = HTTPStatus(answer.status).phrase.encode()
        events: list[h11.Event] = [
            h11.Response(status_code=answer.status, reason=reason, headers=headers)
        ]
        # A response to HEAD states the body's length but does not contain the body.
        if self._method != b"HEAD":
            events.append(h11.Data(data=answer.body))
        events.append(h11.EndOfMessage())
        parts = [self._http.send(event) or b"" for event in events]
        self._transport.write(b"".join(parts))
        # A blocked client's exchange ends when the client has received the response. The exchange
        # also ends when its time limit is reached.
        if not self._is_blocked:
            self._finish_exchange()

    def pause_writing(self) -> None:
        """Record that the client is reading too slowly."""
        self._is_blocked = True

    def resume_writing(self) -> None:
        """Continue with the next request."""
        self._is_blocked = False
        if self.phase is Phase.SENDING:
            self._finish_exchange()

    def _finish_exchange(self) -> None:
        """Wait for the next request on this connection.

        A connection that cannot be reused is closed. A request that has already been received is
        processed at once.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        # h11 starts the next cycle only after the entire request has been read.
        self._skip_body()
        # A connection in an unknown state, such as after an error, is closed.
        is_reusable = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        if not is_reusable:
            transport.close()
            return
        self._http.start_next_cycle()
        self._enter(Phase.IDLE)
        transport.resume_reading()
        self._read_request()

    def _skip_body(self) -> None:
        """Skip the part of the request's body that has been received."""
        with contextlib.suppress(h11.RemoteProtocolError):
            while self._http.their_state is h11.SEND_BODY:
                if not isinstance(self._http.next_event(), h11.Data):
                    return

    def eof_received(self) -> bool:
        """Keep the connection open while the client is waiting for a response."""
        self._http.receive_data(b"")
        return self.is_answering

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Remove the connection from the server."""
        self._transport = None
        self._server.connections.discard(self)

    @property
    def is_answering(self) -> bool:
        """Return whether the client has sent a request and is waiting for the response."""
        return self.phase in (Phase.TURN, Phase.SENDING)

    def is_idle(self, now_seconds: float) -> bool:
        """Return whether the client still has to send a request or read a response."""
        if self.phase is Phase.SENDING:
            return self.since_seconds < now_seconds - SLOW_CLIENT_SECONDS
        return self.phase in (Phase.HEAD, Phase.IDLE)

    def abandon(self) -> None:
        """Forget the transport, because opening the connection was cancelled.

        uvloop closes the transport. The connection may have been made in the same iteration of the
        event loop. A request may even have been read.
        """
        self._is_abandoned = True
        self.connection_lost(None)

    def drop(self) -> None:
        """Close the connection immediately, even while a response is being sent."""
        if self._transport is not None:
            self._transport.abort()


def _build_request(event: h11.Request) -> Request:
    """Return the request without its body; values of a repeated header are joined by commas."""
    # latin-1 can decode any byte, so this cannot fail.
    target = AUTHORITY.sub("", event.target.decode("latin-1"))
    path, _, query = target.partition("?")
    headers: dict[str, str] = {}
    for raw_name, raw_value in event.headers:
        name = raw_name.decode("latin-1")
        value = raw_value.decode("latin-1")
        if name in headers:
            headers[name] += f",{value}"
        else:
            headers[name] = value
    method = event.method.decode("latin-1")
    return Request(method=method, path=path or "/", query=query, headers=headers)


def find_connection_limit() -> int:
    """Return the maximum number of connections, which is between 1 and MOST_CONNECTIONS.

    Connections use at most a quarter of the process's file descriptors. The sources and the state
    also need descriptors.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, descriptors // 4))


class Server:
    """Answers requests with `handler`, which must be fast.

    With a `door`, only admitted requests are answered. The client's certificate is checked when a
    connection is opened. The login is checked for each request. Admitted requests wait in a queue.

    The event loop runs once between two responses. Sampling therefore waits for at most one
    response. There is one queue for short requests and one for all others. The queues take turns,
    so that neither blocks the other.
    """

    def __init__(self, handler: Handler, door: Door | None = None) -> None:
        self._handler = handler
        self._door = door
        self.connections: set[Connection] = set()
        self._short_queue: deque[tuple[Connection, Request]] = deque()
        self._queue: deque[tuple[Connection, Request]] = deque()
        self._has_work = asyncio.Event()
        self._admissions: dict[asyncio.Task[None], None] = {}
        """The handshakes and password checks in progress, oldest first."""

    async def serve(self, listener: socket.socket) -> None:
        """Serve on the socket until cancelled, then answer received requests for DRAIN_SECONDS.

        If one of the server's tasks fails, its error is raised.
        """
        accepting = asyncio.create_task(self._accept(listener))
        tasks = [
            accepting,
            asyncio.create_task(self._answer_in_turn()),
            asyncio.create_task(self._sweep()),
        ]
        if self._door is not None:
            tasks.append(asyncio.create_task(self._door.watch(self._drop_all)))
        try:
            # No task ends by itself, so the first task to end has failed.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            accepting.cancel()
            try:
                await self._drain()
            finally:
                listener.close()
                for task in (*tasks, *self._admissions):
                    task.cancel()
                self._drop_all()

    async def _drain(self) -> None:
        """Wait until all received requests have been answered, but at most DRAIN_SECONDS."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await asyncio.sleep(0)  # The accepting task ends in this iteration of the loop.
                while any(  # noqa: ASYNC110 - no event exists
                    connection.is_answering for connection in self.connections
                ):
                    await asyncio.sleep(DRAIN_CHECK_SECONDS)

    def _drop_all(self) -> None:
        for connection in tuple(self.connections):
            connection.drop()

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections forever, one by one, so that the event loop runs in between."""
        loop = asyncio.get_running_loop()
        listener.settimeout(0)
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError:  # No file descriptor is free, or the client has disconnected.
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            # Without a door, there is no slow handshake.
            if self._door is None:
                await self._open(client)
                continue
            if len(self._admissions) >= find_connection_limit():
                oldest = next(iter(self._admissions))
                oldest.cancel()
            self._start_admission(self._open(client))

    async def _open(self, client: socket.socket) -> None:
        """Open a connection on an accepted socket, after the handshake if TLS is used."""
        tls = None if self._door is None else self._door.loaded.tls
        handshake_seconds = None if tls is None else CLIENT_PATIENCE_SECONDS[Phase.HEAD]
        connection = Connection(self)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, client, ssl=tls, ssl_handshake_timeout=handshake_seconds
            )
        except asyncio.CancelledError:
            connection.abandon()
            raise
        # The TLS handshake failed or took too long. The failure is not logged, because any client
        # can cause it.
        except OSError:
            client.close()
        except Exception:
            log.exception("a connection could not be opened")  # Only this client is affected.
            client.close()

    def _start_admission(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a handshake or password check, and keep it in `_admissions` until it is over."""
        task = asyncio.create_task(work)
        self._admissions[task] = None
        task.add_done_callback(lambda done: self._admissions.pop(done, None))

    def add(self, connection: Connection) -> None:
        """Add a new connection, or drop it if its certificate is not admitted.

        If there are too many connections, the longest idle one is dropped. If none is idle, the one
        longest in its phase is dropped.
        """
        if self._door is not None and not self._door.is_admitted(connection.certificate):
            connection.drop()
            return
        if len(self.connections) >= find_connection_limit():
            # Another connection is dropped instead of the new one. Idle connections therefore
            # cannot block a scrape.
            now_seconds = connection.since_seconds
            idle = [peer for peer in self.connections if peer.is_idle(now_seconds)]
            longest_idle = min(idle or self.connections, key=lambda peer: peer.since_seconds)
            self.connections.discard(longest_idle)
            longest_idle.drop()
        self.connections.add(connection)

    def admit(self, connection: Connection, request: Request) -> None:
        """Queue a request if its client is admitted."""
        if self._door is None:
            self._enqueue(connection, request)
        else:
            self._start_admission(self._check_login(self._door, connection, request))

    async def _check_login(self, door: Door, connection: Connection, request: Request) -> None:
        """Queue a request with a valid login; refuse any other request."""
        refusal = await door.find_refusal(request, connection.address)
        if refusal is None:
            self._enqueue(connection, request)
        else:
            connection.answer(door.add_headers(refusal))

    def _enqueue(self, connection: Connection, request: Request) -> None:
        is_short = request.path.startswith(SHORT_PREFIXES)
        queue = self._short_queue if is_short else self._queue
        queue.append((connection, request))
        self._has_work.set()

    async def _answer_in_turn(self) -> None:
        """Answer queued requests forever, taking one from each queue in turn."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            while self._short_queue or self._queue:
                for queue in (self._short_queue, self._queue):
                    if queue:
                        self._answer(*queue.popleft())
                        await asyncio.sleep(0)

    def _answer(self, connection: Connection, request: Request) -> None:
        """Answer a request; if the handler raises, log the error and respond with status 500."""
        try:
            answer = self._handler(request)
            if self._door is not None:
                answer = self._door.add_headers(answer)
            connection.answer(answer)
        except Exception:
            log.exception("a request could not be answered", path=request.path)
            self._report_fault(connection)

    def _report_fault(self, connection: Connection) -> None:
        """Respond with status 500, or drop the client if that is no longer possible."""
        try:
            connection.answer(respond_text(500, "this is a fault of the daemon, see its log"))
        except Exception:  # noqa: BLE001 - the fault is logged, and only this client is affected
            connection.drop()

    async def _sweep(self) -> None:
        """Keep dropping connections that have been in their phase for too long."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for connection in tuple(self.connections):
                phase_seconds = loop.time() - connection.since_seconds
                if phase_seconds > CLIENT_PATIENCE_SECONDS[connection.phase]:
                    connection.drop()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    An empty `host` means all interfaces, over IPv4 and, if supported, IPv6. Raises OSError if the
    address cannot be bound.
    """
    listener = None
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be compiled in but disabled.
            listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    if listener is None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # Connections inherit these options.
        listener.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BUFFER_BYTES)
    return listener
