"""How a reading went: failed, or when it ended."""

from __future__ import annotations

from msgspec import Struct

from vllm_headroom.vocabulary import Reason, Source


class Failure(Struct, frozen=True, kw_only=True):
    """A reading that failed; `message` is one sentence for the operator that says what to do."""

    source: Source
    reason: Reason
    message: str


class ReadingTime(Struct, frozen=True, kw_only=True):
    """When the reading of one source ended, and how long it took, both on the machine's monotonic clock."""

    source: Source
    seconds: float
    ended_monotonic_seconds: float
