"""An HTTP server on a raw socket that behaves exactly as badly as instructed."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

LOOPBACK: Final = "127.0.0.1"

Answer = Callable[[socket.socket, threading.Event], None]
"""Answers one request on its connection, which is kept unless it raises `Hangup`; the event is set at closing time."""


class Hangup(Exception):  # noqa: N818 - it is no error: the answer is over and so is the connection
    """Raised by an answer that ends with the connection."""


def page(text: str, *, status: str = "200 OK", headers: tuple[str, ...] = ()) -> Answer:
    """Answer as a good server does."""
    return raw(with_head(text.encode(), status, headers=headers))


def with_head(
    body: bytes, status: str = "200 OK", *, headers: tuple[str, ...] = (), length: int | None = None
) -> bytes:
    """Return `body` behind a head that promises `length` bytes, or as many as there are."""
    promised = len(body) if length is None else length
    return "\r\n".join((f"HTTP/1.1 {status}", f"Content-Length: {promised}", *headers, "", "")).encode() + body


def raw(data: bytes) -> Answer:
    """Answer with these bytes and keep the connection."""
    return lambda connection, _closing: connection.sendall(data)


def cut(data: bytes) -> Answer:
    """Answer with these bytes and hang up."""

    def answer(connection: socket.socket, _closing: threading.Event) -> None:
        connection.sendall(data)
        raise Hangup

    return answer


def reset(connection: socket.socket, _closing: threading.Event) -> None:
    """Break the connection with RST, as a crashed process's kernel does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    raise Hangup


def hang(connection: socket.socket, _closing: threading.Event) -> None:
    """Take the request and say nothing, until the client hangs up."""
    connection.recv(1)


def drip(text: str) -> Answer:
    """Answer a byte at a time: each one comes soon, the whole never in time."""

    def answer(connection: socket.socket, closing: threading.Event) -> None:
        for byte in with_head(text.encode()):
            connection.sendall(bytes([byte]))
            closing.wait(0.01)

    return answer


class EngineServer:
    """Listens on loopback from construction until `close`; `answer` may be replaced at any time.

    `requests` are the heads of all requests so far and `connections` is how many connections they came on.
    """

    def __init__(self, answer: Answer, *, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.answer = answer
        self.connections = 0
        self.requests: list[str] = []
        self._answering = threading.local()
        self._tls = tls
        self._closing = threading.Event()
        self._listener = socket.create_server((LOOPBACK, port))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"{'https' if self._tls else 'http'}://{LOOPBACK}:{self.port}/metrics"

    @property
    def path(self) -> str:
        """What the request asks for that the calling thread answers."""
        return str(self._answering.path)

    @property
    def body(self) -> bytes:
        """What came with the request that the calling thread answers."""
        return bytes(self._answering.body)

    def wait_until_idle(self, deadline_seconds: float = 30) -> None:
        """Return when no connection is open any more."""
        deadline = time.monotonic() + deadline_seconds
        while self._open:
            assert time.monotonic() < deadline, "a connection stayed open"
            time.sleep(0.01)

    def close(self) -> None:
        """Break all connections and free the port."""
        self._closing.set()
        for connection in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closing.is_set():
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.add(connection)
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, Hangup), contextlib.ExitStack() as stack:
            stack.callback(self._open.discard, connection)
            stack.enter_context(connection)
            if self._tls is not None:
                connection = stack.enter_context(
                    self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                )
                _shake_hands(connection)
            while head := _read_head(connection):
                self.requests.append(head)
                self._answering.path = head.split()[1]
                self._answering.body = _body(connection, head)
                self.answer(connection, self._closing)


def _shake_hands(connection: ssl.SSLSocket) -> None:
    try:
        connection.do_handshake()
    except ssl.SSLError:  # let the client read the alert: closing over unread data would reset the connection
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
        raise Hangup from None


def _body(connection: socket.socket, head: str) -> bytes:
    """Return what follows the head of a request, or as much of it as comes before the client hangs up."""
    lengths = [line.partition(":")[2] for line in head.lower().splitlines() if line.startswith("content-length:")]
    left_bytes, body = sum(map(int, lengths)), b""
    while len(body) < left_bytes and (data := connection.recv(left_bytes - len(body))):
        body += data
    return body


def _read_head(connection: socket.socket) -> str:
    """Return the head of the next request, or nothing when the client has hung up."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        data = connection.recv(1)
        if not data:
            return ""
        head += data
        if not head[:1].isalpha():
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            return ""
    return head.decode("latin-1")
