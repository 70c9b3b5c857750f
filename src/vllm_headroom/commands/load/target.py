"""Where the load goes: the address that the user named, found and asked for its models."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Final

import httpx
from msgspec import Struct

from vllm_headroom.commands.load.prompts import Api
from vllm_headroom.config.kinds import http_url
from vllm_headroom.parse.openai import Model, first_model
from vllm_headroom.scrape.http.failures import no_answer, without_advice
from vllm_headroom.scrape.http.reader import port_of, read_body
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.vocabulary import Reason

PATIENCE_SECONDS: Final = 15.0
"""For the first connection and for the list of models: a busy server's web side answers late."""

MOST_LIST_BYTES: Final = 2**20
"""Of the list of models, some 500 bytes each."""

PATHS: Final = {Api.COMPLETIONS: "/v1/completions", Api.CHAT: "/v1/chat/completions"}
Address = tuple[str, int]


class Target(Struct, frozen=True, kw_only=True):
    """Where each request goes: one address of the host, the path and the headers, less Content-Length."""

    address: Address
    host: str
    path: str
    headers: tuple[tuple[str, str], ...]
    tls: ssl.SSLContext | None


def base_url(text: str) -> httpx.URL:
    """Return an http or https URL without what OpenAI's clients write at its end (/v1); raises ValueError."""
    url = http_url(text)
    if url.query or url.userinfo:
        raise ValueError
    return url.copy_with(path=url.path.rstrip("/").removesuffix("/v1"))


def within(url: httpx.URL, path: str) -> httpx.URL:
    """Return the URL of a path of the server."""
    return url.copy_with(path=url.path.rstrip("/") + path)


async def find(url: httpx.URL, api: Api, tls: ssl.SSLContext | None, bearer: str | None) -> Target:
    """Return the first address of the host that takes a connection; raises BadInput where none does."""
    loop, port = asyncio.get_running_loop(), port_of(url)
    try:
        found = await loop.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BadInput(_no_answer(error, url)) from error
    problem: Exception = TimeoutError()
    for host in [str(place[0]) for *_, place in found]:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                transport, _ = await loop.create_connection(
                    asyncio.Protocol, host, port, ssl=tls, server_hostname=url.host if tls else None
                )
        except TimeoutError:
            continue
        except OSError as error:
            problem = error
            continue
        transport.abort()
        headers = [("Host", url.netloc.decode()), ("User-Agent", "vllm-headroom"), ("Content-Type", "application/json")]
        headers += [("Authorization", f"Bearer {bearer}")] if bearer else []
        path = within(url, PATHS[api]).raw_path.decode()
        return Target(address=(host, port), host=url.host, path=path, headers=tuple(headers), tls=tls)
    raise BadInput(_no_answer(problem, url))


def _no_answer(error: Exception, url: httpx.URL) -> str:
    return f"{without_advice(no_answer(error, str(url), PATIENCE_SECONDS))}: check that vLLM serves there"


async def offered_model(url: httpx.URL, target: Target) -> Model:
    """Return the first model that the server lists, asked as the target is; raises BadInput where it lists none."""
    where = within(url, "/v1/models")
    try:
        async with (
            httpx.AsyncClient(verify=target.tls or True, trust_env=False, timeout=PATIENCE_SECONDS) as client,
            client.stream("GET", where, headers=[*target.headers, ("Accept-Encoding", "identity")]) as answer,
        ):
            body = await read_body(answer, MOST_LIST_BYTES)
    except httpx.HTTPError as error:
        raise BadInput(f"{_no_answer(error, where)}, or name a --model") from error
    if answer.status_code != httpx.codes.OK:
        raise BadInput(
            f"{where} answers {answer.status_code}: name a --model, or an --engine-bearer-token-file if it asks for one"
        )
    model = None if isinstance(body, Reason) else first_model(body)
    if model is None:
        raise BadInput(f"{where}: lists no model: name a --model")
    return model
