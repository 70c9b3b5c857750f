"""Chance that repeats: every draw of the demo follows from its seed."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, sqrt
from random import Random

from vllm_headroom.commands.demo.scenario import Visits


def chance(seed: int, purpose: str) -> Random:
    """Return a source of chance of its own for `purpose`, so that one part's draws never shift another's."""
    return Random(f"{seed}:{purpose}")  # noqa: S311 - a simulation that must repeat, not a secret


def poisson(random: Random, mean: float) -> int:
    """Return how many events happen where `mean` (below 700, for exp) are expected; by Knuth's product of draws."""
    limit, product, events = exp(-mean), random.random(), 0
    while product > limit:
        product *= random.random()
        events += 1
    return events


class Drift:
    """A value around 0 that wanders and returns: a first-order autoregressive process, one step a second."""

    def __init__(self, random: Random, *, deviation: float, memory_seconds: float) -> None:
        self._random = random
        self._persistence = exp(-1.0 / memory_seconds)
        self._shock = deviation * sqrt(1.0 - self._persistence**2)
        self._value = 0.0

    def step(self) -> float:
        """Return the value a second later."""
        self._value = self._persistence * self._value + self._random.gauss(0.0, self._shock)
        return self._value


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One stay; `number` counts from 1."""

    number: int
    came_seconds: float
    leaves_seconds: float
    size: float


class Recurring:
    """Something that visits again and again; never, where `visits` is None."""

    def __init__(self, random: Random, visits: Visits | None) -> None:
        self._random = random
        self._visits = visits
        self._visit = None if visits is None else self._next(visits, 0, 0.0)

    def at(self, seconds: float) -> Visit | None:
        """Return the visit going on at that time, which never goes back; None while there is none."""
        if self._visits is None or self._visit is None:
            return None
        if seconds >= self._visit.leaves_seconds:
            self._visit = self._next(self._visits, self._visit.number, self._visit.leaves_seconds)
        return self._visit if seconds >= self._visit.came_seconds else None

    def _next(self, visits: Visits, number: int, since_seconds: float) -> Visit:
        came = since_seconds + self._random.uniform(*visits.pause_seconds)
        return Visit(
            number=number + 1,
            came_seconds=came,
            leaves_seconds=came + self._random.uniform(*visits.stay_seconds),
            size=self._random.uniform(*visits.size),
        )
