"""What became of a limit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Outcome(StrEnum):
    """Whether a limit holds."""

    PASSED = "passed"
    FAILED = "failed"
    CANNOT_TELL = "cannot_tell"


class Unit(StrEnum):
    """What a figure counts."""

    BYTES = "bytes"
    RATIO = "ratio"
    TOKENS = "tokens"
    COUNT = "count"


LEAK: Final = "leak per thousand requests"
HOST_LEAK: Final = "host leak per thousand requests"
DISCREPANCY: Final = "discrepancy"
COST: Final = "bytes per running request"
PREEMPTIONS: Final = "preemptions per thousand requests"
RESTARTS: Final = "engine restarts"
GROWTH: Final = "GPU memory over baseline"
HOST_GROWTH: Final = "host memory over baseline"
CAPACITY: Final = "KV cache against baseline"
"""The names of the limits."""

STATUS: Final = {Outcome.PASSED: 0, Outcome.FAILED: 1, Outcome.CANNOT_TELL: 2}
"""The exit statuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One limit on one GPU, role or engine, which `of` names; it is empty where the limit is on all together.

    `value`, its bounds `most` and `least` and `baseline` are in `unit`, None where unknown or where there is none.
    `found`, `allowed` and `before` are the same for people. `why` says what it was measured on, or what is missing.
    """

    limit: str
    of: str
    outcome: Outcome
    unit: Unit
    value: float | None
    most: float | None
    least: float | None = None
    baseline: float | None = None
    found: str
    allowed: str
    before: str | None = None
    why: str

    @property
    def name(self) -> str:
        """The limit and what it is on."""
        return f"{self.limit}, {self.of}" if self.of else self.limit


def overall(judgements: Iterable[Judgement]) -> Outcome:
    """Return failed if any limit is exceeded, else that it cannot be told if one cannot, else passed."""
    found = {judgement.outcome for judgement in judgements}
    return next((each for each in (Outcome.FAILED, Outcome.CANNOT_TELL) if each in found), Outcome.PASSED)


def compared(value: float | None, most: float | None, doubt: str | None) -> Outcome:
    """Return what a value amounts to: above the limit it fails in any case, below it passes only without a doubt."""
    if value is None or most is None:
        return Outcome.CANNOT_TELL
    if value > most:
        return Outcome.FAILED
    return Outcome.PASSED if doubt is None else Outcome.CANNOT_TELL
