"""What the smoke test says of one thing."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class State(StrEnum):
    """How it went; what could not be tried is never called ok."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


class Step(Struct, frozen=True):
    """How it went with one thing; `text` says what was seen, or why it failed or was skipped, and what to do."""

    state: State
    text: str
