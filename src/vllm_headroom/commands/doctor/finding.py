"""What the doctor says of one thing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How it stands with one thing; what could not be found out is never called available or missing."""

    OK = "ok"
    MISSING = "missing"
    UNKNOWN = "unknown"
    NOT_APPLICABLE = "not_applicable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One way to mend a thing: the lines to write, and where; several of them are alternatives."""

    where: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """How it stands with one thing.

    `text` says what was found, what is missing, or why it cannot be told or does not apply. `absent` are the series
    that are not on the daemon's page meanwhile; one that ends in `*` stands for all that begin so.
    """

    state: State
    text: str
    details: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    fixes: tuple[Fix, ...] = ()
