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

import httpx
from msgspec import Struct

from vllm_headroom.model import Failure
from vllm_headroom.scrape.http import failures
from vllm_headroom.vocabulary import Reason, Source
from vllm_headroom.worker import Worker

T = TypeVar("T")

_MOST_CPU_SECONDS: Final = 0.5
"""The thread's work while one page comes in: a page of 5,000 lines, each in a separate part, takes 0.2 s."""

_FILE_SECONDS: Final = 1.0
"""For a token or a CA file, which takes microseconds; a pipe without a writer takes 5 s, a network volume for ever."""

_CHECKED_PARTS: Final = 64
"""Parts after which that work is measured again."""

_CONNECTED: Final = frozenset({"connection.connect_tcp.complete", "connection.start_tls.complete"})


def read_body(response: httpx.Response, max_bytes: int) -> bytearray | Reason:
    """Return the body of a response that is being streamed, holding at most `max_bytes` of it.

    Returns MALFORMED for a compressed body, TOO_LARGE, OUT_OF_BOUNDS for one whose parts cost too much CPU, or
    INCOMPLETE when it ends before its length.
    """
    if response.headers.get("Content-Encoding", "").strip().lower() not in {"", "identity"}:
        return Reason.MALFORMED
    body, began = bytearray(), thread_time()
    try:
        for count, part in enumerate(response.iter_raw(), 1):
            body += part
            if len(body) > max_bytes:
                return Reason.TOO_LARGE
            if count % _CHECKED_PARTS == 0 and thread_time() - began > _MOST_CPU_SECONDS:
                return Reason.OUT_OF_BOUNDS
    except (httpx.ReadError, httpx.RemoteProtocolError):
        return Reason.INCOMPLETE
    return body


def find_port(url: httpx.URL) -> int:
    """Return the port that an http or https URL means."""
    return url.port or (443 if url.scheme == "https" else 80)


def is_here(host: str) -> bool:
    """Return whether an address, or localhost, is this machine's or pod's; other names are not resolved."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET  # noqa: PLR2004 - IPv6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except (OSError, ValueError):
        return host == "localhost"
    return True


class Reply(Struct, frozen=True, kw_only=True):
    """A server's answer."""

    status: int
    text: str


class _Line:
    """The connection of one request, as httpcore's trace shows it, to end it from outside its thread."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._is_cut = False

    def __call__(self, event: str, info: Mapping[str, Any]) -> None:
        """Note the socket; cut it where the request was given up before."""
        if event in _CONNECTED:
            self._socket = info["return_value"].get_extra_info("socket")
            if self._is_cut:
                self.cut()

    def cut(self) -> None:
        """End the connection: a read from it returns."""
        self._is_cut = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is closed
                socket.socket.shutdown(
                    self._socket, socket.SHUT_RDWR
                )  # TLS would first drop what the thread uses


class PageReader:
    """Fetches the page at `url`, an http or https URL, repeatedly, on a thread.

    On the event loop httpx takes a third more CPU, and a name would be resolved on another thread all the same. The
    token in `bearer_token_file` is read for each page, since it may be rotated, and replaces user and password of the
    URL. `ca_file` replaces the default authorities. `max_bytes` limits the decoded page.
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
        login = httpx.URL(url)
        self._url = login.copy_with(userinfo=b"")
        self._shown = str(failures.hide_secrets(login))
        self._timeout_seconds = timeout_seconds
        self._max_bytes = max_bytes
        self._token_file = bearer_token_file
        self._ca_file = ca_file
        self._headers = httpx.Headers(
            {"User-Agent": "vllm-headroom", "Accept": "text/plain", **headers}
        )
        if login.userinfo:
            user = b64encode(f"{login.username}:{login.password}".encode()).decode()
            self._headers["Authorization"] = f"Basic {user}"
        self._headers["Accept-Encoding"] = (
            "identity"  # gzip would cost vLLM 1.1 ms of its event loop, and us 0.2
        )
        self._question = httpx.Request("GET", self._url, headers=self._headers)
        self._waits = dict.fromkeys(("read", "write", "pool"), timeout_seconds)
        self._waits["connect"] = (
            timeout_seconds / 2
        )  # to each address, so that a second one gets its turn
        self._worker = Worker[Any]("http")
        self._transport: httpx.HTTPTransport | None = None

    async def fetch(self) -> str | Failure:
        """Return the page within `timeout_seconds`, connecting included, or a failure; never raise.

        Bytes that are not UTF-8 become U+FFFD. When cancelled or timed out it drops its connection.
        """
        reply = await self._exchange(self._question, is_page=True)
        return reply if isinstance(reply, Failure) else reply.text

    async def send(
        self, method: str, path: str, body: Mapping[str, object] | None
    ) -> Reply | Failure:
        """Send `body`, if any, as JSON to a path of the server, to the URL where empty; else like `fetch`."""
        request = httpx.Request(method, self._url.join(path), headers=self._headers, json=body)
        return await self._exchange(request, is_page=False)

    async def _exchange(self, request: httpx.Request, *, is_page: bool) -> Reply | Failure:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._send(request, is_page=is_page)
        except failures.UnusableCredentials as error:
            return Failure(source=Source.ENGINE, reason=Reason.CREDENTIALS, message=str(error))
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            problem = failures.explain_no_answer(error, self._shown, self._timeout_seconds)
        if problem.reason is Reason.TLS:
            self._transport = (
                None  # the next fetch reads the CA file again: it may have been renewed
            )
        return problem

    async def close(self) -> None:
        """End the thread; a later fetch starts another."""
        self._worker.stop()
        self._worker = Worker("http")

    async def _send(self, request: httpx.Request, *, is_page: bool) -> Reply | Failure:
        transport = await self._open_transport()
        if (token_file := self._token_file) is not None:
            trouble = f"the token file {token_file} cannot be read"
            token = await self._read_file(lambda: failures.read_token(token_file), trouble)
            request.headers["Authorization"] = f"Bearer {token}"
        line = _Line()
        request.extensions = {"timeout": self._waits, "trace": line}
        reply = self._worker.begin(partial(self._ask, transport, request, is_page=is_page))
        try:
            answer: Reply | Failure = await reply
        finally:
            if reply.cancelled():
                line.cut()
        return answer

    def _ask(
        self, transport: httpx.HTTPTransport, request: httpx.Request, *, is_page: bool
    ) -> Reply | Failure:
        response = transport.handle_request(request)
        try:
            if is_page and response.status_code != HTTPStatus.OK:
                return failures.explain_status(response, self._shown)
            body = read_body(response, self._max_bytes)
        finally:
            response.close()
        if isinstance(body, Reason):
            return failures.explain_broken_body(body, self._shown, self._max_bytes)
        return Reply(status=response.status_code, text=body.decode(errors="replace"))

    async def _read_file(self, read: Callable[[], T], trouble: str) -> T:
        """Return what `read` returns on the thread; raise UnusableCredentials, TimeoutError if that is busy."""
        reading: asyncio.Future[T] = self._worker.begin(read)
        try:
            async with asyncio.timeout(_FILE_SECONDS):
                return await reading
        except TimeoutError:
            problem = f"{trouble} (no answer within {_FILE_SECONDS:g} s): make it a file that can be read at once"
            raise failures.UnusableCredentials(problem) from None

    async def _open_transport(self) -> httpx.HTTPTransport:
        """Return httpx's connections without its client: no cookies, redirects or proxy; one for each page."""
        if self._transport is None:
            trust: ssl.SSLContext | bool = self._url.scheme == "https"
            if trust and self._ca_file is not None:
                trouble = f"the CA file {self._ca_file} cannot be used"
                trust = await self._read_file(lambda: failures.load_trust(self._ca_file), trouble)
            new = httpx.Limits(
                max_keepalive_connections=0
            )  # vLLM closes what idles 5 s, the usual interval
            self._transport = httpx.HTTPTransport(verify=trust, trust_env=False, limits=new)
        return self._transport


SILENT: Final = frozenset({Reason.TIMEOUT, Reason.INCOMPLETE})
NOT_SERVED: Final = frozenset({Reason.NOT_FOUND, Reason.HTTP_STATUS})
"""Answers of a server without the path; vLLM has `is_sleeping` in its development mode only."""


class CanaryRequest(Struct, frozen=True, kw_only=True):
    """The daemon's request for one token, with readers of the server's `health`, `is_sleeping` and `v1/completions`."""

    health: PageReader
    sleep: PageReader
    completion: PageReader

    async def ask(self, model_name: str) -> bool | None:
        """Return whether the engine completes one token; None where that is unknown; never raise.

        A sleeping engine gets no request: its page may be older than its sleep or, before vLLM 0.11.1, not report it.
        """
        for reader in (self.health, self.sleep):
            page = await reader.fetch()
            if isinstance(page, Failure) and page.reason not in NOT_SERVED:
                return False if page.reason in SILENT else None
            if isinstance(page, str) and '"is_sleeping":true' in page.replace(" ", ""):
                return None
        answer = await self.completion.send(
            "POST", "", {"model": model_name, "prompt": "1", "max_tokens": 1}
        )
        if isinstance(answer, Failure):
            return False if answer.reason in SILENT else None
        if answer.status == HTTPStatus.OK:
            return True
        return False if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR else None

    async def close(self) -> None:
        """Close the connections."""
        for reader in (self.health, self.sleep, self.completion):
            await reader.close()
