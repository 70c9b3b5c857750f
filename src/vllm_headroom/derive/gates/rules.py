"""When the gates close, by what the operator says."""

from __future__ import annotations

from msgspec import Struct


class Rules(Struct, frozen=True, kw_only=True):
    """When the gates close; None where a gate is not configured.

    `ready_seconds` is the time to out-of-memory that must be left, `ready_most_seconds` the longest that the gate is
    closed, `live_seconds` the least time from one restart to the next, `name` that of the replica.
    """

    ready_seconds: float | None
    ready_most_seconds: float
    live_seconds: float | None
    name: str
