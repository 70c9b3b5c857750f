"""How many requests finish in every tick, and how many run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, pi, sin, sqrt
from random import Random

HOUR = 3600.0
Wanted = Callable[[float], float]
"""Requests per second at a time."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A stretch of time: when it ends, how long it is, the requests that finish in it and those that run."""

    seconds: float
    length: float
    done: int
    running: float


def ticks(rng: Random, kind: str, rps: float, hours: float, length: float) -> list[Tick]:
    """Return the load of a trace, tick by tick."""
    wanted = WANTED[kind](rng, rps, hours)
    latency = rng.uniform(4, 12)
    noise, running, course = 0.0, wanted(0.0) * latency, []
    keeps, stays = exp(-length / 600.0), exp(-length / latency)
    for number in range(int(hours * HOUR / length)):
        noise = noise * keeps + rng.gauss(0, 0.1) * sqrt(1 - keeps * keeps)
        rate = wanted(number * length) * exp(noise)
        target = rate * latency
        running = max(
            0.0, running * stays + target * (1 - stays) + rng.gauss(0, 1) * sqrt(target * (1 - stays * stays))
        )
        course.append(Tick(number * length, length, poisson(rng, rate * length), round(running)))
    return course


def poisson(rng: Random, mean: float) -> int:
    if mean > 30:
        return max(0, round(rng.gauss(mean, sqrt(mean))))
    threshold, count = exp(-mean), 0
    product = rng.random()
    while product > threshold:
        product *= rng.random()
        count += 1
    return count


def _level(rng: Random, rps: float, hours: float) -> Wanted:
    return lambda _seconds: rps


def _daily(rng: Random, rps: float, hours: float) -> Wanted:
    swing, phase = rng.uniform(0.5, 0.85), rng.uniform(0, 2 * pi)
    return lambda seconds: rps * (1 + swing * sin(2 * pi * seconds / (24 * HOUR) + phase))


def _office(rng: Random, rps: float, hours: float) -> Wanted:
    begin = rng.uniform(0, 24) * HOUR
    return lambda seconds: rps * (1.0 if (seconds + begin) % (24 * HOUR) < 10 * HOUR else 0.05)


def _bursts(rng: Random, rps: float, hours: float) -> Wanted:
    bursts = [(rng.uniform(0, hours) * HOUR, rng.uniform(120, 900), rng.uniform(2, 6)) for _ in range(int(hours * 1.5))]
    bursts.sort()
    cells: dict[int, float] = {}
    for begin, length, times in bursts:
        for minute in range(int(begin / 60), int((begin + length) / 60) + 1):
            cells[minute] = cells.get(minute, 0.0) + times
    return lambda seconds: rps * (0.6 + 0.4 * cells.get(int(seconds / 60), 0.0))


def _pauses(rng: Random, rps: float, hours: float) -> Wanted:
    pauses = [(rng.uniform(0, hours) * HOUR, rng.uniform(0.5, 4) * HOUR) for _ in range(rng.randint(2, 5))]
    return lambda seconds: 0.0 if any(begin <= seconds < begin + length for begin, length in pauses) else rps


def _steps(rng: Random, rps: float, hours: float) -> Wanted:
    when, times = rng.uniform(0.3, 0.7) * hours * HOUR, rng.uniform(1.8, 4)
    return lambda seconds: rps if seconds < when else rps * times


def _rollouts(rng: Random, rps: float, hours: float) -> Wanted:
    return lambda seconds: rps * (2.0 if seconds % 480 < 300 else 0.7)


WANTED = {
    "level": _level,
    "daily": _daily,
    "office": _office,
    "bursts": _bursts,
    "pauses": _pauses,
    "steps": _steps,
    "rollouts": _rollouts,
}
