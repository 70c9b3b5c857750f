"""Durations, shares and ratios as an operator writes them: text → value, or ValueError."""

from __future__ import annotations

import re
from typing import Final

UNITS_SECONDS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
DURATION: Final = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]*)", re.ASCII)
SHARE: Final = re.compile(r"(\d+(?:\.\d+)?) ?(%?)", re.ASCII)


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
