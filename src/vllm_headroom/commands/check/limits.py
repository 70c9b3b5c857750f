"""What is allowed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits that were given: each is kept up to its value; None is no limit."""

    discrepancy_ratio: float | None = None
    leak_bytes: float | None = None
    host_leak_bytes: float | None = None
    bytes_per_request: float | None = None
    preemptions: float | None = None
    growth_ratio: float | None = None
    restarts: int = 0
