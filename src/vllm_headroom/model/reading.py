"""How a reading went: failed, or when it ended."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_headroom.vocabulary import Reason, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A reading that failed; `message` is one sentence for the operator that says what to do."""

    source: Source
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingTime:
    """When the reading of one source ended, and how long it took, both on the machine's monotonic clock."""

    source: Source
    seconds: float
    ended_monotonic_seconds: float
