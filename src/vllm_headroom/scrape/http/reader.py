"""Fetch the engine's page over HTTP."""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from time import thread_time
from typing import Any, Final, TypeVar

import httpcore
import httpx
import msgspec
from msgspec import Struct

from vllm_headroom.model import Failure, ServerReply
from vllm_headroom.scrape.http import failures
from vllm_headroom.vocabulary import Reason, ServerAnswer, Source
from vllm_headroom.worker import Worker

T = TypeVar("T")

_MAX_CPU_SECONDS: Final = 0.5
"""The thread may use this much CPU time to receive one page. A page of 5,000 lines, each sent in a
separate part, takes 0.2 s.
"""

_MOST_HEAD_BYTES: Final = 64 * 2**10
"""At most this many bytes are read before the head of an answer is complete. More bytes are no head
but, for example, endless answers `100 Continue`, each of which costs 40 us.
"""

_HEAD_EVENT: Final = "http11.receive_response_headers.complete"
"""httpcore's name of the trace event after the head of the answer."""

_PARTS_PER_CHECK: Final = 64
"""The CPU time is measured once for this many parts of a page."""

_FILE_SECONDS: Final = 1.0
"""Reading a token or a CA file may take this long. Usually it takes microseconds. A pipe without a
writer would take 5 s, and a network volume that hangs would take forever.
"""

_CONNECTED_EVENTS: Final = frozenset(
    {"connection.connect_tcp.complete", "connection.start_tls.complete"}
)
"""httpcore's names of the trace events that carry the connection's socket."""


def read_body(response: httpx.Response, max_bytes: int) -> bytearray | Reason:
    """Read the body of a response that is being streamed; return it, or why it cannot be read.

    The reason is MALFORMED for a compressed body, TOO_LARGE for one larger than `max_bytes`,
    OUT_OF_BOUNDS if its parts cost too much CPU, and INCOMPLETE if the connection ends before the
    announced length. Raises httpx.TimeoutException if the server stops sending.
    """
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in {"", "identity"}:
        return Reason.MALFORMED
    body = bytearray()
    # The limit is on the thread's CPU time, because a slow network uses none.
    start_seconds = thread_time()
    try:
        for count, part in enumerate(response.iter_raw(), start=1):
            body += part
            if len(body) > max_bytes:
                return Reason.TOO_LARGE
            is_check_due = count % _PARTS_PER_CHECK == 0
            if is_check_due and thread_time() - start_seconds > _MAX_CPU_SECONDS:
                return Reason.OUT_OF_BOUNDS
    except (httpx.ReadError, httpx.RemoteProtocolError):
        return Reason.INCOMPLETE
    return body


HTTP_PORT: Final = 80
HTTPS_PORT: Final = 443


def find_port(url: httpx.URL) -> int:
    """Return the port of an http or https URL, by default the scheme's port."""
    if url.port:
        return url.port
    return HTTPS_PORT if url.scheme == "https" else HTTP_PORT


def is_here(host: str) -> bool:
    """Return whether a host is this machine or pod: one of its addresses, or the name localhost.

    Returns False for any other name, which is not resolved.
    """
    try:
        address = ipaddress.ip_address(host)
        is_ipv6 = isinstance(address, ipaddress.IPv6Address)
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        # Only an address of this machine can be bound. Binding a datagram socket neither needs a
        # free port nor listens.
        with socket.socket(family, socket.SOCK_DGRAM) as datagram_socket:
            datagram_socket.bind((host, 0))
    except (OSError, ValueError):
        return host == "localhost"
    return True


class Reply(Struct, frozen=True, kw_only=True):
    """A server's answer."""

    status: int
    text: str


class RequestConnection:
    """The connection of one request, which another thread can abandon.

    The object is httpcore's trace function for the request, which reports the connection's stream.
    It limits how much is read from that stream before the head of the answer is complete.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        """The connection's socket; None until the connection is open."""
        self._is_abandoned = False
        self._has_head = False

    def __call__(self, event: str, info: Mapping[str, Any]) -> None:
        """Note the socket; shut it down if the request was abandoned before the socket existed."""
        if event in _CONNECTED_EVENTS:
            stream = info["return_value"]
            self._socket = stream.get_extra_info("socket")
            stream.read = self._bound_head(stream.read)
            if self._is_abandoned:
                self.abandon()
        elif event == _HEAD_EVENT:
            self._has_head = True

    def _bound_head(self, read: Callable[..., bytes]) -> Callable[..., bytes]:
        """Return a stream's `read` with a bound.

        It raises RemoteProtocolError for an endless head.
        """
        head_bytes = 0

        def read_bounded(max_bytes: int, timeout: float | None = None) -> bytes:
            """Read as httpcore does; raise RemoteProtocolError if the head does not end."""
            nonlocal head_bytes
            # Without a bound, a server that never ends its head would fill the memory.
            if not self._has_head and head_bytes >= _MOST_HEAD_BYTES:
                raise httpcore.RemoteProtocolError("the head of the answer does not end")
            data = read(max_bytes, timeout)
            head_bytes += len(data)
            return data

        return read_bounded

    def abandon(self) -> None:
        """Shut the connection down, now or as soon as it is open.

        A read that blocks the request's thread then returns, and this thread closes the socket.
        """
        self._is_abandoned = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # The thread has closed the socket already.
                # This is not SSLSocket.shutdown, because that first drops the TLS state that the
                # thread uses.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class PageReader:
    """Fetches the page at `url`, an http or https URL, repeatedly, on its own thread.

    On the event loop, httpx would take a third more CPU, and it would still resolve names on a
    thread. The token in `bearer_token_file` is read for each page, because it may be rotated. It
    replaces the URL's user and password. `ca_file` replaces the default authorities. `max_bytes`
    limits the page, and `timeout_seconds` limits the whole request.
    """

    def __init__(
        self,
        *,
        url: str,
        timeout_seconds: float,
        max_bytes: int = 4 * 2**20,
        bearer_token_file: Path | None = None,
        ca_file: Path | None = None,
        headers: Mapping[str, str] = {},
    ) -> None:
        url_with_login = httpx.URL(url)
        # The login is sent as a header and removed from the URL here, so that no message or log
        # line can show it.
        self._url = url_with_login.copy_with(userinfo=b"")
        self._shown_url = str(failures.hide_secrets(url_with_login))
        self._timeout_seconds = timeout_seconds
        self._max_bytes = max_bytes
        self._token_file = bearer_token_file
        self._ca_file = ca_file
        self._headers = httpx.Headers(
            {"User-Agent": "vllm-headroom", "Accept": "text/plain", **headers}
        )
        if url_with_login.userinfo:
            login = f"{url_with_login.username}:{url_with_login.password}"
            self._headers["Authorization"] = f"Basic {b64encode(login.encode()).decode()}"
        # gzip would cost vLLM 1.1 ms of its event loop, and the daemon 0.2 ms.
        self._headers["Accept-Encoding"] = "identity"
        self._page_request = httpx.Request("GET", self._url, headers=self._headers)
        self._timeouts_seconds = {
            "read": timeout_seconds,
            "write": timeout_seconds,
            "pool": timeout_seconds,
            # Each address of the host gets half of the time, so that there is time for a second
            # address.
            "connect": timeout_seconds / 2,
        }
        self._worker = Worker[Any]("http")
        self._transport: httpx.HTTPTransport | None = None

    async def fetch(self) -> str | Failure:
        """Return the page, or a Failure, within `timeout_seconds`; never raise.

        The time includes connecting. Bytes that are not UTF-8 become U+FFFD. After a cancellation
        or timeout, the connection is dropped.
        """
        reply = await self._exchange(self._page_request, is_page=True)
        return reply if isinstance(reply, Failure) else reply.text

    async def send(
        self, method: str, path: str, body: Mapping[str, object] | None
    ) -> Reply | Failure:
        """Return the answer to a request, whatever its status; a Failure as in `fetch`.

        `path` is relative to the URL; "" is the URL itself. `body` is sent as JSON. If it is None,
        no body is sent.
        """
        request = httpx.Request(method, self._url.join(path), headers=self._headers, json=body)
        return await self._exchange(request, is_page=False)

    async def _exchange(self, request: httpx.Request, *, is_page: bool) -> Reply | Failure:
        """Send a request; return the reply, or the failure that an error means; never raise."""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._send(request, is_page=is_page)
        except failures.UnusableCredentials as error:
            return Failure(source=Source.ENGINE, reason=Reason.CREDENTIALS, message=str(error))
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            failure = failures.explain_no_answer(error, self._shown_url, self._timeout_seconds)
        if failure.reason is Reason.TLS:
            # The next fetch reads the CA file again, because the certificate may have been renewed.
            self._transport = None
        return failure

    async def close(self) -> None:
        """End the thread.

        A later fetch starts another thread.
        """
        self._worker.stop()
        self._worker = Worker("http")

    async def _send(self, request: httpx.Request, *, is_page: bool) -> Reply | Failure:
        """Send a request with the current token, and wait for its reply without a time limit.

        Raises UnusableCredentials, the errors of httpx, and TimeoutError while an earlier request
        is stuck. If the answer exceeds a bound, the reply is a Failure.
        """
        transport = await self._open_transport()
        if self._token_file is not None:
            trouble = f"{failures.name_token_file(self._token_file)} cannot be read"
            token = await self._read_file(partial(failures.read_token, self._token_file), trouble)
            request.headers["Authorization"] = f"Bearer {token}"
        connection = RequestConnection()
        # httpx limits each read, and not the whole request, so bytes that arrive slowly could
        # continue forever.
        request.extensions = {"timeout": self._timeouts_seconds, "trace": connection}
        reply: asyncio.Future[Reply | Failure] = self._worker.begin(
            partial(self._make_request, transport, request, is_page=is_page)
        )
        try:
            return await reply
        finally:
            # The thread still waits for the server, and would be stuck without this call.
            if reply.cancelled():
                connection.abandon()

    def _make_request(
        self, transport: httpx.HTTPTransport, request: httpx.Request, *, is_page: bool
    ) -> Reply | Failure:
        """Make the request on the thread; for a page, any status but 200 is a failure."""
        response = transport.handle_request(request)
        try:
            if is_page and response.status_code != HTTPStatus.OK:
                return failures.explain_status(response, self._shown_url)
            body = read_body(response, self._max_bytes)
        finally:
            response.close()
        if isinstance(body, Reason):
            return failures.explain_broken_body(body, self._shown_url, self._max_bytes)
        return Reply(status=response.status_code, text=body.decode(errors="replace"))

    async def _read_file(self, read: Callable[[], T], trouble: str) -> T:
        """Return what `read` returns on the thread; raise what it raises.

        If reading takes longer than _FILE_SECONDS, it raises UnusableCredentials with a message
        that begins with `trouble`. While an earlier call is stuck, it raises TimeoutError.
        """
        reading: asyncio.Future[T] = self._worker.begin(read)
        try:
            async with asyncio.timeout(_FILE_SECONDS):
                return await reading
        except TimeoutError:
            problem = f"{trouble} (no answer within {_FILE_SECONDS:g} s)"
            advice = "make it a file that can be read at once"
            raise failures.UnusableCredentials(f"{problem}: {advice}") from None

    async def _open_transport(self) -> httpx.HTTPTransport:
        """Return httpx's transport, opened at the first call.

        Without httpx's client there are no cookies, redirects or proxies. If the CA file cannot be
        used, it raises what `_read_file` raises.
        """
        if self._transport is None:
            verify: ssl.SSLContext | bool = False  # With http there is nothing to verify.
            if self._url.scheme == "https" and self._ca_file is None:
                verify = failures.load_trust(None)
            elif self._url.scheme == "https":
                trouble = f"the CA file {self._ca_file} cannot be used"
                load = partial(failures.load_trust, self._ca_file)
                verify = await self._read_file(load, trouble)
            # Each page gets a new connection, because vLLM closes a connection that is idle for
            # 5 s, which is the usual interval.
            limits = httpx.Limits(max_keepalive_connections=0)
            self._transport = httpx.HTTPTransport(verify=verify, trust_env=False, limits=limits)
        return self._transport


NO_ANSWER_REASONS: Final = frozenset({Reason.TIMEOUT, Reason.INCOMPLETE})
"""The reasons of a failure if the server accepts the connection but does not answer."""

SILENCES: Final = NO_ANSWER_REASONS | {Reason.UNREACHABLE}
"""The reasons of a failure if nothing answers at all."""

MOST_REQUESTS: Final = 10**6
"""A larger number of requests is not plausible, because no server has so many."""

NO_PATH_REASONS: Final = frozenset({Reason.NOT_FOUND, Reason.HTTP_STATUS})
"""The reasons of a failure if the server has no such path. vLLM has `is_sleeping` only in its
development mode.
"""


class _Load(Struct):
    """vLLM's answer at `/load`; it counts requests only with --enable-server-load-tracking."""

    server_load: float


class ServerRequest(Struct, frozen=True, kw_only=True):
    """The daemon's requests for other pages, which show whether the server runs."""

    health: PageReader
    """Reads the server's `health`. Each page has its own reader, because a late answer blocks the
    reader's thread.
    """
    models: PageReader
    """Reads the server's `v1/models`."""
    load: PageReader
    """Reads the server's `load`."""

    async def send(self) -> ServerReply:
        """Request the pages one after the other, and return their answers; never raise."""
        health = await self.health.send("GET", "", None)
        models = await self.models.send("GET", "", None)
        load = await self.load.send("GET", "", None)
        return ServerReply(answer=_judge_answers(health, models, load), requests=_read_load(load))

    async def close(self) -> None:
        """Close the connections."""
        for reader in (self.health, self.models, self.load):
            await reader.close()


def _judge_answers(health: Reply | Failure, *others: Reply | Failure) -> ServerAnswer:
    """Return what the answers to the health check and two other requests show."""
    if _is_ok(health):
        return ServerAnswer.HEALTHY
    if _reports_death(health, others):
        return ServerAnswer.UNHEALTHY
    # Another engine, or a proxy in front of it, may have no such path.
    if any(_is_ok(other) for other in others):
        return ServerAnswer.HEALTHY
    if all(_is_silence(answer) for answer in (health, *others)):
        return ServerAnswer.SILENT
    return ServerAnswer.UNCLEAR


def _is_ok(answer: Reply | Failure) -> bool:
    return not isinstance(answer, Failure) and answer.status == HTTPStatus.OK


def _is_silence(answer: Reply | Failure) -> bool:
    """Return whether nothing answers, or a proxy reports that nothing answers."""
    if isinstance(answer, Failure):
        return answer.reason in SILENCES
    return answer.status in {HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT}


def _reports_death(health: Reply | Failure, others: tuple[Reply | Failure, ...]) -> bool:
    """Return whether a health check reports that the engine has died.

    In this case vLLM answers 503, or 500 in older versions. If all other pages of the server are
    errors too, a status of 500 proves nothing.
    """
    if isinstance(health, Failure) or _is_silence(health):
        return False
    if health.status == HTTPStatus.SERVICE_UNAVAILABLE:
        return True
    # If every page fails, the error is that of a proxy and not of the engine.
    has_other_answer = any(
        not isinstance(other, Failure) and other.status < HTTPStatus.INTERNAL_SERVER_ERROR
        for other in others
    )
    return health.status >= HTTPStatus.INTERNAL_SERVER_ERROR and has_other_answer


def _read_load(load: Reply | Failure) -> float | None:
    """Return the requests in the server; None if it does not report them."""
    if isinstance(load, Failure) or load.status != HTTPStatus.OK:
        return None
    try:
        requests = msgspec.json.decode(load.text, type=_Load).server_load
    except (msgspec.DecodeError, RecursionError):
        return None
    return requests if 0 <= requests <= MOST_REQUESTS else None


class CanaryRequest(Struct, frozen=True, kw_only=True):
    """The daemon's request to complete one token."""

    health: PageReader
    """Reads the server's `health`."""
    sleep: PageReader
    """Reads the server's `is_sleeping`."""
    completion: PageReader
    """Sends requests to the server's `v1/completions`."""

    async def ask(self, model_name: str) -> bool | None:
        """Return whether the engine completes one token; never raise.

        Returns False if the server accepts the connection but does not answer, or answers with a
        status of 500 or more. Returns None if the outcome proves nothing: the engine sleeps, or the
        server refuses the request or the connection.
        """
        # A sleeping engine must get no request. The metrics page is not enough to know whether the
        # engine sleeps. It may be older than the sleep, and before vLLM 0.11.1 it does not report
        # sleep.
        for reader in (self.health, self.sleep):
            page = await reader.fetch()
            if isinstance(page, Failure):
                if page.reason not in NO_PATH_REASONS:
                    return _judge_failure(page)
            elif '"is_sleeping":true' in page.replace(" ", ""):
                return None
        body = {"model": model_name, "prompt": "1", "max_tokens": 1}
        answer = await self.completion.send("POST", "", body)
        if isinstance(answer, Failure):
            return _judge_failure(answer)
        if answer.status == HTTPStatus.OK:
            return True
        # With a status below 500, the server itself refuses the request, and the engine never gets
        # it.
        return False if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR else None

    async def close(self) -> None:
        """Close the connections."""
        for reader in (self.health, self.sleep, self.completion):
            await reader.close()


def _judge_failure(failure: Failure) -> bool | None:
    """Return False if the failure means that the engine does not answer; None otherwise."""
    return False if failure.reason in NO_ANSWER_REASONS else None
