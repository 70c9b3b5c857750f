"""Parsing and formatting of sizes, durations, shares and times.

A size is a number with a unit of bytes. A number without a unit is in bytes, and must be at least
1 MiB. A smaller number is probably in another unit: `80` may mean 80 GiB.
"""

import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

MIB: Final = 2**20
GIB: Final = 2**30
GIGABYTE: Final = 10**9
HOUR_SECONDS: Final = 3600.0
DAY_SECONDS: Final = 24 * HOUR_SECONDS
FLOAT16_BYTES: Final = 2
FLOAT32_BYTES: Final = 4
PERCENT: Final = 100
"""The percentage that equals a share of 1."""

LARGEST_EXACT_BYTES: Final = 2**53
"""The largest integer a float represents exactly."""


def _list_size_units() -> dict[str, int]:
    """Return the number of bytes in each unit of size.

    The unit names are in lower case. The unit kB is 1000 bytes; KiB and Ki are 1024. A bare K is
    ambiguous and is refused.
    """
    units = {"": 1, "b": 1}
    for power, prefix in enumerate("kmgtp", start=1):
        units[f"{prefix}b"] = 1000**power
        units[f"{prefix}i"] = 1024**power
        units[f"{prefix}ib"] = 1024**power
    return units


UNITS_BYTES: Final = _list_size_units()

UNITS_SECONDS: Final = {
    "ms": 0.001,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": HOUR_SECONDS,
    "d": DAY_SECONDS,
    "w": 7 * DAY_SECONDS,
}
"""The number of seconds in each unit of duration."""

PREFIXES: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi")
"""The binary prefixes in which sizes are shown."""

SIZE: Final = re.compile(r"(\d+|\d*\.\d+) ?([A-Za-z]*)", re.ASCII)
"""A number and its unit, which may be omitted."""

AMBIGUOUS_UNIT: Final = re.compile(r"[kmgtpKMGTP]|[KMGTP]b", re.ASCII)
"""A bare prefix may be binary or decimal, and Gb may mean bits."""

NUMBER: Final = r"\d{1,12}(?:\.\d{1,12})?"
"""A number in a duration; a number with more digits is refused as a mistake."""

DURATION_PART: Final = re.compile(rf"({NUMBER}) ?(ms|min|[smhdw])", re.ASCII)
DURATION: Final = re.compile(rf"(?:{DURATION_PART.pattern})+|{NUMBER}", re.ASCII)
SHARE: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+) ?(%?)", re.ASCII)
VLLM_NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])", re.ASCII)


class RefusedError(ValueError):
    """A value that is refused for a reason that the operator can correct."""


def parse_size(text: str) -> int:
    """Parse a size such as `8MiB` into bytes.

    A number without a unit is in bytes. Raises RefusedError if the unit is ambiguous. Also raises
    it for a number below 1 MiB without a unit. Raises a plain ValueError for anything else that is
    not a size.
    """
    size = SIZE.fullmatch(text)
    if size is None:
        raise ValueError
    number = size[1]
    unit = size[2].lower()
    # "8G" may mean 8 * 10**9 or 8 * 2**30.
    if AMBIGUOUS_UNIT.fullmatch(size[2]):
        prefix = size[2][0].upper()
        raise RefusedError(f"{size[2]} has two meanings: {number}{prefix}iB or {number}{prefix}B?")
    if unit not in UNITS_BYTES:
        raise ValueError
    # Decimal is used, because 0.1 GiB would not be exact as a float.
    n_bytes = int(Decimal(number) * UNITS_BYTES[unit])
    # Somebody who writes "80" means GiB, not 80 bytes.
    if not unit and 0 < n_bytes < MIB:
        raise RefusedError(f"without a unit it is bytes: {text}GiB?")
    if not 1 <= n_bytes <= LARGEST_EXACT_BYTES:
        raise ValueError
    return n_bytes


def parse_vllm_number(text: str) -> int:
    """Parse a whole number as vLLM does: 32k is 32,000 and 32K is 32,768.

    vLLM's own function for this is called human_readable_int. Raises ValueError or InvalidOperation
    for text that vLLM does not accept.
    """
    number = VLLM_NUMBER.fullmatch(text)
    if number is None:
        return int(text)
    power = "kmgt".index(number[2].lower()) + 1
    if number[2].isupper():
        return int(number[1]) * int(1024**power)  # vLLM accepts no fraction here.
    return int(Decimal(number[1]) * 1000**power)


def parse_duration(text: str) -> float:
    """Parse a duration such as `90`, `120s`, `15m`, `1.5h` or `1h30m` into seconds.

    Raises ValueError for anything else.
    """
    text = text.strip()
    if not DURATION.fullmatch(text):
        raise ValueError
    parts = DURATION_PART.findall(text)
    if not parts:
        return float(text)
    return sum(float(number) * UNITS_SECONDS[unit] for number, unit in parts)


def parse_share(text: str) -> float:
    """Parse a share such as `5%` or `0.05` into a ratio.

    Raises ValueError for anything else.
    """
    share = SHARE.fullmatch(text.strip())
    if share is None:
        raise ValueError
    number, percent_sign = share.groups()
    return float(number) / (100 if percent_sign else 1)


def format_size(n_bytes: float) -> str:
    """Format a number of bytes with a binary prefix and three digits."""
    value = abs(n_bytes)
    power = 0
    while value >= 999.5 and power < len(PREFIXES) - 1:  # noqa: PLR2004 - what three digits round to a thousand
        value /= 1024
        power += 1
    sign = "-" if n_bytes < 0 else ""
    return f"{sign}{value:.3g} {PREFIXES[power]}B"


def format_gib(n_bytes: float) -> str:
    """Format a number of bytes in GiB, as vLLM does in its log."""
    return f"{n_bytes / GIB:,.2f} GiB"


def format_duration(seconds: float) -> str:
    """Format a duration, rounded to seconds, in its two largest units: "2 d 3 h"."""
    # The seconds are rounded first. Unrounded, 59.7 s would become "60 s" and not "1 min 0 s".
    days, seconds_of_day = divmod(round(abs(seconds)), round(DAY_SECONDS))
    hours, seconds_of_hour = divmod(seconds_of_day, round(HOUR_SECONDS))
    minutes, seconds_of_minute = divmod(seconds_of_hour, 60)
    parts = [f"{days} d", f"{hours} h", f"{minutes} min", f"{seconds_of_minute} s"]
    if days:
        shown_parts = parts[0:2]
    elif hours:
        shown_parts = parts[1:3]
    elif minutes:
        shown_parts = parts[2:4]
    else:
        shown_parts = parts[3:4]
    sign = "-" if seconds < 0 else ""
    return sign + " ".join(shown_parts)


def format_instant(seconds: float) -> str:
    """Format seconds since the epoch as a date and time in UTC."""
    return to_datetime(seconds).strftime("%Y-%m-%d %H:%M:%SZ")


def to_datetime(seconds: float) -> datetime:
    """Return seconds since the epoch as a date and time in UTC.

    If the time is out of range, the nearest possible date is returned. A wrong clock can cause
    this.
    """
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        if seconds > 0:
            return datetime.max.replace(tzinfo=UTC)
        return datetime.min.replace(tzinfo=UTC)
