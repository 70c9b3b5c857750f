"""A rule on starts that came to nothing."""

from __future__ import annotations

from typing import Final

from vllm_headroom.commands.postmortem.facts import FULL_BYTES, Facts, What
from vllm_headroom.commands.postmortem.finding import Cause, Finding, Sureness
from vllm_headroom.commands.postmortem.rules.shown import left
from vllm_headroom.units import GIB, duration, size

OTHERS_BYTES: Final = GIB
"""Others that hold less are contexts."""

LITTLE_RATIO: Final = 0.08
"""Less of the card than what vLLM leaves free by default: the start went as far as it could."""


def never_fitted(facts: Facts) -> Finding | None:
    """Fit where an engine ended before it served, with little left, or with others on its GPU."""
    gpu = facts.worst
    if facts.what is not What.ENDED or facts.served or gpu is None or gpu.last_room_bytes is None:
        return None
    others = gpu.last_other_bytes or 0
    little = gpu.total_bytes is not None and gpu.last_room_bytes < LITTLE_RATIO * gpu.total_bytes
    if others < OTHERS_BYTES and not little:
        return None
    told = (f"others held {size(others)} of it",) if others >= OTHERS_BYTES else ()
    return Finding(
        cause=Cause.NEVER_FITTED,
        sureness=Sureness.SURE if gpu.last_room_bytes <= FULL_BYTES else Sureness.LIKELY,
        sentence=f"A start that never fitted: it ended after {duration(facts.seen_seconds)} and had not served.",
        evidence=(left(gpu), *told),
    )
