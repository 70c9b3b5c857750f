"""One series of memory readings: a GPU's, or a role's on the host."""

from __future__ import annotations

from vllm_headroom.commands.check.costs import Costs
from vllm_headroom.commands.check.coverage import Coverage
from vllm_headroom.derive.leak.facts import Observation
from vllm_headroom.trace.course import Course


class Series:
    """What was read of the memory of one GPU or one role.

    `course` is what the detector says of it. `readings` are what the detector is fed, and only kept if `keeps` says so.
    `total_bytes` is the GPU's size.
    """

    def __init__(self, name: str, course: Course, *, keeps: bool) -> None:
        self.name = name
        self.course = course
        self.coverage = Coverage()
        self.costs = Costs()
        self.readings: list[Observation] = []
        self.total_bytes: int | None = None
        self._keeps = keeps

    def step(self, seen: Observation, running: float | None) -> None:
        """Add a reading; `running` is the load it counts for, None where it counts for none."""
        if self._keeps:
            self.readings.append(seen)
        if seen.held_bytes is None:
            return
        self.coverage.step(seen.seconds)
        if running and seen.held_bytes:  # held is 0 where the engine died between the two readings
            self.costs.step(seen.held_bytes, running)
