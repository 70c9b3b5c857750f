"""The server under load: its address, its models and its requests."""

import asyncio
import base64
import json
import re
import socket
import ssl
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any, Final

import httpx
from msgspec import Struct

from vllm_headroom.inputs import parse_http_url
from vllm_headroom.scrape.http.failures import explain_no_answer, strip_advice
from vllm_headroom.scrape.http.reader import find_port, read_body
from vllm_headroom.vocabulary import Reason
from vllm_headroom.worker import Worker
from vllm_headroom_tools.openai import ListedModel, parse_first_model
from vllm_headroom_tools.trace import BadInput

LENGTHS: Final = re.compile(r"(\d{1,7})(?:\.\.(\d{1,7}))?", re.ASCII)


class Lengths(Struct, frozen=True, kw_only=True):
    """Whole numbers of tokens from `least` to `most`, each doubling as likely as the next: many short, few long."""

    least: int
    most: int

    def draw(self, chance: float) -> int:
        """Return the length at `chance`, a number from 0 to below 1."""
        return min(self.most, int(self.least * ((self.most + 1) / self.least) ** chance))

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"


def parse_lengths(text: str) -> Lengths:
    """Return the distribution of a text such as `512` or `256..2048`."""
    found = LENGTHS.fullmatch(text.strip())
    if found is None:
        raise ValueError
    least = int(found[1])
    most = int(found[2] or least)
    if not 1 <= least <= most:
        raise ValueError
    return Lengths(least=least, most=most)


def read_prompts(file: Path) -> tuple[str, ...]:
    """Return the prompts of a dataset: ShareGPT's JSON, JSON lines, or a text a line; raises BadInput."""
    try:
        content = file.read_bytes()
        entries = json.loads(content)
    except OSError as error:
        raise BadInput(f"--prompts {file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        entries = [_parse_line(line) for line in content.decode(errors="replace").splitlines()]
    found = (
        tuple(text for each in entries if (text := find_prompt(each)))
        if isinstance(entries, list)
        else ()
    )
    if not found:
        raise BadInput(
            f"--prompts {file}: has no prompt: needs ShareGPT's `conversations`, `prompt`, or lines of text"
        )
    return found


def _parse_line(line: str) -> object:
    with suppress(ValueError, RecursionError):
        return json.loads(line)
    return line.strip()


def find_prompt(entry: object) -> str:
    """Return what an entry of a dataset asks first, an empty text where it asks nothing."""
    if isinstance(entry, dict):
        said = next(
            (entry[key] for key in ("prompt", "conversations", "messages") if key in entry), ""
        )
        asked = said[0] if isinstance(said, list) and said else said
        entry = asked.get("value", asked.get("content")) if isinstance(asked, dict) else asked
    return entry if isinstance(entry, str) else ""


_TEXT: Final = (
    "the of and to in is it you that he was for on are with as his they be at one have this from or had by hot but"
    " some what there we can out other were all your when up use word how said an each she which do their time if will"
    " way about many then them would write like so these her long make thing see him two has look more day could go"
    " come did my sound no most number who over know water than call first people may down side been now find"
)
WORDS: Final = tuple(_TEXT.split())
"""Common enough that vocabularies have each, with the space before it, as one token: 1,000 of them are 1,000 tokens in
all of Mistral's, SentencePiece and Tekken (measured)."""

RING_WORDS: Final = 8192


class CompletionApi(StrEnum):
    """The API of a completion."""

    COMPLETIONS = "completions"
    CHAT = "chat"


def build_prompts(shared_ratio: float, random: Random) -> Callable[[int], str]:
    """Return what makes a prompt of so many words, each of which is about a token.

    Its first `shared_ratio` is the same in all, and the rest is in none before.
    """
    common, ring = random.choices(WORDS, k=RING_WORDS), random.choices(WORDS, k=RING_WORDS)

    def make(words: int) -> str:
        shared, rings = round(shared_ratio * words), words // RING_WORDS + 1
        first = random.choices(
            WORDS, k=min(words - shared, 5)
        )  # 10**10 beginnings, so none is in a cache
        begin = random.randrange(RING_WORDS)
        rest = (ring * (rings + 1))[begin : begin + words - shared - len(first)]
        return " ".join((*(common * rings)[:shared], *first, *rest))

    return make


MOST_PIXELS: Final = 2**24


def parse_image_size(text: str) -> tuple[int, int]:
    """Return width and height, in pixels, of a text such as `1280x720`; raises ValueError."""
    width, height = map(int, text.strip().lower().split("x"))
    if min(width, height) < 1 or width * height > MOST_PIXELS:
        raise ValueError
    return width, height


BLOCK_PIXELS: Final = 32


def draw_image(size: tuple[int, int], random: Random) -> bytes:
    """Return a PNG of coloured squares, unlike any before, so that no cache of the server has it."""
    (width, height), rows = size, b""
    for top in range(0, height, BLOCK_PIXELS):
        row = b"".join(random.randbytes(3) * BLOCK_PIXELS for _ in range(0, width, BLOCK_PIXELS))[
            : 3 * width
        ]
        rows += (b"\0" + row) * min(BLOCK_PIXELS, height - top)
    parts = (
        (b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows, 1)),
        (b"IEND", b""),
    )
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def build_request_body(
    api: CompletionApi, model: str, prompt: str, output_tokens: int, image: bytes | None = None
) -> bytes:
    """Return the body that asks for exactly so many tokens, streamed, with the server's own count of them at the end.

    `ignore_eos` is vLLM's: without it a model ends its answer when it likes. An image, in PNG, needs the chat API.
    """
    content: object = prompt
    if image is not None:
        url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        content = [
            {"type": "text", "text": prompt},
            {"type": "image_url", "image_url": {"url": url}},
        ]
    asked: dict[str, Any] = (
        {"prompt": prompt}
        if api is CompletionApi.COMPLETIONS
        else {"messages": [{"role": "user", "content": content}]}
    )
    how = {
        "model": model,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(how | asked, separators=(",", ":")).encode()


PATIENCE_SECONDS: Final = 15.0
"""For the first connection and for the list of models: a busy server's web side answers late."""

MOST_LIST_BYTES: Final = 2**20
"""Of the list of models, some 500 bytes each."""

PATHS: Final = {
    CompletionApi.COMPLETIONS: "/v1/completions",
    CompletionApi.CHAT: "/v1/chat/completions",
}


class Target(Struct, frozen=True, kw_only=True):
    """Where each request goes: one address of the host, the path and the headers, less Content-Length."""

    address: tuple[str, int]
    host: str
    path: str
    headers: tuple[tuple[str, str], ...]
    tls: ssl.SSLContext | None


def parse_base_url(text: str) -> httpx.URL:
    """Return an http or https URL without what OpenAI's clients write at its end (/v1); raises ValueError."""
    url = parse_http_url(text)
    if url.query or url.userinfo:
        raise ValueError
    return url.copy_with(path=url.path.rstrip("/").removesuffix("/v1"))


def join_path(url: httpx.URL, path: str) -> httpx.URL:
    """Return the URL of a path of the server."""
    return url.copy_with(path=url.path.rstrip("/") + path)


async def find_target(
    url: httpx.URL, api: CompletionApi, tls: ssl.SSLContext | None, bearer: str | None
) -> Target:
    """Return the first address of the host that takes a connection; raises BadInput where none does."""
    loop, port = asyncio.get_running_loop(), find_port(url)
    try:
        found = await loop.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BadInput(_describe_failure(error, url)) from error
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
        headers = [
            ("Host", url.netloc.decode()),
            ("User-Agent", "vllm-headroom"),
            ("Content-Type", "application/json"),
        ]
        headers += [("Authorization", f"Bearer {bearer}")] if bearer else []
        path = join_path(url, PATHS[api]).raw_path.decode()
        return Target(
            address=(host, port), host=url.host, path=path, headers=tuple(headers), tls=tls
        )
    raise BadInput(_describe_failure(problem, url))


def _describe_failure(error: Exception, url: httpx.URL) -> str:
    return f"{strip_advice(explain_no_answer(error, str(url), PATIENCE_SECONDS))}: check that vLLM serves there"


async def fetch_model(url: httpx.URL, target: Target) -> ListedModel:
    """Return the first model that the server lists; raises BadInput where it lists none."""
    where = join_path(url, "/v1/models")

    def read() -> tuple[int, bytearray | Reason]:
        with (
            httpx.Client(
                verify=target.tls or True, trust_env=False, timeout=PATIENCE_SECONDS
            ) as client,
            client.stream(
                "GET", where, headers=[*target.headers, ("Accept-Encoding", "identity")]
            ) as answer,
        ):
            return answer.status_code, read_body(answer, MOST_LIST_BYTES)

    try:
        status, body = await Worker[tuple[int, bytearray | Reason]]("models").begin(read)
    except (httpx.HTTPError, OSError) as error:
        raise BadInput(f"{_describe_failure(error, where)}, or name a --model") from error
    if status != httpx.codes.OK:
        raise BadInput(
            f"{where} answers {status}: name a --model, or an --engine-bearer-token-file if it asks for one"
        )
    model = None if isinstance(body, Reason) else parse_first_model(body)
    if model is None:
        raise BadInput(f"{where}: lists no model: name a --model")
    return model


class LoadOrder(Struct, frozen=True, kw_only=True):
    """The options of a load; None where not set. `seconds` are a step's, `shared_ratio` is of each prompt."""

    url: httpx.URL
    metrics_url: str | None
    api: CompletionApi
    model: str | None
    concurrency: int
    seconds: float
    grace_seconds: float
    timeout_seconds: float
    prompts: Path | None
    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_ratio: float
    image_size: tuple[int, int] | None
    most_requests: int | None
    requests_per_second: float | None
    bearer_token_file: Path | None
    ca_file: Path | None
    gpus: str | tuple[str, ...]
    probe_dir: Path | None
    trace: Path

    @property
    def page(self) -> httpx.URL:
        """Where the engine's page is."""
        return httpx.URL(self.metrics_url) if self.metrics_url else join_path(self.url, "/metrics")

    def __str__(self) -> str:
        shared = f", {self.shared_ratio:.0%} of them shared" if self.shared_ratio else ""
        asked = (
            f"of about {self.prompt_tokens} tokens{shared}"
            if self.prompts is None
            else f"of {self.prompts}"
        )
        image = (
            ""
            if self.image_size is None
            else " and an image of {}x{} pixels".format(*self.image_size)
        )
        return f"{self.api}, prompts {asked}{image}, answers of {self.output_tokens}"
