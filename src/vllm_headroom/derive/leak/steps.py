"""The large steps by which memory grew, as they were read; and whether they look like a leak's."""

from __future__ import annotations

from math import log
from typing import Final

from vllm_headroom.derive.leak.facts import MIB, Step

LEAST_STEP_BYTES: Final = 24 * MIB
"""More than a segment for small tensors, 20 MiB (c10 kLargeBuffer)."""

JOINED_SECONDS: Final = 30.0
"""Rises so close to each other are one step: what one load or one batch takes comes within seconds."""

NEWEST_STEPS: Final = 24

ALIKE_BYTES: Final = 2 * MIB
NEARLY_ALIKE: Final = 1.04
REPEATED_BYTES: Final = 96 * MIB
REPEATED, MOST_REPEATED, SMALLER, RECORD = 2.0, 6.0, 0.5, -1.0
"""What a size that comes again says, for each e-fold above 96 MiB and at most; one smaller than some before; and one
above all before. Slots, graphs and kernels are alike too, but smaller. Fitted to simulated days."""


def stepped(steps: tuple[Step, ...], seconds: float, before_bytes: float, held_bytes: float) -> tuple[Step, ...]:
    """Return the steps with the difference between two readings that follow each other."""
    if held_bytes <= before_bytes:
        return _given_back(steps, held_bytes)
    if held_bytes - before_bytes < LEAST_STEP_BYTES:
        return steps
    last = steps[-1] if steps else None
    if last is not None and seconds - last.seconds <= JOINED_SECONDS and last.top_bytes >= before_bytes:
        return (*steps[:-1], Step(last.seconds, last.bottom_bytes, held_bytes))
    return (*steps, Step(seconds, before_bytes, held_bytes))[-NEWEST_STEPS:]


def _given_back(steps: tuple[Step, ...], held_bytes: float) -> tuple[Step, ...]:
    """Return what is left of the steps: nothing above what is held now."""
    while steps and steps[-1].top_bytes > held_bytes:
        last, steps = steps[-1], steps[:-1]
        if held_bytes - last.bottom_bytes >= LEAST_STEP_BYTES:
            return (*steps, Step(last.seconds, last.bottom_bytes, held_bytes))
    return steps


def likeness(steps: tuple[Step, ...], since: float, least_bytes: float) -> float:
    """Return how much the sizes of the steps after a time, of so many bytes at least, speak for a leak.

    As a log likelihood ratio. Records outgrow all before them: the allocator takes a new segment for a demand that fits
    into none that it kept. What leaks is of one kind and one size, or takes the place of segments that are then
    taken again.
    """
    earlier: list[float] = []
    total = 0.0
    for step in steps:
        size = step.top_bytes - step.bottom_bytes
        if size < least_bytes:
            continue
        if step.seconds > since:
            total += _worth(size, earlier)
        earlier.append(size)
    return total


def _worth(size: float, earlier: list[float]) -> float:
    most = max(earlier, default=0.0)
    if size <= most and any(abs(size - other) <= ALIKE_BYTES for other in earlier):
        return min(MOST_REPEATED, max(0.0, REPEATED * log(size / REPEATED_BYTES)))
    if size < most:
        return SMALLER
    return RECORD if size > NEARLY_ALIKE * most else 0.0
