"""What the smoke test says of one thing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How it went; what could not be tried is never called ok."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Step:
    """How it went with one thing; `text` says what was seen, or why it failed or was skipped, and what to do."""

    state: State
    text: str
