"""Parsing and formatting of sizes, durations, shares and times.

A size is bytes with a unit. A number without one is bytes too, and accepted from 1 MiB on: less
is hardly meant for the memory of a GPU or a page, and `80` may mean 80 GiB.
"""

import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

GIB: Final = 2**30
MIB: Final = 2**20
HOUR_SECONDS: Final = 3600.0
DAY_SECONDS: Final = 24 * HOUR_SECONDS
UNITS_BYTES: Final = {"": 1, "b": 1} | {
    f"{prefix}{binary}{byte}": (1024 if binary else 1000) ** power
    for power, prefix in enumerate("kmgtp", start=1)
    for binary in ("", "i")
    for byte in ("b", "")
    if binary or byte
}
"""Units of sizes in lower case: kB is 1000, KiB and Ki are 1024; a bare K is ambiguous and
refused."""
SIZE: Final = re.compile(r"(\d+|\d*\.\d+) ?([A-Za-z]*)", re.ASCII)
UNITS_SECONDS: Final = {
    "ms": 0.001,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 604800.0,
}
NUMBER: Final = r"\d{1,12}(?:\.\d{1,12})?"
PARTS: Final = re.compile(rf"({NUMBER}) ?(ms|min|[smhdw])", re.ASCII)
DURATION: Final = re.compile(rf"(?:{PARTS.pattern})+|{NUMBER}", re.ASCII)
SHARE: Final = re.compile(r"(\d+(?:\.\d+)?) ?(%?)", re.ASCII)
PREFIXES: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi")
VLLM_NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])", re.ASCII)
LARGEST_EXACT_BYTES: Final = 2**53
"""The largest integer a float represents exactly."""


class RefusedError(ValueError):
    """A value refused for a reason that the operator can correct."""


def parse_size(text: str) -> int:
    """Parse a size such as `8MiB`, or a plausible number of bytes."""
    size = SIZE.fullmatch(text)
    if size is None or size[2].lower() not in UNITS_BYTES:
        raise ValueError
    n_bytes = int(Decimal(size[1]) * UNITS_BYTES[size[2].lower()])
    if not size[2] and 0 < n_bytes < MIB:
        raise RefusedError(f"without a unit it is bytes: {text}GiB?")
    if not 1 <= n_bytes <= LARGEST_EXACT_BYTES:
        raise ValueError
    return n_bytes


def parse_vllm_number(text: str) -> int:
    """Parse a whole number as vLLM does: 32k is 32,000 and 32K is 32,768.

    This is human_readable_int of its options.
    """
    number = VLLM_NUMBER.fullmatch(text)
    if number is None:
        return int(text)
    power = "kmgt".index(number[2].lower()) + 1
    if number[2].isupper():
        return int(number[1]) * int(1024**power)  # vLLM takes no fraction here
    return int(Decimal(number[1]) * 1000**power)


def parse_duration(text: str) -> float:
    """Parse a duration such as `90`, `120s`, `15m`, `1.5h` or `1h30m` into seconds."""
    text = text.strip()
    if not DURATION.fullmatch(text):
        raise ValueError
    return sum(
        float(number) * UNITS_SECONDS[unit] for number, unit in PARTS.findall(text) or [(text, "s")]
    )


def parse_share(text: str) -> float:
    """Parse a share such as `5%` or `0.05` into a ratio."""
    found = SHARE.fullmatch(text.strip())
    if found is None:
        raise ValueError
    return float(found[1]) / (100 if found[2] else 1)


def format_size(n_bytes: float) -> str:
    """Format bytes with a binary prefix and three digits."""
    value, power = abs(n_bytes), 0
    while value >= 999.5 and power < len(PREFIXES) - 1:  # noqa: PLR2004 - what three digits round to a thousand
        value, power = value / 1024, power + 1
    sign = "-" if n_bytes < 0 else ""
    return f"{sign}{value:.3g} {PREFIXES[power]}B"


def format_gib(n_bytes: float) -> str:
    """Format bytes in GiB, as vLLM logs them."""
    return f"{n_bytes / GIB:,.2f} GiB"


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units."""
    whole = round(abs(seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next((place for place, (count, _) in enumerate(parts) if count), len(parts) - 1)
    sign = "-" if seconds < 0 else ""
    return sign + " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2])


def format_instant(seconds: float) -> str:
    """Format seconds since the epoch as a date in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
