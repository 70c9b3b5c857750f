"""Figures as people read them: sizes, durations, times."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

PREFIXES: Final = ("", "k", "M", "G", "T", "P")


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
