"""The demo's scenarios as data, with their seeded random draws."""

from __future__ import annotations

from math import exp, sqrt
from random import Random
from typing import Final

from msgspec import Struct

from vllm_headroom.units import GIB

Bounds = tuple[float, float]
"""The least and the most; what happens is drawn evenly between them."""


class Visits(Struct, frozen=True, kw_only=True):
    """Something that comes, stays and goes, again and again; `size` is what it brings."""

    pause_seconds: Bounds
    stay_seconds: Bounds
    size: Bounds


class Scenario(Struct, frozen=True, kw_only=True):
    """What happens besides healthy serving; the size of a burst is a factor on the load, of a neighbour bytes.

    With `cold` the engine starts with the demo, else it has served for an hour. While it hangs it takes no step, and
    its page keeps its last values.
    """

    name: str
    leak_bytes_per_request: float = 0.0
    bursts: Visits | None = None
    neighbours: Visits | None = None
    restart_after_seconds: Bounds | None = None
    loading_seconds: Bounds = (40.0, 70.0)
    cold: bool = False
    hangs: Visits | None = None
    sleeps: Visits | None = None


_ALL: Final = (
    Scenario(name="healthy"),
    # 12.8 MB per 1,000 requests: the rate in the post-mortem this project began with.
    Scenario(name="leak", leak_bytes_per_request=12_800.0),
    Scenario(
        name="burst",
        bursts=Visits(pause_seconds=(1_200.0, 2_400.0), stay_seconds=(20.0, 45.0), size=(4.0, 6.0)),
    ),
    Scenario(
        name="neighbour",
        neighbours=Visits(pause_seconds=(300.0, 1_500.0), stay_seconds=(1_200.0, 3_600.0), size=(1.0 * GIB, 3.0 * GIB)),
    ),
    Scenario(name="restart", restart_after_seconds=(6_300.0, 8_100.0)),
    Scenario(name="crash", restart_after_seconds=(600.0, 1_800.0)),
    Scenario(
        name="hang",
        hangs=Visits(pause_seconds=(900.0, 1_500.0), stay_seconds=(300.0, 600.0), size=(1.0, 1.0)),
    ),
    Scenario(name="slow-start", cold=True, loading_seconds=(720.0, 1_800.0), restart_after_seconds=(7_200.0, 10_800.0)),
    Scenario(
        name="sleep",
        sleeps=Visits(pause_seconds=(900.0, 1_500.0), stay_seconds=(600.0, 1_200.0), size=(1.0, 1.0)),
    ),
)
TABLE: Final[dict[str, Scenario]] = {scenario.name: scenario for scenario in _ALL}


def make_random(seed: int, purpose: str) -> Random:
    """Return a separate random generator for `purpose`, so that one part's draws never shift another's."""
    return Random(f"{seed}:{purpose}")  # noqa: S311 - a simulation that must repeat, not a secret


def draw_poisson(random: Random, mean: float) -> int:
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


class Visit(Struct, frozen=True, kw_only=True):
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
        self._visit = None if visits is None else self._draw_visit(visits, 0, 0.0)

    def find_visit(self, seconds: float) -> Visit | None:
        """Return the visit going on at that time, which never goes back; None while there is none."""
        if self._visits is None or self._visit is None:
            return None
        if seconds >= self._visit.leaves_seconds:
            self._visit = self._draw_visit(self._visits, self._visit.number, self._visit.leaves_seconds)
        return self._visit if seconds >= self._visit.came_seconds else None

    def _draw_visit(self, visits: Visits, number: int, since_seconds: float) -> Visit:
        came = since_seconds + self._random.uniform(*visits.pause_seconds)
        return Visit(
            number=number + 1,
            came_seconds=came,
            leaves_seconds=came + self._random.uniform(*visits.stay_seconds),
            size=self._random.uniform(*visits.size),
        )
