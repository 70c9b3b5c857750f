"""What one engine's KV cache still held in idle times of a trace."""

from __future__ import annotations

from vllm_headroom.commands.advise.engine_facts import StrandedFacts
from vllm_headroom.derive.life.movement import IDLE_SECONDS
from vllm_headroom.model import EngineReading


class Idle:
    """Follows the idle times of one life: what was held a minute after the last request, and whether it rose each time.

    What falls was given back after all, and what came before it is no leak.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._seconds = 0.0
        self._ratios: list[float] = []

    def step(self, reading: EngineReading, seconds: float) -> None:
        """Go on to the next sample, `seconds` after the one before."""
        if reading.started_at_seconds != self._began:
            self._began, self._seconds, self._ratios = reading.started_at_seconds, 0.0, []
        if reading.running or reading.waiting or reading.running is None or reading.awake is False:
            self._seconds = 0.0
            return
        self._seconds += seconds
        held = reading.kv_used_ratio
        if self._seconds < IDLE_SECONDS or held is None:
            return
        if not self._ratios or held < self._ratios[-1]:
            self._ratios = [held]
        elif held > self._ratios[-1]:
            self._ratios.append(held)

    def facts(self) -> StrandedFacts | None:
        """Return what is known; None where the engine was never idle for a minute."""
        if not self._ratios:
            return None
        return StrandedFacts(ratio=self._ratios[-1], first_ratio=self._ratios[0], rises=len(self._ratios) - 1)
