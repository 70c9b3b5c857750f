"""Fetch the engine's page over HTTP."""

import asyncio
import ipaddress
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import msgspec
from msgspec import Struct

from vllm_headroom.model import Failure, ServerReply
from vllm_headroom.scrape.http import failures
from vllm_headroom.scrape.http.transport import PageTransport, TooManyParts
from vllm_headroom.vocabulary import Reason, ServerAnswer, Source
from vllm_headroom.worker import Worker

T = TypeVar("T")

_FILE_SECONDS: Final = 1.0
"""The time limit for reading a token or CA file. Reading usually takes microseconds. A pipe without
a writer would take 5 s. A hung network volume would block forever.
"""


async def read_body(response: httpx.Response, max_bytes: int) -> bytearray | Reason:
    """Return the body of a streamed response, or the reason why it cannot be read.

    The reason is one of:
    - MALFORMED if the body is compressed.
    - TOO_LARGE if the body is larger than `max_bytes`.
    - OUT_OF_BOUNDS if the body arrives in too many parts.
    - INCOMPLETE if the connection closes before the whole body is received.
    """
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in {"", "identity"}:
        return Reason.MALFORMED
    body = bytearray()
    try:
        async for part in response.aiter_raw():
            body += part
            if len(body) > max_bytes:
                return Reason.TOO_LARGE
    except TooManyParts:
        return Reason.OUT_OF_BOUNDS
    except (httpx.ReadError, httpx.RemoteProtocolError):
        return Reason.INCOMPLETE
    return body


HTTP_PORT: Final = 80
HTTPS_PORT: Final = 443


def find_port(url: httpx.URL) -> int:
    """Return the port of an http or https URL, which defaults to the scheme's port."""
    if url.port:
        return url.port
    return HTTPS_PORT if url.scheme == "https" else HTTP_PORT


def is_here(host: str) -> bool:
    """Return whether a host is localhost or an address of this machine or pod.

    Returns False for any other name, without resolving it.
    """
    try:
        address = ipaddress.ip_address(host)
        is_ipv6 = isinstance(address, ipaddress.IPv6Address)
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        # A socket can be bound only to an address of this machine. A datagram socket with port 0
        # opens no listening port. Binding it succeeds regardless of the ports in use.
        with socket.socket(family, socket.SOCK_DGRAM) as datagram_socket:
            datagram_socket.bind((host, 0))
    except (OSError, ValueError):
        return host == "localhost"
    return True


class Reply(Struct, frozen=True, kw_only=True):
    """A server's response."""

    status: int
    text: str


class PageReader:
    """Repeatedly fetches the page at `url`, an http or https URL.

    Files are read and host names are resolved on a separate thread, because both operations may
    hang. The token in `bearer_token_file` replaces the URL's user and password. The token is read
    for each request, because tokens may be rotated. `ca_file` replaces the default authorities.
    `max_bytes` limits the size of the page. `timeout_seconds` limits the duration of the whole
    request. Nothing is sent while `is_gone` returns True. After the engine is gone, the address may
    already belong to another server.
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
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        url_with_login = httpx.URL(url)
        # The login is sent as a header and removed from the URL. The login therefore cannot appear
        # in a message or log line.
        self._url = url_with_login.copy_with(userinfo=b"")
        self._shown_url = str(failures.hide_secrets(url_with_login))
        self._timeout_seconds = timeout_seconds
        self._max_bytes = max_bytes
        self._token_file = bearer_token_file
        self._is_gone = is_gone
        self._ca_file = ca_file
        self._headers = httpx.Headers(
            {"User-Agent": "vllm-headroom", "Accept": "text/plain", **headers}
        )
        if url_with_login.userinfo:
            login = f"{url_with_login.username}:{url_with_login.password}"
            self._headers["Authorization"] = f"Basic {b64encode(login.encode()).decode()}"
        # Compressing with gzip would take 1.1 ms on vLLM's event loop. Decompressing would take
        # 0.2 ms in the daemon.
        self._headers["Accept-Encoding"] = "identity"
        self._page_request = httpx.Request("GET", self._url, headers=self._headers)
        # Connecting to one address may take half of the time. The other half remains for a second
        # address.
        self._timeouts_seconds = {"connect": timeout_seconds / 2}
        self._worker = Worker[Any]("http")
        self._transport: PageTransport | None = None

    async def fetch(self) -> str | Failure:
        """Return the page, or a Failure, within `timeout_seconds`; never raise.

        The time includes connecting. Invalid UTF-8 becomes U+FFFD. After a cancellation or timeout,
        the connection is dropped.
        """
        reply = await self._exchange(self._page_request, is_page=True)
        return reply if isinstance(reply, Failure) else reply.text

    async def send(
        self, method: str, path: str, body: Mapping[str, object] | None
    ) -> Reply | Failure:
        """Return the response to a request, whatever its status.

        `path` is relative to the URL; "" is the URL itself. `body` is sent as JSON, unless it is
        None. Returns a Failure if there is no response.
        """
        request = httpx.Request(method, self._url.join(path), headers=self._headers, json=body)
        return await self._exchange(request, is_page=False)

    async def _exchange(self, request: httpx.Request, *, is_page: bool) -> Reply | Failure:
        """Send a request, and return the reply or a failure; never raise."""
        if self._is_gone():
            problem = f"nothing is requested from {self._shown_url}: its processes have ended"
            return Failure(source=Source.ENGINE, reason=Reason.UNREACHABLE, message=problem)
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
        """Close the connection and end the thread; a later fetch starts new ones."""
        if self._transport is not None:
            await self._transport.aclose()
        self._worker.stop()
        self._worker = Worker("http")

    async def _send(self, request: httpx.Request, *, is_page: bool) -> Reply | Failure:
        """Send a request with the current token, and await its reply without time limit.

        For a page, any status other than 200 is a failure. Returns a Failure if the body cannot be
        read or exceeds a limit. Raises UnusableCredentials, TimeoutError while the thread is stuck,
        and httpx's errors.
        """
        transport = await self._open_transport()
        if self._token_file is not None:
            trouble = f"{failures.name_token_file(self._token_file)} cannot be read"
            token = await self._read_file(partial(failures.read_token, self._token_file), trouble)
            request.headers["Authorization"] = f"Bearer {token}"
        request.extensions = {"timeout": self._timeouts_seconds}
        response = await transport.handle_async_request(request)
        try:
            if is_page and response.status_code != HTTPStatus.OK:
                return failures.explain_status(response, self._shown_url)
            body = await read_body(response, self._max_bytes)
        finally:
            await response.aclose()
        if isinstance(body, Reason):
            return failures.explain_broken_body(body, self._shown_url, self._max_bytes)
        return Reply(status=response.status_code, text=body.decode(errors="replace"))

    async def _resolve(self, url: httpx.URL) -> list[tuple[str, int]]:
        """Return each IP address of a URL's host, along with the URL's port.

        Raises OSError or UnicodeError if the name cannot be resolved. Raises TimeoutError while the
        thread is stuck.
        """
        host = url.raw_host.decode("ascii")
        port = find_port(url)
        if _is_address(host):
            return [(host, port)]
        # The event loop's resolver is not used. A hung lookup would block one of the loop's few
        # threads.
        entries: list[tuple[Any, ...]] = await self._worker.begin(
            partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        )
        return [socket_address[:2] for *_, socket_address in entries]

    async def _read_file(self, read: Callable[[], T], trouble: str) -> T:
        """Run `read` on the thread, and return its result or raise its error.

        If reading takes longer than _FILE_SECONDS, raises UnusableCredentials with a message that
        begins with `trouble`. Raises TimeoutError while an earlier call is stuck.
        """
        reading: asyncio.Future[T] = self._worker.begin(read)
        try:
            async with asyncio.timeout(_FILE_SECONDS):
                return await reading
        except TimeoutError:
            problem = f"{trouble} (no answer within {_FILE_SECONDS:g} s)"
            advice = "make it a file that can be read at once"
            raise failures.UnusableCredentials(f"{problem}: {advice}") from None

    async def _open_transport(self) -> PageTransport:
        """Return the transport, which is opened on the first call.

        Raises the same errors as `_read_file` if the CA file cannot be used.
        """
        if self._transport is None:
            tls: ssl.SSLContext | None = None
            if self._url.scheme == "https" and self._ca_file is None:
                tls = failures.load_trust(None)
            elif self._url.scheme == "https":
                trouble = f"the CA file {self._ca_file} cannot be used"
                load = partial(failures.load_trust, self._ca_file)
                tls = await self._read_file(load, trouble)
            self._transport = PageTransport(self._resolve, tls)
        return self._transport


def _is_address(host: str) -> bool:
    """Return whether a host is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


NO_ANSWER_REASONS: Final = frozenset({Reason.TIMEOUT, Reason.INCOMPLETE})
"""The reasons reported if the server accepts the connection but does not respond."""

SILENCES: Final = NO_ANSWER_REASONS | {Reason.UNREACHABLE}
"""The reasons reported if nothing responds at all."""

MOST_REQUESTS: Final = 10**6
"""No server handles more requests than this, so a larger number is ignored."""

NO_PATH_REASONS: Final = frozenset({Reason.NOT_FOUND, Reason.HTTP_STATUS})
"""The reasons reported if the server does not have the requested path. In vLLM, `is_sleeping`
exists only in development mode.
"""


class _Load(Struct):
    """vLLM's response at `/load`; requests are counted only with --enable-server-load-tracking."""

    server_load: float


class ServerRequest(Struct, frozen=True, kw_only=True):
    """Tests the server by requesting pages other than the metrics page."""

    health: PageReader
    """Reads the server's `health`. Each page has its own reader, because a late response blocks the
    reader's thread.
    """
    models: PageReader
    """Reads the server's `v1/models`."""
    load: PageReader
    """Reads the server's `load`."""

    async def send(self) -> ServerReply:
        """Request the pages one by one, and return what their responses show; never raise."""
        health = await self.health.send("GET", "", None)
        models = await self.models.send("GET", "", None)
        load = await self.load.send("GET", "", None)
        return ServerReply(answer=_judge_answers(health, models, load), requests=_read_load(load))

    async def close(self) -> None:
        """Close the connections."""
        for reader in (self.health, self.models, self.load):
            await reader.close()


def _judge_answers(health: Reply | Failure, *others: Reply | Failure) -> ServerAnswer:
    """Determine the server's state from the responses to a health check and two other requests."""
    if _is_ok(health):
        return ServerAnswer.HEALTHY
    if _reports_death(health, others):
        return ServerAnswer.UNHEALTHY
    # An engine other than vLLM, or a proxy, may have no health path.
    if any(_is_ok(other) for other in others):
        return ServerAnswer.HEALTHY
    if all(_is_silence(answer) for answer in (health, *others)):
        return ServerAnswer.SILENT
    return ServerAnswer.UNCLEAR


def _is_ok(answer: Reply | Failure) -> bool:
    return not isinstance(answer, Failure) and answer.status == HTTPStatus.OK


def _is_silence(answer: Reply | Failure) -> bool:
    """Return whether there was no response, or a proxy reports that there was none."""
    if isinstance(answer, Failure):
        return answer.reason in SILENCES
    return answer.status in {HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT}


def _reports_death(health: Reply | Failure, others: tuple[Reply | Failure, ...]) -> bool:
    """Return whether a health check reports that the engine has died.

    After the engine has died, vLLM returns 503, or 500 in older versions. If all other pages return
    errors too, a status of 500 proves nothing.
    """
    if isinstance(health, Failure) or _is_silence(health):
        return False
    if health.status == HTTPStatus.SERVICE_UNAVAILABLE:
        return True
    # If every page fails, the error comes from a proxy and not from the engine.
    has_other_answer = any(
        not isinstance(other, Failure) and other.status < HTTPStatus.INTERNAL_SERVER_ERROR
        for other in others
    )
    return health.status >= HTTPStatus.INTERNAL_SERVER_ERROR and has_other_answer


def _read_load(load: Reply | Failure) -> float | None:
    """Return how many requests are in the server, or None if not reported."""
    if isinstance(load, Failure) or load.status != HTTPStatus.OK:
        return None
    try:
        requests = msgspec.json.decode(load.text, type=_Load).server_load
    except (msgspec.DecodeError, RecursionError):
        return None
    return requests if 0 <= requests <= MOST_REQUESTS else None


class CanaryRequest(Struct, frozen=True, kw_only=True):
    """The daemon's request for a completion of one token."""

    health: PageReader
    """Reads the server's `health`."""
    sleep: PageReader
    """Reads the server's `is_sleeping`."""
    completion: PageReader
    """Sends requests to the server's `v1/completions`."""

    async def ask(self, model_name: str) -> bool | None:
        """Return whether the engine completes one token; never raise.

        Returns False if the server accepts the connection but does not respond. Also returns False
        for a status of 500 or higher. Returns None if the outcome proves nothing:

        - The engine is asleep.
        - The server refuses the request or the connection.
        """
        # A sleeping engine must not get a request. The metrics page cannot rule out that the engine
        # is asleep. The page may be old, and before vLLM 0.11.1, it does not report sleep.
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
        # With a status below 500, the server itself refused the request. The engine never received
        # it.
        return False if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR else None

    async def close(self) -> None:
        """Close the connections."""
        for reader in (self.health, self.sleep, self.completion):
            await reader.close()


def _judge_failure(failure: Failure) -> bool | None:
    """Return False if the failure means that the engine does not respond, or None otherwise."""
    return False if failure.reason in NO_ANSWER_REASONS else None
