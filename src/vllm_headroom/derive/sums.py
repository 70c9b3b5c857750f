"""Sums and extremes of values, some of which may be unknown."""

from collections.abc import Iterable
from typing import TypeVar

N = TypeVar("N", int, float)


def sum_known(values: Iterable[N | None]) -> N | None:
    """Return the sum, or None if there are no values or any value is unknown."""
    numbers: list[N] = []
    for value in values:
        if value is None:
            return None
        numbers.append(value)
    return sum(numbers) if numbers else None


def find_least_known(values: Iterable[int | None]) -> int | None:
    """Return the lowest known value, or None if none is known."""
    return min((value for value in values if value is not None), default=None)


def find_most_known(values: Iterable[int | None]) -> int | None:
    """Return the highest known value, or None if none is known."""
    return max((value for value in values if value is not None), default=None)
