"""What an operator writes: text → value, or ValueError."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import httpx

LAST_PORT: Final = 65535
GPU: Final = re.compile(r"0|[1-9]\d*|(?:GPU|MIG)-[0-9A-Za-z/-]+", re.ASCII)


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
