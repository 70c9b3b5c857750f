"""What became of a limit."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from msgspec import Struct

from vllm_headroom.commands.conclusion import Conclusion, worst
from vllm_headroom.units import size


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
PART_GROWTH: Final = "part over baseline"
"""The names of the limits."""


class Judgement(Struct, frozen=True, kw_only=True):
    """One limit on one GPU, role or engine, which `of` names; it is empty where the limit is on all together.

    `value`, its bounds `most` and `least` and `baseline` are in `unit`, None where unknown or where there is none.
    `found`, `allowed` and `before` say value, bound and baseline to people where they are more than the figure in its
    unit. `why` says what it was measured on, or what is missing.
    """

    limit: str
    of: str = ""
    verdict: Conclusion
    unit: Unit
    value: float | None = None
    most: float | None = None
    least: float | None = None
    baseline: float | None = None
    found: str | None = None
    allowed: str | None = None
    before: str | None = None
    why: str = ""

    @property
    def name(self) -> str:
        """The limit and what it is on."""
        return f"{self.limit}, {self.of}" if self.of else self.limit

    @property
    def words(self) -> tuple[str, str, str]:
        """What was found, what is allowed, and what the baseline had; empty where there is none of the last two."""
        return (
            self.found or written(self.value, self.unit) or "unknown",
            self.allowed or written(self.most, self.unit),
            self.before or written(self.baseline, self.unit),
        )


def written(figure: float | None, unit: Unit) -> str:
    """Return a figure for people; nothing where there is none."""
    if figure is None:
        return ""
    match unit:
        case Unit.BYTES:
            return size(figure)
        case Unit.RATIO:
            return f"{figure:+.2%}"
        case Unit.TOKENS:
            return f"{figure:,.0f} tokens"
        case Unit.COUNT:
            return f"{figure:.3g}" if figure < 1000 else f"{figure:,.0f}"  # noqa: PLR2004 - from there on 1e+03


def overall(judgements: Iterable[Judgement]) -> Conclusion:
    """Return failed if any limit is exceeded, else that it cannot be told if one cannot, else passed."""
    return worst(judgement.verdict for judgement in judgements)


def compared(value: float | None, most: float | None, doubt: str | None) -> Conclusion:
    """Return what a value amounts to: above the limit it fails in any case, below it passes only without a doubt."""
    if value is None or most is None:
        return Conclusion.CANNOT_TELL
    if value > most:
        return Conclusion.NOT_GOOD
    return Conclusion.GOOD if doubt is None else Conclusion.CANNOT_TELL
