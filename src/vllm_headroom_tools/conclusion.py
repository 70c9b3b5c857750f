"""The verdict of a command that judges."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Conclusion(StrEnum):
    """Whether the subject is good; a closed set, for scripts."""

    GOOD = "good"
    NOT_GOOD = "not_good"
    CANNOT_TELL = "cannot_tell"

    @property
    def status(self) -> int:
        """The exit status: 0, 1 or 2."""
        return list(Conclusion).index(self)


def find_worst(verdicts: Iterable[Conclusion]) -> Conclusion:
    """Return the worst verdict: not good, then cannot tell, then good."""
    return min(
        verdicts, key=[Conclusion.NOT_GOOD, Conclusion.CANNOT_TELL, Conclusion.GOOD].index, default=Conclusion.GOOD
    )
