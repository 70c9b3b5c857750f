"""What a command that judges comes to."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final


class Conclusion(StrEnum):
    """Whether what was judged is good; a closed set, for scripts."""

    GOOD = "good"
    NOT_GOOD = "not_good"
    CANNOT_TELL = "cannot_tell"

    @property
    def status(self) -> int:
        """The exit status."""
        return STATUS[self]


STATUS: Final = {Conclusion.GOOD: 0, Conclusion.NOT_GOOD: 1, Conclusion.CANNOT_TELL: 2}


def worst(verdicts: Iterable[Conclusion]) -> Conclusion:
    """Return no if one says no, else that it cannot be told if one cannot, else yes."""
    found = set(verdicts)
    return next((each for each in (Conclusion.NOT_GOOD, Conclusion.CANNOT_TELL) if each in found), Conclusion.GOOD)
