"""What a command that judges comes to."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final


class Verdict(StrEnum):
    """Whether what was judged is good; a closed set, for scripts."""

    GOOD = "good"
    NOT_GOOD = "not_good"
    CANNOT_TELL = "cannot_tell"

    @property
    def status(self) -> int:
        """The exit status."""
        return STATUS[self]


STATUS: Final = {Verdict.GOOD: 0, Verdict.NOT_GOOD: 1, Verdict.CANNOT_TELL: 2}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return no if one says no, else that it cannot be told if one cannot, else yes."""
    found = set(verdicts)
    return next((each for each in (Verdict.NOT_GOOD, Verdict.CANNOT_TELL) if each in found), Verdict.GOOD)
