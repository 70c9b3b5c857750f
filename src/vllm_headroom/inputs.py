"""Parse the values of settings and options, and describe those that are refused."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_headroom.units import RefusedError, parse_duration, parse_share

if TYPE_CHECKING:
    import httpx

HOST_PORT_AND_PATH: Final = re.compile(r"[\w.-]+:\d+(?:/[\w./-]*)?", re.ASCII)
"""Text that would be a URL if it started with http://."""

CLOSED_SET: Final = re.compile(r"[\w-]+(?:, [\w-]+)* or [\w-]+")
"""Matches a list of accepted names, such as "off, dry-run or on"."""

GPU: Final = re.compile(r"0|[1-9]\d*|(?:GPU|MIG)-[0-9A-Za-z/-]+", re.ASCII)
"""The index or UUID of a GPU."""

HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""The name of an HTTP header (RFC 9110, 5.1)."""

RESERVED_HEADERS: Final = frozenset(
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
"""Headers that the sidecar sets itself, or that would change how its requests are framed."""

HEADER_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?")
"""The value of a header (RFC 9110, 5.5) in ASCII. Other bytes are undefined."""

HOST: Final = re.compile(r"[\w.-]*|[\dA-Fa-f]*:[\dA-Fa-f]*:[\dA-Fa-f:.]*(?:%[\w.-]+)?", re.ASCII)
"""A host name, an IPv4 address, or an IPv6 address with its zone."""

HOST_AND_PORT: Final = re.compile(r"(?:[^:]*|\[.*\]):\d+", re.ASCII)
WHOLE_NUMBER: Final = re.compile(r"\d{1,16}", re.ASCII)
HIGHEST_PORT: Final = 65535
HIGHEST_PERCENTAGE: Final = 100

MAX_SHOWN_CHARACTERS: Final = 80
"""The number of characters of a refused value that are shown (our choice)."""


def parse_http_url(text: str) -> httpx.URL:
    """Parse an http or https URL; raise ValueError for anything else.

    Raises RefusedError with a suggestion if only http:// is missing.
    """
    import httpx  # noqa: PLC0415 - it decides what it can fetch, but --help need not wait for it

    # `localhost:8000/metrics` would parse as a URL with the scheme "localhost".
    if HOST_PORT_AND_PATH.fullmatch(text):
        raise RefusedError(f"did you mean http://{text}?")
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ValueError from error
    # httpx accepts spaces and encodes them, but they are typing mistakes.
    if url.scheme not in {"http", "https"} or not url.host or re.search(r"\s", text):
        raise ValueError
    if url.port is not None and not 1 <= url.port <= HIGHEST_PORT:
        raise ValueError
    return url


def parse_metrics_url(text: str) -> str:
    """Parse an http or https URL, and add /metrics if the URL has no path.

    Raises ValueError for any other text.
    """
    url = parse_http_url(text)
    return str(url.copy_with(path="/metrics")) if url.path == "/" else text


def parse_path(text: str) -> Path:
    """Parse a file path; raise ValueError if the path is not valid."""
    if not text or "\0" in text:
        raise ValueError
    if text.startswith("~"):
        raise RefusedError("~ is not expanded here: write the whole path")
    return Path(text)


JOURNAL_UNIT: Final = re.compile(r"journal:[A-Za-z0-9:_.@\\][A-Za-z0-9:_.@\\-]{0,254}")
"""Matches `journal:UNIT`, where UNIT is the systemd unit whose journal is read."""


def parse_log_place(text: str) -> str:
    """Return where a log is: a file path or pattern, `kubernetes`, or `journal:UNIT`.

    Raises ValueError for any other text.
    """
    if text.startswith("journal:"):
        return require_match(JOURNAL_UNIT, text)
    if "://" in text:
        raise ValueError
    return str(parse_path(text))


def parse_listen_host(text: str) -> str:
    """Parse the address or name to listen on; raise ValueError for any other text."""
    if HOST_AND_PORT.fullmatch(text):
        raise RefusedError("set the port with listen_port")
    return require_match(HOST, text)


def parse_number(text: str) -> float:
    """Parse a number.

    Raises ValueError for other text, including 1_0, although Python accepts 1_0 as 10.
    """
    if "_" in text:
        raise ValueError
    return float(text)


def parse_seconds(text: str) -> float:
    """Parse a number of seconds, or a duration such as 5s.

    Raises ValueError for any other text.
    """
    try:
        return parse_duration(text)
    except ValueError:
        return parse_number(text)


def parse_ratio(text: str) -> float:
    """Parse a ratio such as 0.92 or 92%; raise ValueError for any other text.

    Raises RefusedError for a number that can only be meant as a percentage. RefusedError is a
    ValueError with a suggestion.
    """
    try:
        ratio = parse_share(text)
    except ValueError:
        ratio = parse_number(text)
    if 1 < ratio <= HIGHEST_PERCENTAGE and not text.rstrip().endswith("%"):
        raise RefusedError(f"did you mean {text.strip()}%?")
    return ratio


def parse_whole_number(text: str) -> int:
    """Parse a whole number written in digits; raise ValueError for any other text."""
    return int(require_match(WHOLE_NUMBER, text))


def parse_gpus(value: object) -> object:
    """Parse a list or a comma-separated text.

    The result is `auto`, `all`, or a tuple of indices and UUIDs. Raises ValueError for anything
    else, such as an empty list or an invalid UUID.
    """
    if isinstance(value, str):
        if value.lower() in {"auto", "all"}:
            return value.lower()
        value = value.split(",")
    # In YAML, a list with only this name is equivalent to the name itself.
    if value == ["auto"]:
        return "auto"
    if value == ["all"]:
        return "all"
    if not isinstance(value, list | tuple) or not value:
        raise ValueError
    if not all(isinstance(name, str) for name in value):
        raise ValueError
    return tuple(require_match(GPU, name.strip()) for name in value)


def parse_engine_urls(text: str) -> object:
    """Return `node` or a tuple of the URLs of engines' pages.

    Raises ValueError for other text.
    """
    if text.lower() == "node":
        return "node"
    urls = tuple(parse_metrics_url(url.strip()) for url in text.split(","))
    if len(set(urls)) < len(urls):
        raise RefusedError("a URL is given twice")
    return urls


def redact_urls(engines: object) -> object:
    """Return URLs as redacted, comma-separated text. Any other value is returned unchanged."""
    if isinstance(engines, tuple):
        return ",".join(redact_url(url) for url in engines)
    return engines


def show_urls(value: object) -> str:
    """Return refused URLs without users, passwords and queries, or "no text" for other values."""
    if not isinstance(value, str):
        return "no text"
    return show_value(",".join(redact_url(url) for url in value.split(",")))


def parse_header_name(text: str) -> str:
    """Parse the name of a header that an operator may add.

    Raises ValueError for any other text.
    """
    if text.lower() in RESERVED_HEADERS:
        raise RefusedError(f"{text} is not yours to set")
    return require_match(HEADER_NAME, text)


def require_match(pattern: re.Pattern[str], text: str) -> str:
    """Return the text; raise ValueError if the pattern does not match the whole text."""
    if pattern.fullmatch(text) is None:
        raise ValueError
    return text


def redact_url(url: str) -> str:
    """Return a URL with its user, password and query replaced by stars.

    Any text is accepted, even if it is not a valid URL. The stars replace everything before the
    last @. The stars thus hide even a password that was not percent-encoded. If an @ follows a
    question mark, the mark may belong to the password. In that case, the stars replace everything
    after the scheme.
    """
    address, question_mark, query = url.partition("?")
    if "@" in query:
        return re.sub(r"^([a-z]+://)?.*", r"\1***", url, flags=re.DOTALL | re.IGNORECASE)
    redacted = re.sub(r"^([a-z]+://)?.*@", r"\1***@", address, flags=re.DOTALL | re.IGNORECASE)
    return f"{redacted}?***" if question_mark else redacted


def show_value(value: object) -> str:
    """Return a refused value, shortened for the error message."""
    text = repr(value) if isinstance(value, str) else reprlib.repr(value)
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return text
    return f"{text[:MAX_SHOWN_CHARACTERS]}..."


def show_url(value: object) -> str:
    """Return a refused URL without its user, password and query.

    Returns "no text" for other values.
    """
    if not isinstance(value, str):
        return "no text"
    return show_value(redact_url(value))


def split_closed_set(accepts: str) -> list[str]:
    """Return the accepted names in a text such as "a, b or c".

    Returns [] for any other text.
    """
    if not CLOSED_SET.fullmatch(accepts):
        return []
    return re.split(", | or ", accepts)


def describe_refused(
    name: str,
    value: object,
    accepts: str,
    error: object = None,
    show: Callable[[object], str] = show_value,
) -> str:
    """Return the line that refuses a value.

    If `error` is a RefusedError, the line includes its reason. For any other error, the line
    suggests the most similar accepted name, if there is one. `show` returns the value in a form
    that may be shown.
    """
    similar_names = difflib.get_close_matches(str(value), split_closed_set(accepts), n=1)
    reason = ""
    if isinstance(error, RefusedError):
        reason = f" ({error})" if str(error) else ""
    elif similar_names:
        reason = f" (did you mean {similar_names[0]}?)"
    return f"{name}: got {show(value)}{reason}, accepts {accepts}"


def describe_unknown(name: str, names: Iterable[str], kind: str = "a setting") -> str:
    """Return the line that refuses a name not in `names`, and suggests similar names.

    The line does not show the value, because it may be a secret.
    """
    similar_names = _find_similar(name, names)
    if not similar_names:
        return f"{name}: not {kind}, see --help"
    return f"{name}: not {kind}, did you mean {' or '.join(similar_names)}?"


def _find_similar(name: str, names: Iterable[str]) -> list[str]:
    """Return the shortest of the `names` that contain every word of `name`.

    If no name contains every word, the name with the most similar spelling is returned. The result
    is empty if no name is similar.
    """
    # The names are sorted, so that the suggestion is deterministic.
    names_by_form = {_normalise(known_name): known_name for known_name in sorted(names)}
    form = _normalise("".join(name.split(maxsplit=1)[:1]))  # A name may be empty.
    words = set(form.split("_"))
    containing = [other for other in names_by_form if words <= set(other.split("_"))]
    if containing:
        shortest = min(map(len, containing))
        similar_forms = [other for other in containing if len(other) == shortest]
    else:
        similar_forms = difflib.get_close_matches(form, names_by_form, n=1)
    return [names_by_form[similar_form] for similar_form in similar_forms]


def _normalise(name: str) -> str:
    """Return a name in the form of a setting's key: `gpus` for --gpus and HEADROOM_GPUS."""
    return name.lower().lstrip("-").removeprefix("headroom_").replace("-", "_")
