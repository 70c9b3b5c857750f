"""What an operator writes as a setting or an option: URLs, paths and GPUs, and how a refusal shows it."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_headroom.units import RefusedError

if TYPE_CHECKING:
    import httpx

NO_SCHEME: Final = re.compile(r"[\w.-]+:\d+(?:/[\w./-]*)?", re.ASCII)
CLOSED: Final = re.compile(r"[\w-]+(?:, [\w-]+)* or [\w-]+")
"""What is accepted where that is one of a few names."""
GPU: Final = re.compile(r"0|[1-9]\d*|(?:GPU|MIG)-[0-9A-Za-z/-]+", re.ASCII)
HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
OWN_HEADERS: Final = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "te",
        "transfer-encoding",
    }
)
"""What the sidecar sets itself, or what would change how its requests are framed."""
HEADER_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?")
"""RFC 9110, 5.1 and 5.5, without the bytes beyond ASCII whose meaning is not defined."""
HOST: Final = re.compile(r"[\w.-]*|[\dA-Fa-f]*:[\dA-Fa-f]*:[\dA-Fa-f:.]*(?:%[\w.-]+)?", re.ASCII)
"""A name, an IPv4 address, or an IPv6 address with its zone."""
HOST_AND_PORT: Final = re.compile(r"(?:[^:]*|\[.*\]):\d+", re.ASCII)
WHOLE: Final = re.compile(r"\d{1,16}", re.ASCII)
LAST_PORT: Final = 65535
LONGEST_SHOWN: Final = 80
"""Characters of a refused value that a line shows."""


def parse_http_url(text: str) -> httpx.URL:
    """Return an http or https URL."""
    import httpx  # noqa: PLC0415 - it decides what it can fetch, but --help need not wait for it

    if NO_SCHEME.fullmatch(text):
        raise RefusedError(f"did you mean http://{text}?")
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ValueError from error
    if url.scheme not in {"http", "https"} or not url.host or re.search(r"\s", text):
        raise ValueError
    if url.port is not None and not 1 <= url.port <= LAST_PORT:
        raise ValueError
    return url


def parse_metrics_url(text: str) -> str:
    """Return an http or https URL, with /metrics where it has no path."""
    url = parse_http_url(text)
    return str(url.copy_with(path="/metrics")) if url.path == "/" else text


def parse_path(text: str) -> Path:
    """Return a path that a file can have."""
    if not text or "\0" in text:
        raise ValueError
    if text.startswith("~"):
        raise RefusedError("~ is not expanded here: write the whole path")
    return Path(text)


def parse_host(text: str) -> str:
    """Return the address or the name to listen on."""
    if HOST_AND_PORT.fullmatch(text):
        raise RefusedError("set the port with listen_port")
    return match(HOST, text)


def parse_number(text: str) -> float:
    """Return a number; Python takes 1_0 for 10 as well."""
    if "_" in text:
        raise ValueError
    return float(text)


def parse_whole(text: str) -> int:
    """Return a whole number that is written in digits."""
    return int(match(WHOLE, text))


def parse_gpus(given: object) -> object:
    """Return `auto`, `all`, or the tuple of indices and UUIDs of a list or a text with commas."""
    names = given.split(",") if isinstance(given, str) else given
    if isinstance(given, str) and given.lower() in {"auto", "all"}:
        return given.lower()
    if names in (["auto"], ["all"]):
        return names[0]
    if (
        not isinstance(names, list | tuple)
        or not names
        or not all(isinstance(name, str) for name in names)
    ):
        raise ValueError
    return tuple(match(GPU, name.strip()) for name in names)


def parse_header_name(text: str) -> str:
    """Return the name of a header that an operator may add."""
    if text.lower() in OWN_HEADERS:
        raise RefusedError(f"{text} is not yours to set")
    return match(HEADER_NAME, text)


def match(pattern: re.Pattern[str], text: str) -> str:
    """Return a text that has this form."""
    if pattern.fullmatch(text) is None:
        raise ValueError
    return text


def redact_url(url: str) -> str:
    """Return the URL, or what was meant to be one, with stars for its user and password, and for its query.

    Everything before the last @ goes, so that a password that was not percent-encoded goes as well. Where an @ follows
    a question mark, the query may be part of the password, and all goes.
    """
    place, mark, query = url.partition("?")
    if "@" in query:
        return re.sub(r"^([a-z]+://)?.*", r"\1***", url, flags=re.DOTALL | re.IGNORECASE)
    shown = re.sub(r"^([a-z]+://)?.*@", r"\1***@", place, flags=re.DOTALL | re.IGNORECASE)
    return f"{shown}?***" if mark else shown


def show_value(value: object) -> str:
    """Return a refused value for the line that refuses it."""
    text = repr(value) if isinstance(value, str) else reprlib.repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def show_url(value: object) -> str:
    """Return a refused URL without user, password and query."""
    return show_value(redact_url(value)) if isinstance(value, str) else "no text"


def split_closed(accepts: str) -> list[str]:
    """Return the names that are accepted, where they are a few."""
    return re.split(", | or ", accepts) if CLOSED.fullmatch(accepts) else []


def describe_refused(
    name: str,
    value: object,
    accepts: str,
    error: object = None,
    show: Callable[[object], str] = show_value,
) -> str:
    """Return the line that refuses a value, with the reason, or with the name that was meant."""
    meant = difflib.get_close_matches(str(value), split_closed(accepts), n=1)
    reason = (
        str(error)
        if isinstance(error, RefusedError)
        else f"did you mean {meant[0]}?"
        if meant
        else ""
    )
    return f"{name}: got {show(value)}{f' ({reason})' if reason else ''}, accepts {accepts}"


def describe_unknown(name: str, known: Iterable[str], what: str = "a setting") -> str:
    """Return the line for a name that does not exist; its value may be a secret under a wrong name and is not shown."""
    spelt = {_plain(each): each for each in sorted(known)}
    meant = _plain(name.split(maxsplit=1)[0])
    containing = sorted(
        (each for each in spelt if set(meant.split("_")) <= set(each.split("_"))), key=len
    )
    shortest = [each for each in containing if len(each) == len(containing[0])]
    closest = shortest or difflib.get_close_matches(meant, spelt, n=1)
    meant_names = " or ".join(spelt[each] for each in closest)
    return f"{name}: not {what}, " + (f"did you mean {meant_names}?" if closest else "see --help")


def _plain(name: str) -> str:
    return name.lower().lstrip("-").removeprefix("headroom_").replace("-", "_")
