"""Serve HTTP on a limited number of connections, one answer at a time."""

import asyncio
import contextlib
import re
import resource
import socket
from collections import deque
from collections.abc import Coroutine
from email.utils import formatdate
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, Final

import h11

from vllm_headroom.expose.answers import Handler, Request, Response, respond_text
from vllm_headroom.expose.web.door import Door
from vllm_headroom.log import Log

MOST_HEAD_BYTES: Final = 16 * 2**10
"""Prometheus sends 300 bytes, a browser with the cookies of its host a few thousand."""


AUTHORITY: Final = re.compile(r"^https?://[^/?]*", re.IGNORECASE)
"""Clients that use the daemon as a proxy send it before the path; servers must accept it (RFC 9112,
3.2.2)."""


class Phase(Enum):
    """What a connection waits for: its request, its turn, the client that takes the answer, the next request."""

    HEAD = auto()
    TURN = auto()
    SENDING = auto()
    IDLE = auto()


class Connection(asyncio.Protocol):
    """An HTTP/1.1 connection by h11; it does not read while a request waits for its turn.

    `certificate` and `address` are the client's, None and empty where there is none.
    """

    def __init__(self, server: "Server") -> None:
        self._server = server
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEAD_BYTES)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._is_blocked = False
        self._method = b""
        self.certificate: dict[str, object] | None = None
        self.address = ""
        self._enter(Phase.HEAD)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.since_seconds = self._loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register with the server; every byte that the client does not read counts as blocking."""
        transport.set_write_buffer_limits(
            high=1, low=0
        )  # with 0, uvloop's TLS pauses what has nothing to send
        self._transport = transport
        self.certificate = transport.get_extra_info("peercert")
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        self._server.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the signature is asyncio's
        """Leave the server."""
        self._transport = None
        self._server.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        """Process received bytes."""
        self._http.receive_data(data)
        if self.phase is Phase.IDLE:
            self._enter(Phase.HEAD)
        if self.phase is Phase.HEAD:
            self._advance()

    def eof_received(self) -> bool:
        """Keep the connection while a client that has finished sending waits for its answer."""
        self._http.receive_data(b"")
        return self.phase in (Phase.TURN, Phase.SENDING)

    def pause_writing(self) -> None:
        """Note that the client reads too slowly."""
        self._is_blocked = True

    def resume_writing(self) -> None:
        """Continue with the next request."""
        self._is_blocked = False
        if self.phase is Phase.SENDING:
            self._continue()

    def drop(self) -> None:
        """Close it at once, whatever it does."""
        if self._transport is not None:
            self._transport.abort()

    def answer(self, answer: Response) -> None:
        """Send an answer, unless the client has left."""
        if self._transport is None or self._transport.is_closing():
            return
        self._enter(Phase.SENDING)
        headers = [
            ("Content-Type", answer.content_type),
            ("Content-Length", str(len(answer.body))),
            ("Date", formatdate(usegmt=True)),
            *answer.headers,
        ]
        reason = HTTPStatus(answer.status).phrase.encode()
        events: list[h11.Event] = [
            h11.Response(status_code=answer.status, reason=reason, headers=headers)
        ]
        if self._method != b"HEAD":
            events.append(h11.Data(data=answer.body))
        self._transport.write(
            b"".join(self._http.send(event) or b"" for event in (*events, h11.EndOfMessage()))
        )
        if not self._is_blocked:
            self._continue()

    def _continue(self) -> None:
        """Start the next request, which may have come already, or close the connection."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        with contextlib.suppress(
            h11.RemoteProtocolError
        ):  # a body that has come as a whole is skipped
            while self._http.their_state is h11.SEND_BODY and isinstance(
                self._http.next_event(), h11.Data
            ):
                pass
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            self._enter(Phase.IDLE)
            transport.resume_reading()
            self._advance()
        else:
            transport.close()

    def _advance(self) -> None:
        """Take the next request, or what comes in its place, from the bytes that have come."""
        if self._transport is None:
            return
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self._method = b""
            if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self.answer(
                    respond_text(
                        error.error_status_hint, "not an HTTP request that is understood here"
                    )
                )
            else:
                self.drop()
            return
        if isinstance(event, h11.Request):
            self._method = event.method
            self._enter(Phase.TURN)
            self._transport.pause_reading()
            path, _, query = AUTHORITY.sub("", event.target.decode("latin-1")).partition("?")
            headers: dict[str, str] = {}
            for name, value in (
                (name.decode("latin-1"), value.decode("latin-1")) for name, value in event.headers
            ):
                headers[name] = f"{headers[name]},{value}" if name in headers else value
            request = Request(
                method=event.method.decode("latin-1"),
                path=path or "/",
                query=query,
                headers=headers,
            )
            self._server.admit(self, request)
        elif isinstance(event, h11.ConnectionClosed):
            self._transport.close()


log = Log(__name__)

MOST_CONNECTIONS: Final = 256
"""Scrapers of one sidecar are few; beyond this, the connection that waits longest for its client is
closed, and the oldest handshake or password check is cancelled."""

PATIENCE_SECONDS: Final = {Phase.HEAD: 5.0, Phase.TURN: 10.0, Phase.SENDING: 10.0, Phase.IDLE: 90.0}
"""How long a client may take for a request and an answer, may wait for its turn (including its
password check), and may keep its connection: Prometheus scrapes at least every minute."""

SLOW_SECONDS: Final = 1.0
"""A client that has not taken its answer after this time is as idle as one that says nothing."""

SOCKET_BUFFER_BYTES: Final = 64 * 2**10
"""The kernel's buffer of a connection each way, which it doubles. The default takes 2.5 MB of
unread answers, which count against the container's limit, and makes the client look idle."""

ACCEPT_AGAIN_SECONDS: Final = 0.1
SWEEP_SECONDS: Final = 2.0
SHORT_PREFIXES: Final = ("/healthz", "/readyz", "/gate/")
"""A kubelet waits a second and restarts the container: its requests do not wait for scrapers."""

SHUTDOWN_SECONDS: Final = 0.5
"""How long scrapes in progress may take after the stop, out of a second for the whole exit."""


def count_places() -> int:
    """Return the most connections: where descriptors are few, a quarter, since the engine and files need some."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        MOST_CONNECTIONS
        if most == resource.RLIM_INFINITY
        else max(1, min(MOST_CONNECTIONS, most // 4))
    )


class Server:
    """Answers requests that `door` admits, without one all, with `handler`, which is fast.

    Between two answers the event loop runs once, so that sampling waits for at most one answer.
    Short requests and others are answered in turn, so that neither kind blocks the other.
    """

    def __init__(self, handler: Handler, door: Door | None = None) -> None:
        self._handler = handler
        self._door = door
        self.connections: set[Connection] = set()
        self._short: deque[tuple[Connection, Request]] = deque()
        self._waiting: deque[tuple[Connection, Request]] = deque()
        self._has_work = asyncio.Event()
        self._guests: dict[asyncio.Task[None], None] = {}

    async def serve(self, listener: socket.socket) -> None:
        """Serve on the socket until cancelled, then answer received requests for half a second."""
        works = [self._accept(listener), self._answer(), self._sweep()]
        works += [self._door.watch(self._drop_all)] if self._door else []
        tasks = [asyncio.create_task(work) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            tasks[0].cancel()
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SHUTDOWN_SECONDS):
                        await asyncio.sleep(0)  # the accepting task ends
                        while any(  # noqa: ASYNC110 - no event exists
                            each.phase in (Phase.TURN, Phase.SENDING) for each in self.connections
                        ):
                            await asyncio.sleep(0.01)
            finally:
                listener.close()
                for task in (*tasks, *self._guests):
                    task.cancel()
                self._drop_all()

    def _drop_all(self) -> None:
        for connection in tuple(self.connections):
            connection.drop()

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections one by one, so that the event loop runs in between."""
        loop = asyncio.get_running_loop()
        listener.settimeout(0)
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError:  # no descriptor is left, or the client has gone
                await asyncio.sleep(ACCEPT_AGAIN_SECONDS)
                continue
            if self._door is None:
                await self._welcome(client)
                continue
            if len(self._guests) >= count_places():
                next(iter(self._guests)).cancel()
            self._start_guest(self._welcome(client))

    async def _welcome(self, client: socket.socket) -> None:
        tls = self._door.loaded.tls if self._door else None
        patience = PATIENCE_SECONDS[Phase.HEAD] if tls else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self), client, ssl=tls, ssl_handshake_timeout=patience
            )
        except OSError:  # TLS failed or took too long: not logged, since any client can cause it
            client.close()

    def _start_guest(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._guests[task] = None
        task.add_done_callback(lambda done: self._guests.pop(done, None))

    def add(self, connection: Connection) -> None:
        """Add a connection; where there are too many, drop the one that is idle, or slow, for longest."""
        if self._door is not None and not self._door.is_admitted(connection.certificate):
            connection.drop()
            return
        if len(self.connections) >= count_places():
            slow, idles = connection.since_seconds - SLOW_SECONDS, (Phase.HEAD, Phase.IDLE)
            idle = [
                other
                for other in self.connections
                if other.phase in idles
                or (other.phase is Phase.SENDING and other.since_seconds < slow)
            ]
            oldest = min(idle or self.connections, key=lambda other: other.since_seconds)
            self.connections.discard(oldest)
            oldest.drop()
        self.connections.add(connection)

    def admit(self, connection: Connection, request: Request) -> None:
        """Queue a request for its turn, if its client is admitted."""
        door = self._door
        if door is None:
            self._queue(connection, request)
            return

        async def check_login() -> None:
            if refusal := await door.find_refusal(request, connection.address):
                connection.answer(door.add_headers(refusal))
            else:
                self._queue(connection, request)

        self._start_guest(check_login())

    def _queue(self, connection: Connection, request: Request) -> None:
        queue = self._short if request.path.startswith(SHORT_PREFIXES) else self._waiting
        queue.append((connection, request))
        self._has_work.set()

    async def _answer(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            while self._short or self._waiting:
                for queue in (self._short, self._waiting):
                    if queue:
                        self._give(*queue.popleft())
                        await asyncio.sleep(0)

    def _give(self, connection: Connection, request: Request) -> None:
        """Answer; an error of one request must not end the daemon."""
        try:
            answer = self._handler(request)
            connection.answer(self._door.add_headers(answer) if self._door else answer)
        except Exception:
            log.exception("a request could not be answered", path=request.path)
            connection.answer(respond_text(500, "this is a fault of the daemon, see its log"))

    async def _sweep(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for connection in tuple(self.connections):
                if now() - connection.since_seconds > PATIENCE_SECONDS[connection.phase]:
                    connection.drop()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; an empty `host` means every interface, IPv4 and IPv6 where the machine has both.

    Raises OSError when the address cannot be bound.
    """
    listener = None
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # compiled in but switched off: IPv4 only
            listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    if listener is None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # connections inherit them
        listener.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BUFFER_BYTES)
    return listener
