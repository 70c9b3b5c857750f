"""What a post-mortem finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """What ended an engine, or made it useless; a closed set, for scripts."""

    LEAK = "out_of_memory_leak"
    BURST = "out_of_memory_burst"
    NEIGHBOUR = "out_of_memory_neighbour"
    KILLED = "killed_by_kernel"
    NEVER_FITTED = "start_never_fitted"
    HANG = "hang"
    CRASH = "crash"
    ORDERLY = "orderly_end"
    UNKNOWN = "unknown"
    NOTHING = "nothing_ended"


class Sureness(StrEnum):
    """How sure a finding is, the surest first: nothing else fits; what fits best; what cannot be excluded."""

    SURE = "sure"
    LIKELY = "likely"
    POSSIBLE = "possible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause that fits, in a sentence, and what shows it."""

    cause: Cause
    sureness: Sureness
    sentence: str
    evidence: tuple[str, ...] = ()
