"""The simulated world: one GPU, the engine on it and what befalls them."""

from __future__ import annotations

from math import inf
from typing import Final

from vllm_headroom.commands.demo.engine import SMALL_SEGMENT_MIB, Engine, segments
from vllm_headroom.commands.demo.scenario import Recurring, Scenario, Span, Visit, chance
from vllm_headroom.commands.demo.traffic import Demand
from vllm_headroom.units import MIB

TOTAL_BYTES: Final = 81_559 * MIB
RESERVED_BYTES: Final = 600 * MIB
UNATTRIBUTED_BYTES: Final = 20 * MIB
"""Used on a data-centre GPU by no process."""

OUT_OF_MEMORY_BYTES: Final = TOTAL_BYTES - RESERVED_BYTES - 50 * MIB
"""Beyond this much in use the next allocation fails: it is larger than what is left."""

WARM_SECONDS: Final = 3_600
"""The engine has served this long when the demo begins."""

DOWN_SECONDS: Final[Span] = (20.0, 50.0)
"""With a scenario's ordinary loading time, a restart takes one to two minutes."""

NEIGHBOUR_CONTEXT_MIB: Final = 450
NEIGHBOUR_RAMP: Final = 0.2
"""Share of its stay in which the neighbour's memory grows."""


class World:
    """A function of scenario, seed and time alone; `seconds` is the time since the demo began, in whole seconds.

    `busy` is how many requests the GPU works on.
    """

    def __init__(self, scenario: Scenario, seed: int = 0) -> None:
        self.seconds = -WARM_SECONDS
        self.engine = _first_engine(scenario, seed)
        self.busy = 0
        self.neighbour: Visit | None = None
        self._scenario = scenario
        self._seed = seed
        self._demand = Demand(chance(seed, "demand"))
        self._bursts = Recurring(chance(seed, "bursts"), scenario.bursts)
        self._neighbours = Recurring(chance(seed, "neighbours"), scenario.neighbours)
        self._hangs = Recurring(chance(seed, "hangs"), scenario.hangs)
        self._sleeps = Recurring(chance(seed, "sleeps"), scenario.sleeps)
        self._fate = chance(seed, "fate")
        self._ends_seconds = self._next_end(max(0.0, self.engine.serving_seconds))
        self.advance(0.0)

    def advance(self, seconds: float) -> None:
        """Let the world go on to that time; a time that has passed changes nothing."""
        while self.seconds + 1 <= seconds:
            self._step()

    @property
    def serves(self) -> bool:
        """Whether the engine answers."""
        return self.engine.serves(self.seconds)

    @property
    def engine_bytes(self) -> int:
        """GPU memory of the engine's worker."""
        return self.engine.gpu_bytes(self.seconds)

    @property
    def neighbour_bytes(self) -> int:
        """GPU memory of the other process; 0 while there is none."""
        if self.neighbour is None:
            return 0
        visit = self.neighbour
        stay_seconds = visit.leaves_seconds - visit.came_seconds
        grown = min(1.0, (self.seconds - visit.came_seconds) / (NEIGHBOUR_RAMP * stay_seconds))
        growth_mib = visit.size / MIB - NEIGHBOUR_CONTEXT_MIB
        return (NEIGHBOUR_CONTEXT_MIB + segments(grown * growth_mib, SMALL_SEGMENT_MIB)) * MIB

    @property
    def used_bytes(self) -> int:
        """GPU memory in use, without what the driver reserves."""
        return UNATTRIBUTED_BYTES + self.engine_bytes + self.neighbour_bytes

    def _step(self) -> None:
        self.seconds += 1
        burst = self._bursts.at(self.seconds)
        arrived = self._demand.step(self.seconds, 1.0 if burst is None else burst.size)
        self.neighbour = self._neighbours.at(self.seconds)
        hangs = self._hangs.at(self.seconds) is not None
        self.engine.sleep(asleep=self._sleeps.at(self.seconds) is not None)
        if self.serves and not hangs:
            leaking = self.seconds > 0
            self.engine.step(arrived, self._scenario.leak_bytes_per_request if leaking else 0.0)
        self.busy = 0 if hangs else self.engine.traffic.running
        if self.seconds >= self._ends_seconds or self.used_bytes > OUT_OF_MEMORY_BYTES:
            self._restart()

    def _restart(self) -> None:
        started = self.seconds + self._fate.uniform(*DOWN_SECONDS)
        serving = started + self._fate.uniform(*self._scenario.loading_seconds)
        self.engine = Engine(self._seed, self.engine.number + 1, started_seconds=started, serving_seconds=serving)
        self._ends_seconds = self._next_end(serving)

    def _next_end(self, serving_seconds: float) -> float:
        span = self._scenario.restart_after_seconds
        return inf if span is None else serving_seconds + self._fate.uniform(*span)


def _first_engine(scenario: Scenario, seed: int) -> Engine:
    """Return the engine that is there at the beginning."""
    if scenario.cold:
        loading = chance(seed, "first load").uniform(*scenario.loading_seconds)
        return Engine(seed, 0, started_seconds=0.0, serving_seconds=loading)
    return Engine(seed, 0, started_seconds=-WARM_SECONDS - scenario.loading_seconds[1], serving_seconds=-WARM_SECONDS)
