"""Fetch the engine's page over HTTP."""

import asyncio
import ipaddress
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable, Mapping
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
"""The event loop's own work while one page comes in: a page of 5,000 lines, each in a separate part, takes 0.2 s."""

_FILE_SECONDS: Final = 1.0
"""For a token or a CA file, which takes microseconds; a pipe without a writer takes 5 s, a network volume for ever."""

_TURN_PARTS: Final = 64
"""Parts after which the event loop does other work: a server can send thousands at once."""


async def read_body(response: httpx.Response, max_bytes: int) -> bytes | Reason:
    """Return the body of a response that is being streamed, holding at most `max_bytes` of it.

    Returns MALFORMED for a compressed body, TOO_LARGE, OUT_OF_BOUNDS for one whose parts cost too much CPU, or
    INCOMPLETE when it ends before its length.
    """
    if response.headers.get("Content-Encoding", "").strip().lower() not in {"", "identity"}:
        return Reason.MALFORMED
    body, parts, began = bytearray(), 0, 0.0
    try:
        async for part in response.aiter_raw():
            body += part
            parts += 1
            if len(body) > max_bytes:
                return Reason.TOO_LARGE
            if parts % _TURN_PARTS == 0:
                began = began or thread_time()
                if thread_time() - began > _MOST_CPU_SECONDS:
                    return Reason.OUT_OF_BOUNDS
                await asyncio.sleep(0)
    except (httpx.ReadError, httpx.RemoteProtocolError):
        return Reason.INCOMPLETE
    return bytes(body)


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


class PageReader:
    """Fetches the page at `url`, an http or https URL, repeatedly.

    The token in `bearer_token_file` is read for each page, since it may be rotated, and replaces user and password
    of the URL. `ca_file` replaces the default authorities. `max_bytes` limits the decoded page.
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
        self._headers = httpx.Headers({"User-Agent": "vllm-headroom", "Accept": "text/plain", **headers})
        if login.userinfo:
            user = b64encode(f"{login.username}:{login.password}".encode()).decode()
            self._headers["Authorization"] = f"Basic {user}"
        self._headers["Accept-Encoding"] = "identity"  # gzip would cost vLLM 1.1 ms of its event loop, and us 0.2
        self._headers["Host"] = login.netloc.decode("ascii").rpartition("@")[2]  # requests go to an address of it
        self._server_name = {"sni_hostname": login.host}
        self._question = httpx.Request("GET", self._url, headers=self._headers, extensions=self._server_name)
        self._files = Worker[Any]("credentials")
        self._resolver = Worker[list[Any]]("resolver")
        self._transport: httpx.AsyncHTTPTransport | None = None

    async def fetch(self) -> str | Failure:
        """Return the page within `timeout_seconds`, connecting included, or a failure; never raise.

        Bytes that are not UTF-8 become U+FFFD. When cancelled or timed out it drops its connection.
        """
        reply = await self._exchange(self._question, is_page=True)
        return reply if isinstance(reply, Failure) else reply.text

    async def send(self, method: str, path: str, body: Mapping[str, object] | None) -> Reply | Failure:
        """Send `body`, if any, as JSON to a path of the server, to the URL where empty; else like `fetch`."""
        how: dict[str, Any] = {"headers": self._headers, "json": body, "extensions": self._server_name}
        return await self._exchange(httpx.Request(method, self._url.join(path), **how), is_page=False)

    async def _exchange(self, request: httpx.Request, *, is_page: bool) -> Reply | Failure:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._send(request, is_page=is_page)
        except failures.UnusableCredentials as error:
            return Failure(source=Source.ENGINE, reason=Reason.CREDENTIALS, message=str(error))
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            problem = failures.explain_no_answer(error, self._shown, self._timeout_seconds)
        if problem.reason is Reason.TLS:
            await self.close()  # the next fetch reads the CA file again: it may have been renewed
        return problem

    async def close(self) -> None:
        """Close the connection; a later fetch opens another."""
        self._files.stop()
        self._resolver.stop()
        self._files, self._resolver = Worker("credentials"), Worker("resolver")
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.aclose()

    async def _send(self, request: httpx.Request, *, is_page: bool) -> Reply | Failure:
        transport = await self._open_transport()
        if (token_file := self._token_file) is not None:
            trouble = f"the token file {token_file} cannot be read"
            token = await self._read_file(lambda: failures.read_token(token_file), trouble)
            request.headers["Authorization"] = f"Bearer {token}"
        response = await self._connect(transport, request)
        try:
            if is_page and response.status_code != HTTPStatus.OK:
                return failures.explain_status(response, self._shown)
            body = await read_body(response, self._max_bytes)
        finally:
            await response.aclose()
        if isinstance(body, Reason):
            return failures.explain_broken_body(body, self._shown, self._max_bytes)
        return Reply(status=response.status_code, text=body.decode(errors="replace"))

    async def _connect(self, transport: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        """Send the request to the first address of its host that accepts a connection."""
        problem: Exception = OSError("the host has no address")
        for address in await self._resolve():
            if request.url.host != address:
                request.url = request.url.copy_with(host=address)
            try:
                return await transport.handle_async_request(request)
            except httpx.ConnectError as error:
                problem = error
        raise problem

    async def _resolve(self) -> list[str]:
        """Return the addresses of the host, resolved on a thread of ours: uvloop exits when it can start none."""
        try:
            return [str(ipaddress.ip_address(self._url.host))]
        except ValueError:
            # bytes: a str would be encoded by a codec that refuses names the resolver has to refuse
            host, port = self._url.raw_host, find_port(self._url)
        try:
            found = await self._resolver.begin(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except TimeoutError as error:  # an abandoned query has not returned
            raise httpx.ConnectTimeout("the resolver hangs") from error
        return [str(address[0]) for *_, address in found]

    async def _read_file(self, read: Callable[[], T], trouble: str) -> T:
        """Return what `read` returns on the thread; raise UnusableCredentials."""
        try:
            found: T = await self._files.call(read, _FILE_SECONDS)
        except TimeoutError:
            problem = f"{trouble} (no answer within {_FILE_SECONDS:g} s): make it a file that can be read at once"
            raise failures.UnusableCredentials(problem) from None
        return found

    async def _open_transport(self) -> httpx.AsyncHTTPTransport:
        """Return httpx's connections without its client: no cookies, redirects or proxy; one for each page."""
        if self._transport is None:
            trust: ssl.SSLContext | bool = False
            if self._url.scheme == "https" and self._ca_file is None:
                trust = httpx.create_ssl_context(trust_env=False)
            elif self._url.scheme == "https":
                trouble = f"the CA file {self._ca_file} cannot be used"
                trust = await self._read_file(lambda: failures.load_trust(self._ca_file), trouble)
            new = httpx.Limits(max_keepalive_connections=0)  # vLLM closes what idles 5 s, the usual interval
            self._transport = httpx.AsyncHTTPTransport(verify=trust, trust_env=False, limits=new)
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
        answer = await self.completion.send("POST", "", {"model": model_name, "prompt": "1", "max_tokens": 1})
        if isinstance(answer, Failure):
            return False if answer.reason in SILENT else None
        if answer.status == HTTPStatus.OK:
            return True
        return False if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR else None

    async def close(self) -> None:
        """Close the connections."""
        for reader in (self.health, self.sleep, self.completion):
            await reader.close()
