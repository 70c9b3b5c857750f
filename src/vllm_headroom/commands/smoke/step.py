"""What the smoke test says of one thing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Name(StrEnum):
    """What is tried, in this order; a closed set, for scripts."""

    HEALTH = "health"
    COMPLETION = "completion"
    METRICS = "metrics"
    DISCREPANCY = "discrepancy"


class State(StrEnum):
    """How it went; what could not be tried is never called ok."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Step:
    """How it went with one thing; `text` says what was seen, or why it failed or was skipped, and what to do."""

    name: Name
    state: State
    text: str
