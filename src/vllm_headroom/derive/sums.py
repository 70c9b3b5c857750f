"""Sums of values of which some may be unknown."""

from collections.abc import Iterable
from typing import TypeVar

N = TypeVar("N", int, float)


def sum_known(values: Iterable[N | None]) -> N | None:
    """Return the sum; None where one value is unknown, or without values."""
    numbers: list[N] = []
    for value in values:
        if value is None:
            return None
        numbers.append(value)
    return sum(numbers) if numbers else None
