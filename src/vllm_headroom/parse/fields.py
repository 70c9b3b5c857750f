"""Strict reading of fields in JSON objects from other programs.

Each function returns None if the field is absent or null. Raises WrongFieldError if the value is of
the wrong kind.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, TypeVar

T = TypeVar("T")

LARGEST: Final = 2**53
"""The largest integer that a float represents exactly. No memory size or counter comes close."""

LONGEST_SHOWN: Final = 60
"""The number of characters of a wrong value that are shown in a message."""


class WrongFieldError(Exception):
    """A field's value is of the wrong kind.

    The message has its path and the accepted kind.
    """

    def __init__(self, field: str, value: object, accepts: str) -> None:
        super().__init__()
        self.field = field
        self.value = value
        self.accepts = accepts

    def __str__(self) -> str:
        shown = "nothing" if self.value is None else repr(self.value)
        if len(shown) > LONGEST_SHOWN:
            shown = f"{shown[:LONGEST_SHOWN]}..."
        return f"{self.field}: got {shown}, accepts {self.accepts}"


def read_each(
    record: Mapping[str, Any], field: str, read: Callable[[dict[str, Any], int], T]
) -> tuple[T, ...] | None:
    """Return each entry of the list in a field, read with `read(entry, index)`.

    Returns None if the field is absent or null. An error from `read` is raised again with a path
    from the list.
    """
    entries = record.get(field)
    if entries is None:
        return None
    if type(entries) is not list:
        raise WrongFieldError(field, entries, "a list or null")
    objects = [
        _read_object(f"{field}[{index}]", entry, "an object", read, index)
        for index, entry in enumerate(entries)
    ]
    return tuple(objects)


def read_within(
    record: Mapping[str, Any], field: str, read: Callable[[dict[str, Any]], T]
) -> T | None:
    """Return the object in a field, read with `read`.

    Returns None if the field is absent or null. An error from `read` is raised again with this
    field before its path.
    """
    entry = record.get(field)
    return None if entry is None else _read_object(field, entry, "an object or null", read)


def _read_object(name: str, entry: object, accepts: str, read: Callable[..., T], *index: int) -> T:
    """Return what `read` returns for `entry`; raise WrongFieldError if `entry` is not an object.

    An error from `read` is raised again with `name` in front of its field.
    """
    if type(entry) is not dict:
        raise WrongFieldError(name, entry, accepts)
    try:
        return read(entry, *index)
    except WrongFieldError as wrong:
        raise WrongFieldError(f"{name}.{wrong.field}", wrong.value, wrong.accepts) from None


def refuse_number(name: str) -> NoReturn:
    """Reject NaN and infinity, which Python accepts but JSON does not; raises ValueError."""
    raise ValueError(f"{name} is no number")


def read_number(entry: Mapping[str, Any], field: str) -> float | None:
    """Return a number from 0 to LARGEST, or None if absent; otherwise raise WrongFieldError."""
    value = entry.get(field)
    if value is None:
        return None
    is_number = type(value) is int or type(value) is float  # isinstance would accept True as an int
    if is_number and 0 <= value <= LARGEST:
        return float(value)
    raise WrongFieldError(field, value, "a number, 0 or more")


def read_size(entry: Mapping[str, Any], field: str) -> int | None:
    """Read a number as in read_number, and round it down to an integer."""
    value = read_number(entry, field)
    return None if value is None else int(value)


def read_text(entry: Mapping[str, Any], field: str) -> str | None:
    """Return text without control characters, or None if absent; else raise WrongFieldError."""
    value = entry.get(field)
    if value is None:
        return None
    if type(value) is str and value.isprintable():
        return value
    raise WrongFieldError(field, value, "text without control characters")


def read_truth(entry: Mapping[str, Any], field: str) -> bool | None:
    """Return true or false, or None if absent; otherwise raise WrongFieldError."""
    value = entry.get(field)
    if value is None or type(value) is bool:
        return value
    raise WrongFieldError(field, value, "true or false")
