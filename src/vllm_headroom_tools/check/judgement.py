"""The judgements on a trace, and their texts."""

from enum import StrEnum
from typing import Final

from msgspec import Struct

from vllm_headroom.units import format_size
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.history import LeakVerdict

LEAK: Final = "leak per thousand requests"
HOST_LEAK: Final = "host leak per thousand requests"
DISCREPANCY: Final = "discrepancy"
COST: Final = "bytes per running request"
PREEMPTIONS: Final = "preemptions per thousand requests"
RESTARTS: Final = "engine restarts"
GROWTH: Final = "GPU memory over baseline"
"""The names of the limits."""


class Unit(StrEnum):
    """The unit of a figure."""

    BYTES = "bytes"
    RATIO = "ratio"
    TOKENS = "tokens"
    COUNT = "count"


class Judgement(Struct, frozen=True, kw_only=True):
    """The result of one limit for a GPU, role or engine, or for all."""

    limit: str
    subject: str = ""  # the GPU, role or engine, or empty for all of them together
    verdict: Conclusion
    unit: Unit = Unit.BYTES
    # The value, the bound and the baseline are in `unit`. A figure that is unknown or does not
    # apply is None.
    value: float | None = None
    highest_allowed: float | None = None
    lowest_allowed: float | None = None
    baseline: float | None = None
    # The texts of the value, the bound and the baseline. None means that the formatted figure is
    # used.
    value_text: str | None = None
    bound_text: str | None = None
    baseline_text: str | None = None
    reason: str = ""  # What the verdict is based on, or what is missing for a verdict.
    # The detector's result for the whole trace, or None for other limits.
    leak_verdict: LeakVerdict | None = None

    @property
    def name(self) -> str:
        """Return the name of the limit, including its subject if it has one."""
        return f"{self.limit}, {self.subject}" if self.subject else self.limit

    @property
    def has_no_bound(self) -> bool:
        """Return whether the figure is only shown, because no limit was given."""
        is_unlimited = self.highest_allowed is None and self.lowest_allowed is None
        return self.verdict is Conclusion.GOOD and is_unlimited

    @property
    def texts(self) -> tuple[str, str, str]:
        """Return the value, bound and baseline as text.

        An unknown figure is an empty string.
        """
        return (
            self.value_text or format_figure(self.value, self.unit) or "unknown",
            self.bound_text or format_figure(self.highest_allowed, self.unit),
            self.baseline_text or format_figure(self.baseline, self.unit),
        )


def format_figure(figure: float | None, unit: Unit) -> str:
    """Format a figure with its unit; return an empty string for None."""
    if figure is None:
        return ""
    match unit:
        case Unit.BYTES:
            return format_size(figure)
        case Unit.RATIO:
            return f"{figure:+.2%}"
        case Unit.TOKENS:
            return f"{figure:,.0f} tokens"
        case Unit.COUNT if figure < 1000:  # noqa: PLR2004 - from there on three digits are 1e+03
            return f"{figure:.3g}"
        case Unit.COUNT:
            return f"{figure:,.0f}"


def compare_with_limit(
    value: float | None, highest_allowed: float | None, doubt: str | None
) -> Conclusion:
    """Compare a value with its limit.

    The result is "cannot tell" if either is unknown. A value above the limit fails even if there is
    a doubt. A value within the limit passes only without a doubt. A missing part of the trace may
    contain a higher value.
    """
    if value is None or highest_allowed is None:
        return Conclusion.CANNOT_TELL
    if value > highest_allowed:
        return Conclusion.NOT_GOOD
    return Conclusion.GOOD if doubt is None else Conclusion.CANNOT_TELL
