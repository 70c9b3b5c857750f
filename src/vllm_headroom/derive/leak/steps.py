"""The large steps by which memory grew, as they were read; and whether they look like a leak's."""

from __future__ import annotations

from math import log
from typing import Final

from vllm_headroom.derive.leak.facts import MIB, Step

LEAST_STEP_BYTES: Final = 24 * MIB
"""More than a segment for small tensors, 20 MiB (c10 kLargeBuffer)."""

JOINED_SECONDS: Final = 60.0
"""Steps so close to each other are one event: what one load or one batch takes comes within a minute."""

NEWEST_STEPS: Final = 32

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
    return (*steps, Step(seconds, before_bytes, held_bytes))[-NEWEST_STEPS:]


def _given_back(steps: tuple[Step, ...], held_bytes: float) -> tuple[Step, ...]:
    """Return what is left of the steps: nothing above what is held now."""
    while steps and steps[-1].top_bytes > held_bytes:
        last, steps = steps[-1], steps[:-1]
        if held_bytes - last.bottom_bytes >= LEAST_STEP_BYTES:
            return (*steps, Step(last.seconds, last.bottom_bytes, held_bytes))
    return steps


def likeness(steps: tuple[Step, ...], since: float, least_bytes: float) -> float:
    """Return how much the sizes of the events after a time, of so many bytes at least, speak for a leak.

    As a log likelihood ratio. Records outgrow all before them: the allocator takes a new segment for a demand that fits
    into none that it kept. What leaks is of one kind and one size, or takes the place of segments that are then
    taken again, each in the size that it had: so the parts of an event are compared too, with those of earlier ones.
    """
    earlier: list[float] = []
    most = total = 0.0
    for event in _events(steps):
        size = event[-1].top_bytes - event[0].bottom_bytes
        if size < least_bytes:
            continue
        parts = {size, *(step.top_bytes - step.bottom_bytes for step in event)}
        if event[0].seconds > since:
            again = [part for part in parts if least_bytes <= part <= most and _is_among(part, earlier)]
            total += _repeated(max(again)) if again else _new(size, most)
        earlier += parts
        most = max(most, size)
    return total


def _events(steps: tuple[Step, ...]) -> list[list[Step]]:
    events: list[list[Step]] = []
    for step in steps:
        if events and step.seconds - events[-1][-1].seconds <= JOINED_SECONDS:
            events[-1].append(step)
        else:
            events.append([step])
    return events


def _is_among(size: float, earlier: list[float]) -> bool:
    return any(abs(size - other) <= ALIKE_BYTES for other in earlier)


def _repeated(size: float) -> float:
    return min(MOST_REPEATED, max(0.0, REPEATED * log(size / REPEATED_BYTES)))


def _new(size: float, most: float) -> float:
    if size < most:
        return SMALLER
    return RECORD if size > NEARLY_ALIKE * most else 0.0
