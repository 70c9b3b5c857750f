"""Fields of a model's config.json, read by any of their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Config = Mapping[str, Any]

LARGEST: Final = 10**9
"""No size of a model comes near it, and arithmetic stays exact."""


def whole(config: Config, *names: str) -> int | None:
    """Return the first field that is set, of a list the largest; None for none, and for 0, which switches things off.

    Raises ValueError when it is no whole number.
    """
    for name in names:
        value = config.get(name)
        if value is None or value is False or value in (0, []):
            continue
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, int) and not isinstance(part, bool) and 0 <= part <= LARGEST for part in parts):
            raise ValueError(f"{name} is {str(value)[:40]!r}, not a whole number of a model's size")
        return int(max(parts)) or None
    return None


def needed(config: Config, *names: str) -> int:
    """Return the field as `whole` does; raises ValueError when there is none."""
    value = whole(config, *names)
    if value is None:
        raise ValueError(f"{names[0]} is missing")
    return value


def part(config: Config, *names: str) -> Config:
    """Return the first field that is a mapping, an empty one for none."""
    return next((found for name in names if isinstance(found := config.get(name), dict)), {})
