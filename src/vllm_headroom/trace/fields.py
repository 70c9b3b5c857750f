"""The fields of a trace's records that other JSON has not: its time, and what is written of an entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vllm_headroom.parse.fields import LARGEST, WrongFieldError

YEAR_10000: Final = 253_402_300_800


def time_of(record: Mapping[str, Any]) -> float:
    """Return `t`, which every record has."""
    value = record.get("t")
    if (type(value) is int or type(value) is float) and 0 <= value < YEAR_10000:
        return float(value)
    raise WrongFieldError("t", value, "seconds since the epoch")


def known(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry to be written, without what is unknown, so that each of its fields can be read again.

    No reader takes a number beyond LARGEST, or text that cannot be shown: one is left out, the other is escaped.
    """
    return {field: _written(value) for field, value in entry.items() if value is not None and not _beyond(value)}


def _beyond(value: object) -> bool:
    return isinstance(value, float) and value > LARGEST


def _written(value: object) -> object:
    is_shown = not isinstance(value, str) or value.isprintable()
    return value if is_shown else str(value).encode("unicode_escape").decode()
