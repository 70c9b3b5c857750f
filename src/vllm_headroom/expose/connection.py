"""One connection of a scraper: from bytes to a request, and from an answer to bytes."""

from __future__ import annotations

import asyncio
import contextlib
import re
from email.utils import formatdate
from enum import Enum, auto
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import h11

from vllm_headroom.expose.answers import Request, Response, text

if TYPE_CHECKING:
    from vllm_headroom.expose.server import Server

MOST_HEAD_BYTES: Final = 16 * 2**10
"""Prometheus sends 300 bytes, a browser with the cookies of its host a few thousand."""


AUTHORITY: Final = re.compile(r"^https?://[^/?]*", re.IGNORECASE)
"""A client that takes the daemon for a proxy sends it before the path (RFC 9112, 3.2.2: to be accepted)."""


class Phase(Enum):
    """What a connection waits for."""

    HEAD = auto()
    """The rest of a request, or the first one."""
    TURN = auto()
    """Its turn to be answered."""
    SENDING = auto()
    """The client, which has not taken the whole answer."""
    IDLE = auto()
    """The next request on a connection that has had one."""


class Connection(asyncio.Protocol):
    """Speaks HTTP/1.1 by h11; nothing more is read while a request waits for its turn."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEAD_BYTES)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._is_blocked = False
        self._method = b""
        self._enter(Phase.HEAD)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.since_seconds = self._loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Have the server told; every byte that the client does not take counts as blocking."""
        transport.set_write_buffer_limits(high=1, low=0)  # with 0, uvloop's TLS pauses what has nothing to send
        self._transport = transport
        self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the signature is asyncio's
        """Have the server told."""
        self._transport = None
        self._server.closed(self)

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        self._http.receive_data(data)
        if self.phase is Phase.IDLE:
            self._enter(Phase.HEAD)
        if self.phase is Phase.HEAD:
            self._advance()

    def eof_received(self) -> bool:
        """Let a client that is done sending still have its answer."""
        self._http.receive_data(b"")
        return self.phase in (Phase.TURN, Phase.SENDING)

    def pause_writing(self) -> None:
        """Note that the client lags."""
        self._is_blocked = True

    def resume_writing(self) -> None:
        """Go on with the next request."""
        self._is_blocked = False
        if self.phase is Phase.SENDING:
            self._sent()

    @property
    def peer_certificate(self) -> dict[str, object] | None:
        """What a client's certificate says, None where there is none."""
        return None if self._transport is None else self._transport.get_extra_info("peercert")

    def drop(self) -> None:
        """Close it at once, whatever it does."""
        if self._transport is not None:
            self._transport.abort()

    def answer(self, answer: Response) -> None:
        """Send an answer."""
        if self._transport is None:
            return
        self._enter(Phase.SENDING)
        self._transport.write(self._encoded(answer))
        if not self._is_blocked:
            self._sent()

    def _encoded(self, answer: Response) -> bytes:
        headers = [
            ("Content-Type", answer.content_type),
            ("Content-Length", str(len(answer.body))),
            ("Date", formatdate(usegmt=True)),
            *answer.headers,
        ]
        reason = HTTPStatus(answer.status).phrase.encode()
        parts: list[bytes | None] = [
            self._http.send(h11.Response(status_code=answer.status, reason=reason, headers=headers))
        ]
        if self._method != b"HEAD":
            parts.append(self._http.send(h11.Data(data=answer.body)))
        parts.append(self._http.send(h11.EndOfMessage()))
        return b"".join(part for part in parts if part)

    def _sent(self) -> None:
        """Begin the next request, which may be here already, or close where there can be none."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._skip_body()
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            self._enter(Phase.IDLE)
            transport.resume_reading()
            self._advance()
        else:
            transport.close()

    def _skip_body(self) -> None:
        """Pass over a body that is here as a whole; for one that is not, nobody waits."""
        with contextlib.suppress(h11.RemoteProtocolError):
            while self._http.their_state is h11.SEND_BODY and isinstance(self._http.next_event(), h11.Data):
                pass

    def _advance(self) -> None:
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint)
            return
        if isinstance(event, h11.Request):
            self._method = event.method
            self._enter(Phase.TURN)
            if self._transport is not None:
                self._transport.pause_reading()
            self._server.asked(self, _request(event))
        elif isinstance(event, h11.ConnectionClosed) and self._transport is not None:
            self._transport.close()

    def _refuse(self, status: int) -> None:
        self._method = b""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.answer(text(status, "not an HTTP request that is understood here"))
        else:
            self.drop()


def _request(event: h11.Request) -> Request:
    path, _, query = AUTHORITY.sub("", event.target.decode("latin-1")).partition("?")
    headers: dict[str, str] = {}
    for name, value in event.headers:
        key, said = name.decode("latin-1"), value.decode("latin-1")
        headers[key] = f"{headers[key]},{said}" if key in headers else said
    return Request(method=event.method.decode("latin-1"), path=path or "/", query=query, headers=headers)
