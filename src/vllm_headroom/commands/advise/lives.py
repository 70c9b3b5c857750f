"""How lives of an engine ended: before it served, or while it did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A start of the engine that ended before it served: what it held at the most, what was left at the least.

    `room_before_bytes` is what was left before it; None where not known.
    """

    most_held_bytes: float
    least_room_bytes: float | None
    most_others_bytes: float
    room_before_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """An end of an engine that served: what ran and what was left of a GPU at the last sample, None where not known.

    `orphan_bytes` is what processes of its own went on to hold.
    """

    seconds: float
    running: float | None
    room_bytes: float | None
    orphan_bytes: float
