"""The address and the model of the server under load."""

import asyncio
import socket
import ssl
from typing import Final

import httpx
from msgspec import Struct

from vllm_headroom.scrape.http.failures import explain_no_answer, strip_advice
from vllm_headroom.scrape.http.reader import find_port, read_body
from vllm_headroom.vocabulary import Reason
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.load.order import join_path
from vllm_headroom_tools.load.prompts import PATHS, CompletionApi
from vllm_headroom_tools.openai import ListedModel, parse_first_model

FIRST_ANSWER_SECONDS: Final = 15.0
"""The timeout for the first connection and for the model list. It is long, because a busy server is
slow.
"""

MOST_LIST_BYTES: Final = 2**20
"""The size limit for the model list, which has about 500 bytes per model."""


class Target(Struct, frozen=True, kw_only=True):
    """The server, and the path to which each request is sent."""

    address: tuple[str, int]  # IP address and port
    host: str
    path: str
    headers: tuple[tuple[str, str], ...]  # without Content-Length
    tls: ssl.SSLContext | None


async def find_target(
    url: httpx.URL, api: CompletionApi, tls: ssl.SSLContext | None, bearer: str | None
) -> Target:
    """Return the target at the first of the host's addresses that accepts a connection.

    Raises BadInput if none of the addresses accepts a connection.
    """
    headers = [
        ("Host", url.netloc.decode()),
        ("User-Agent", "vllm-headroom"),
        ("Content-Type", "application/json"),
    ]
    if bearer:
        headers.append(("Authorization", f"Bearer {bearer}"))
    return Target(
        address=await _find_address(url, tls),
        host=url.host,
        path=join_path(url, PATHS[api]).raw_path.decode(),
        headers=tuple(headers),
        tls=tls,
    )


async def _find_address(url: httpx.URL, tls: ssl.SSLContext | None) -> tuple[str, int]:
    """Return the first IP address and port to accept a connection.

    Raises BadInput if none does.
    """
    loop = asyncio.get_running_loop()
    port = find_port(url)
    try:
        addresses = await loop.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BadInput(_describe_failure(error, url)) from error
    problem: Exception = TimeoutError()
    server_name = url.host if tls else None
    for *_, socket_address in addresses:
        host = str(socket_address[0])
        try:
            async with asyncio.timeout(FIRST_ANSWER_SECONDS):
                transport, _ = await loop.create_connection(
                    asyncio.Protocol, host, port, ssl=tls, server_hostname=server_name
                )
        except TimeoutError:
            continue
        except OSError as error:
            problem = error
            continue
        # The connection was only needed to find the address.
        transport.abort()
        return host, port
    raise BadInput(_describe_failure(problem, url))


def _describe_failure(error: Exception, url: httpx.URL) -> str:
    """Return why the server does not respond, with advice."""
    problem = strip_advice(explain_no_answer(error, str(url), FIRST_ANSWER_SECONDS))
    return f"{problem}: check that vLLM serves there"


async def fetch_model(url: httpx.URL, target: Target) -> ListedModel:
    """Return the first model that the server lists.

    Raises BadInput if the model list is empty or cannot be fetched.
    """
    models_url = join_path(url, "/v1/models")
    headers = [*target.headers, ("Accept-Encoding", "identity")]

    try:
        async with (
            httpx.AsyncClient(
                verify=target.tls or False, trust_env=False, timeout=FIRST_ANSWER_SECONDS
            ) as client,
            client.stream("GET", models_url, headers=headers) as answer,
        ):
            status = answer.status_code
            body = await read_body(answer, MOST_LIST_BYTES)
    except (httpx.HTTPError, OSError) as error:
        problem = _describe_failure(error, models_url)
        raise BadInput(f"{problem}, or name a --model") from error
    if status != httpx.codes.OK:
        advice = "name a --model, or an --engine-bearer-token-file if it asks for one"
        raise BadInput(f"{models_url} answers {status}: {advice}")
    model = None if isinstance(body, Reason) else parse_first_model(body)
    if model is None:
        raise BadInput(f"{models_url}: lists no model: name a --model")
    return model
