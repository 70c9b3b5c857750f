"""The fields of a trace's records, read strictly: absent and null are None, all else is right or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

T = TypeVar("T")

LARGEST: Final = 2**53
"""Up to what a float counts exactly; no memory and no counter comes near it."""

YEAR_10000: Final = 253_402_300_800
LONGEST_SHOWN: Final = 60


class WrongFieldError(Exception):
    """A field that cannot be used; it never leaves this package."""

    def __init__(self, field: str, value: object, accepts: str) -> None:
        super().__init__()
        self.field, self.value, self.accepts = field, value, accepts

    def __str__(self) -> str:
        shown = "nothing" if self.value is None else repr(self.value)
        cut = shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}..."
        return f"{self.field}: got {cut}, accepts {self.accepts}"


def each(record: Mapping[str, Any], side: str, read: Callable[[dict[str, Any], int], T]) -> tuple[T, ...] | None:
    """Return what `read` makes of each entry of a side and its place; a wrong field is named with both."""
    entries = record.get(side)
    if entries is None:
        return None
    if type(entries) is not list:
        raise WrongFieldError(side, entries, "a list or null")
    found = []
    for place, entry in enumerate(entries):
        if type(entry) is not dict:
            raise WrongFieldError(f"{side}[{place}]", entry, "an object")
        try:
            found.append(read(entry, place))
        except WrongFieldError as wrong:
            raise WrongFieldError(f"{side}[{place}].{wrong.field}", wrong.value, wrong.accepts) from None
    return tuple(found)


def one(record: Mapping[str, Any], side: str, read: Callable[[dict[str, Any]], T]) -> T | None:
    """Return what `read` makes of a side that is one entry; a wrong field is named with both."""
    entry = record.get(side)
    if entry is None:
        return None
    if type(entry) is not dict:
        raise WrongFieldError(side, entry, "an object or null")
    try:
        return read(entry)
    except WrongFieldError as wrong:
        raise WrongFieldError(f"{side}.{wrong.field}", wrong.value, wrong.accepts) from None


def time_of(record: Mapping[str, Any]) -> float:
    """Return `t`, which every record has."""
    value = record.get("t")
    if (type(value) is int or type(value) is float) and 0 <= value < YEAR_10000:
        return float(value)
    raise WrongFieldError("t", value, "seconds since the epoch")


def number(entry: Mapping[str, Any], field: str) -> float | None:
    """Return a count or a ratio."""
    value = entry.get(field)
    if value is None:
        return None
    if (type(value) is int or type(value) is float) and 0 <= value <= LARGEST:
        return float(value)
    raise WrongFieldError(field, value, "a number, 0 or more")


def size(entry: Mapping[str, Any], field: str) -> int | None:
    """Return bytes or another whole number, rounded down."""
    value = number(entry, field)
    return None if value is None else int(value)


def text(entry: Mapping[str, Any], field: str) -> str | None:
    """Return a name that can be shown on a terminal."""
    value = entry.get(field)
    if value is None:
        return None
    if type(value) is str and value.isprintable():
        return value
    raise WrongFieldError(field, value, "text without control characters")


def truth(entry: Mapping[str, Any], field: str) -> bool | None:
    """Return true or false."""
    value = entry.get(field)
    if value is None or type(value) is bool:
        return value
    raise WrongFieldError(field, value, "true or false")


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
