"""The engine's page, fetched over HTTP."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final, TypeVar

import httpx

from vllm_headroom.model import Failure
from vllm_headroom.scrape.http.body import read_body
from vllm_headroom.scrape.http.credentials import Unusable, bearer_token, trust
from vllm_headroom.scrape.http.failures import broken_body, failure, no_answer, refusal, without_user
from vllm_headroom.vocabulary import Reason

_KEEP_ALIVE_SECONDS: Final = 4.0
"""vLLM's uvicorn closes a connection that idles 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE); a request sent then is lost."""

T = TypeVar("T")


def port_of(url: httpx.URL) -> int:
    """Return the port that an http or https URL means."""
    return url.port or (443 if url.scheme == "https" else 80)


def is_loopback(url: httpx.URL) -> bool:
    """Tell whether an http or https URL means a server on this machine, or in this pod."""
    try:
        return ipaddress.ip_address(url.host).is_loopback
    except ValueError:
        return url.host == "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server answers to a request that is not for a page, whatever its status."""

    status: int
    text: str


class PageReader:
    """Fetches the page at `url`, an http or https URL, over and over.

    The token in `bearer_token_file` is read for each page, so that it may be rotated, and stands in for the user and
    password of the URL. `ca_file` replaces the authorities trusted by default. `max_bytes` bounds the decoded page.
    """

    def __init__(
        self,
        *,
        url: str,
        timeout_seconds: float,
        max_bytes: int = 8 * 2**20,
        bearer_token_file: Path | None = None,
        ca_file: Path | None = None,
        headers: Mapping[str, str] = {},
    ) -> None:
        login = httpx.URL(url)
        self._url = without_user(login)
        self._auth = httpx.BasicAuth(login.username, login.password) if login.userinfo else None
        self._timeout_seconds = timeout_seconds
        self._max_bytes = max_bytes
        self._bearer_token_file = bearer_token_file
        self._ca_file = ca_file
        self._headers = httpx.Headers({"User-Agent": "vllm-headroom", "Accept": "text/plain", **headers})
        self._headers["Accept-Encoding"] = "gzip"
        self._client: httpx.AsyncClient | None = None

    async def fetch(self) -> str | Failure:
        """Return the page within `timeout_seconds`, connecting included, or why it did not come; never raise.

        Bytes that are not UTF-8 become U+FFFD. A fetch that is cancelled or timed out drops its connection.
        """
        return await self._in_time(self._page())

    async def post(self, body: Mapping[str, object]) -> Answer | Failure:
        """Send `body` as JSON to the URL and return what is answered to it; else like `fetch`."""
        return await self._in_time(self._answer(body))

    async def _in_time(self, request: Awaitable[T | Failure]) -> T | Failure:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await request
        except (TimeoutError, httpx.HTTPError, OSError) as error:
            problem = no_answer(error, self._url, self._timeout_seconds)
        if problem.reason is Reason.TLS:
            await self.close()  # the next fetch reads the CA file again: it may have been renewed
        return problem

    async def close(self) -> None:
        """Close the connection; a later fetch opens another."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _page(self) -> str | Failure:
        async with self._request("GET", None) as response:
            if isinstance(response, Failure):
                return response
            if response.status_code != HTTPStatus.OK:
                return refusal(response, self._url)
            return await self._text(response)

    async def _answer(self, body: Mapping[str, object]) -> Answer | Failure:
        async with self._request("POST", body) as response:
            if isinstance(response, Failure):
                return response
            text = await self._text(response)
        return text if isinstance(text, Failure) else Answer(status=response.status_code, text=text)

    @asynccontextmanager
    async def _request(self, method: str, body: Mapping[str, object] | None) -> AsyncIterator[httpx.Response | Failure]:
        client, headers = self._opened_client(), self._request_headers()
        if isinstance(client, Failure):
            yield client
        elif isinstance(headers, Failure):
            yield headers
        else:
            auth = None if self._bearer_token_file else self._auth
            async with client.stream(method, self._url, headers=headers, auth=auth, json=body) as response:
                yield response

    async def _text(self, response: httpx.Response) -> str | Failure:
        body = await read_body(response, self._max_bytes)
        if isinstance(body, Reason):
            return broken_body(body, self._url, self._max_bytes)
        return body.decode(errors="replace")

    def _opened_client(self) -> httpx.AsyncClient | Failure:
        if self._client is None:
            try:
                verify = trust(self._ca_file) if self._ca_file else True
            except Unusable as problem:
                return failure(Reason.CREDENTIALS, str(problem))
            self._client = httpx.AsyncClient(
                verify=verify,
                timeout=None,  # noqa: S113 - fetch bounds the whole, where httpx would bound each part
                trust_env=False,  # a sidecar talks to its neighbour; the environment's proxies are for the world
                limits=httpx.Limits(keepalive_expiry=_KEEP_ALIVE_SECONDS),
            )
        return self._client

    def _request_headers(self) -> httpx.Headers | Failure:
        if self._bearer_token_file is None:
            return self._headers
        try:
            token = bearer_token(self._bearer_token_file)
        except Unusable as problem:
            return failure(Reason.CREDENTIALS, str(problem))
        headers = self._headers.copy()
        headers["Authorization"] = f"Bearer {token}"
        return headers
