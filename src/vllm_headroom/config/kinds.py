"""The kinds of values that options take: how each is read, and what a refusal says is accepted."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec import Struct

from vllm_headroom.units import parse_duration, parse_share, parse_size, parse_vllm_number

if TYPE_CHECKING:
    import httpx

LAST_PORT: Final = 65535
GPU: Final = re.compile(r"0|[1-9]\d*|(?:GPU|MIG)-[0-9A-Za-z/-]+", re.ASCII)

T = TypeVar("T")
Number = TypeVar("Number", int, float)
MOST: Final = 2**53
WHOLE: Final = re.compile(r"\d{1,16}", re.ASCII)
LONGEST_SHOWN: Final = 80
"""Characters of a refused value that a line shows."""


def http_url(value: str) -> httpx.URL:
    """Return an http or https URL."""
    import httpx  # noqa: PLC0415 - it decides what it can fetch, but --help need not wait for it

    try:
        url = httpx.URL(value)
    except httpx.InvalidURL as error:
        raise ValueError from error
    if url.scheme not in {"http", "https"} or not url.host or re.search(r"\s", value):
        raise ValueError
    if url.port is not None and not 1 <= url.port <= LAST_PORT:
        raise ValueError
    return url


def metrics_url(value: str) -> str:
    """Return an http or https URL, with /metrics where it has no path."""
    url = http_url(value)
    return str(url.copy_with(path="/metrics")) if url.path == "/" else value


def gpu_names(value: object) -> object:
    """Return `auto`, `all`, or the tuple of indices and UUIDs of a list or a text with commas."""
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(value, str) and value.lower() in {"auto", "all"}:
        return value.lower()
    if names in (["auto"], ["all"]):
        return names[0]
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError
    stripped = tuple(name.strip() for name in names)
    if not all(GPU.fullmatch(name) for name in stripped):
        raise ValueError
    return stripped


def redacted(url: str) -> str:
    """Return the URL, or what was meant to be one, with stars for its user and password, and for its query.

    Everything before the last @ goes, so that a password that was not percent-encoded goes as well. Where an @ follows
    a question mark, which is part of what cannot be told, and all goes.
    """
    place, mark, query = url.partition("?")
    if "@" in query:
        return re.sub(r"^(https?://)?.*", r"\1***", url, flags=re.DOTALL | re.IGNORECASE)
    shown = re.sub(r"^(https?://)?.*@", r"\1***@", place, flags=re.DOTALL | re.IGNORECASE)
    return f"{shown}?***" if mark else shown


def shown(value: object) -> str:
    """Return a value for the line that refuses it."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def shown_url(value: object) -> str:
    """Return a URL for the line that refuses it, without user and password."""
    return shown(redacted(value)) if isinstance(value, str) else "no text"


class Value(Struct, Generic[T], frozen=True, kw_only=True):
    """How what is given becomes a value: `read` raises ValueError for what is not accepted.

    It is asked of what is no text, as YAML's lists and mappings, only where that may be given.
    """

    read: Callable[[Any], T]
    accepts: str
    shown: Callable[[object], str] = shown
    only_text: bool = True

    def __call__(self, given: Any) -> T:  # noqa: ANN401 - a text, or what YAML holds
        """Return the value, as argparse asks for it."""
        if self.only_text and not isinstance(given, str):
            raise ValueError
        return self.read(given)


def _file(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError
    return Path(text)


def bounded(read: Callable[[str], Number], low: float, high: float) -> Callable[[str], Number]:
    """Return what reads a number from `low` to `high`, and refuses any other."""

    def checked(text: str) -> Number:
        value = read(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return checked


def above_zero(read: Callable[[str], float]) -> Callable[[str], float]:
    """Return what reads a number above 0, and refuses any other."""
    return bounded(read, 5e-324, 1.7e308)


def _whole(text: str) -> int:
    if not WHOLE.fullmatch(text):
        raise ValueError
    return int(text)


ANYTHING: Final[Value[Any]] = Value(read=lambda given: given, accepts="a text", only_text=False)
FILE: Final = Value(read=_file, accepts="the path of a file")
FOLDER: Final = Value(read=_file, accepts="the path of a directory")
TRACE: Final = Value(read=lambda text: str(_file(text)), accepts="the path of a trace, or - for standard input")
RATIO: Final = Value(read=above_zero(bounded(float, 0, 1)), accepts="a ratio above 0, at most 1")
SHARE: Final = Value(read=bounded(parse_share, 0, 1), accepts="a share such as 5% or 0.05, at most 100%")
DURATION: Final = Value(read=above_zero(parse_duration), accepts="a duration above 0 such as 90s, 5m or 1h")
NUMBER: Final = Value(read=above_zero(float), accepts="a number above 0")
GPUS: Final = Value(read=gpu_names, accepts="auto, all, or GPU indices or UUIDs separated by commas", only_text=False)


def size(example: str) -> Value[int]:
    """Return the kind of a size in bytes."""
    return Value(read=parse_size, accepts=f"a size such as {example}, or a number of bytes from 1 MiB on")


def whole(low: int = 1, high: int = MOST) -> Value[int]:
    """Return the kind of a whole number from `low` to `high`."""
    most = f" to {high}" if high < MOST else " on"
    return Value(read=bounded(_whole, low, high), accepts=f"a whole number from {low}{most}")


def tokens(high: int = MOST) -> Value[int]:
    """Return the kind of a number of tokens, as vLLM's options take it."""
    return Value(
        read=bounded(parse_vllm_number, 1, high),
        accepts=f"a whole number from 1 to {high}, such as 32768, 32k (32,000) or 32K (32,768)",
    )


def choice(names: Sequence[str]) -> Value[str]:
    """Return the kind of a name out of several."""

    def read(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return Value(read=read, accepts=f"{', '.join(names[:-1])} or {names[-1]}")


def in_any_case(kind: Value[str]) -> Value[str]:
    """Return the kind of the same names, be they in capitals."""
    return Value(read=lambda text: kind.read(text.lower()), accepts=kind.accepts)


def url(example: str) -> Value[httpx.URL]:
    """Return the kind of an http or https URL."""
    return Value(read=http_url, accepts=f"an http or https URL such as {example}", shown=shown_url)


def page_url(example: str) -> Value[str]:
    """Return the kind of the URL of a page of metrics."""
    return Value(read=metrics_url, accepts=f"an http or https URL such as {example}", shown=shown_url)
