"""Sizes, durations, shares and times: what people write understood, and what is shown to them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

UNITS_BYTES: Final = {"": 1, "b": 1} | {
    f"{prefix}{binary}{byte}": (1024 if binary else 1000) ** power
    for power, prefix in enumerate("kmgtp", start=1)
    for binary in ("", "i")
    for byte in ("b", "")
    if binary or byte
}
"""Units of sizes in lower case: kB is 1000, KiB and Ki are 1024; a bare K could be either and is refused."""
SIZE: Final = re.compile(r"(\d+|\d*\.\d+) ?([A-Za-z]*)", re.ASCII)
UNITS_SECONDS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
DURATION: Final = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]*)", re.ASCII)
SHARE: Final = re.compile(r"(\d+(?:\.\d+)?) ?(%?)", re.ASCII)
PREFIXES: Final = ("", "k", "M", "G", "T", "P")


def size_bytes(value: object) -> object:
    """Return the bytes of a size such as `8388608` or `8MiB`; what is no text is left to the type."""
    if not isinstance(value, str):
        return value
    size = SIZE.fullmatch(value)
    if size is None or size[2].lower() not in UNITS_BYTES:
        raise ValueError
    return int(Decimal(size[1]) * UNITS_BYTES[size[2].lower()])


def some_bytes(text: str) -> int:
    """Return the bytes of a size above 0 that an option of a command is given."""
    n_bytes = size_bytes(text)
    if not isinstance(n_bytes, int) or n_bytes < 1:
        raise ValueError
    return n_bytes


def duration_seconds(text: str) -> float:
    """Return the seconds of a duration such as `90`, `120s`, `15m` or `1.5h`."""
    found = DURATION.fullmatch(text.strip())
    if found is None or found[2] not in UNITS_SECONDS:
        raise ValueError
    return float(found[1]) * UNITS_SECONDS[found[2]]


def share(text: str) -> float:
    """Return the ratio that a share such as `5%` or `0.05` is."""
    found = SHARE.fullmatch(text.strip())
    if found is None:
        raise ValueError
    return float(found[1]) / (100 if found[2] else 1)


def utilization(text: str) -> float:
    """Return a ratio above 0, at most 1, such as `0.92`."""
    ratio = float(text)
    if not 0 < ratio <= 1:
        raise ValueError
    return ratio


def size(n_bytes: float) -> str:
    """Return bytes with a decimal prefix and three digits."""
    value, power = abs(n_bytes), 0
    while value >= 999.5 and power < len(PREFIXES) - 1:  # noqa: PLR2004 - what three digits round to a thousand
        value, power = value / 1000, power + 1
    sign = "-" if n_bytes < 0 else ""
    return f"{sign}{value:.3g} {PREFIXES[power]}B"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    whole = round(abs(seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next((place for place, (count, _) in enumerate(parts) if count), len(parts) - 1)
    sign = "-" if seconds < 0 else ""
    return sign + " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2])


def instant(seconds: float) -> str:
    """Return a time of the trace as a date in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
