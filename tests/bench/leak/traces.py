"""Both generators' traces by name, as lines of the trace format and what is true of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import generate
from simulator.scenarios import HELD_OUT, SCENARIOS, simulate


@dataclass(frozen=True)
class Labelled:
    """A trace: its samples after the header, and its truth."""

    samples: list[dict[str, Any]]
    truth: dict[str, Any]


def generated(
    name: str, seed: int, hours: float, interval: float, *, attributed: bool = True, probe: bool = False
) -> Labelled:
    """Return a trace of the generator that draws curves, which has no allocator that a probe could read."""
    trace = generate.make(name, seed, hours, interval)
    lines = [json.loads(line) for line in generate.lines(trace, attributed)]
    return Labelled(lines[1:], generate.truth(trace))


def simulated(name: str, seed: int, *_: float, attributed: bool = True, probe: bool = False) -> Labelled:
    """Return a trace of the simulator of mechanisms, whose scenarios know their own hours and interval."""
    course = simulate(name, seed, probe=probe)
    return Labelled(course.samples, course.truth())


MAKERS: dict[str, Callable[..., Labelled]] = {"curves": generated, "mechanisms": simulated}
NAMES = {"curves": (*generate.BENIGN, *generate.LEAK), "mechanisms": tuple(SCENARIOS)}


def is_held_out(name: str) -> bool:
    """Return whether nothing was tuned on the scenario."""
    return name in HELD_OUT
