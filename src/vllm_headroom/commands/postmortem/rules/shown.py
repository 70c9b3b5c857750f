"""Evidence that several rules show."""

from __future__ import annotations

from vllm_headroom.commands.postmortem.facts import Facts, GpuFacts
from vllm_headroom.units import size


def left(gpu: GpuFacts) -> str:
    """Return how much room a GPU had left."""
    if gpu.last_room_bytes is None:
        return f"what was left on GPU {gpu.index} is not known"
    before = "" if gpu.first_room_bytes is None else f", {size(max(0, gpu.first_room_bytes))} when this life began"
    return f"{size(max(0, gpu.last_room_bytes))} were left on GPU {gpu.index}{before}"


def ran(facts: Facts) -> str:
    """Return what the engine did when its page was last seen."""
    if facts.running is None:
        return "what it did then is not known"
    return f"{facts.running:.0f} requests ran when its page was last seen" if facts.running else "no request ran"
