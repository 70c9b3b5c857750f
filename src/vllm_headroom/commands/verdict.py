"""What a command that judges comes to."""

from __future__ import annotations

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
