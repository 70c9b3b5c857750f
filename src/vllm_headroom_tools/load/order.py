"""A load order, which holds the values of the options."""

import re
from pathlib import Path
from typing import Final

import httpx
from msgspec import Struct

from vllm_headroom.inputs import parse_http_url
from vllm_headroom_tools.load.prompts import CompletionApi

MOST_PIXELS: Final = 2**24
"""Our choice: an image of 4096 by 4096 pixels."""

LENGTHS_TEXT: Final = re.compile(r"(\d{1,7})(?:\.\.(\d{1,7}))?", re.ASCII)


class Lengths(Struct, frozen=True, kw_only=True):
    """A log-uniform distribution of token counts, in which short lengths are more frequent.

    For example, 256 to 512 is as likely as 512 to 1024.
    """

    shortest: int
    longest: int

    def draw(self, chance: float) -> int:
        """Return the length for `chance`.

        `chance` is a random number of at least 0 and below 1.
        """
        length = int(self.shortest * ((self.longest + 1) / self.shortest) ** chance)
        return min(self.longest, length)

    def __str__(self) -> str:
        if self.shortest == self.longest:
            return str(self.shortest)
        return f"{self.shortest}..{self.longest}"


def parse_lengths(text: str) -> Lengths:
    """Parse a distribution such as `512` or `256..2048`; raise ValueError for any other text."""
    match = LENGTHS_TEXT.fullmatch(text.strip())
    if match is None:
        raise ValueError
    shortest = int(match[1])
    longest = int(match[2] or shortest)
    if not 1 <= shortest <= longest:
        raise ValueError
    return Lengths(shortest=shortest, longest=longest)


def parse_image_size(text: str) -> tuple[int, int]:
    """Parse a size such as `1280x720` into width and height in pixels.

    Raises ValueError for any other text, and for more than `MOST_PIXELS` pixels.
    """
    width, height = map(int, text.strip().lower().split("x"))
    if min(width, height) < 1 or width * height > MOST_PIXELS:
        raise ValueError
    return width, height


def parse_base_url(text: str) -> httpx.URL:
    """Parse an http or https URL, removing the trailing /v1 that OpenAI clients need.

    Raises ValueError for any other text. Also raises ValueError for a query, a user or a password.
    """
    url = parse_http_url(text)
    if url.query or url.userinfo:
        raise ValueError
    return url.copy_with(path=url.path.rstrip("/").removesuffix("/v1"))


def join_path(url: httpx.URL, path: str) -> httpx.URL:
    """Return the URL of a path relative to the server's base URL."""
    return url.copy_with(path=url.path.rstrip("/") + path)


class LoadOrder(Struct, frozen=True, kw_only=True):
    """The options of a load.

    An option without a default is None if it was not given.
    """

    url: httpx.URL
    metrics_url: str | None
    api: CompletionApi
    model: str | None
    concurrency: int
    seconds: float  # how long each step lasts
    grace_seconds: float
    timeout_seconds: float
    prompts: Path | None
    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_ratio: float  # The share of each prompt that all prompts have in common.
    image_size: tuple[int, int] | None  # The width and height in pixels.
    most_requests: int | None
    requests_per_second: float | None
    bearer_token_file: Path | None
    ca_file: Path | None
    gpus: str | tuple[str, ...]
    probe_dir: Path | None
    trace: Path
    most_first_token_seconds: float | None = None  # Limit for 99 % of requests, up to 100 % load.
    most_request_seconds: float | None = None  # The same limit for a whole request.

    @property
    def page_url(self) -> httpx.URL:
        """Return the URL of the engine's metrics page.

        The URL of the page is the configured one, or else the server's.
        """
        if self.metrics_url:
            return httpx.URL(self.metrics_url)
        return join_path(self.url, "/metrics")

    def __str__(self) -> str:
        if self.prompts is not None:
            prompts = f"of {self.prompts}"
        else:
            prompts = f"of about {self.prompt_tokens} tokens"
            if self.shared_ratio:
                prompts += f", {self.shared_ratio:.0%} of them shared"
        if self.image_size is not None:
            width, height = self.image_size
            prompts += f" and an image of {width}x{height} pixels"
        return f"{self.api}, prompts {prompts}, answers of {self.output_tokens}"
