"""The traces of both generators, and the recorded ones, by name: lines of the trace format and what is true of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import generate
import recorded
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
    lines = [json.loads(line) for line in generate.lines(trace, attributed=attributed)]
    return Labelled(lines[1:], generate.truth(trace))


def simulated(name: str, seed: int, *_: float, attributed: bool = True, probe: bool = False) -> Labelled:
    """Return a trace of the simulator of mechanisms, whose scenarios know their own hours and interval."""
    course = simulate(name, seed, probe=probe)
    return Labelled(course.samples, course.truth())


def replayed(
    name: str, _seed: int = 0, *_: float, attributed: bool = True, probe: bool = False, apart: float = 0.0
) -> Labelled:
    """Return a recorded trace, which knows its own hours and interval, and has no seed."""
    truth, samples = recorded.read(name, apart)
    unknown = (() if attributed else recorded.BY_HOLDER) + (() if probe else recorded.INSIDE)
    return Labelled(list(recorded.drop_fields(samples, unknown)), truth | ({} if probe else {"location": None}))


def thin(samples: list[dict[str, Any]], interval: float) -> list[dict[str, Any]]:
    kept_samples, last_seconds = [], float("-inf")
    for sample in samples:
        if sample["t"] - last_seconds >= interval - 0.01 or sample is samples[-1]:
            kept_samples.append(sample)
            last_seconds = sample["t"]
    return kept_samples


RECORDED = "real allocator"
MAKERS: dict[str, Callable[..., Labelled]] = {"curves": generated, "mechanisms": simulated, RECORDED: replayed}
NAMES = {"curves": (*generate.BENIGN, *generate.LEAK), "mechanisms": tuple(SCENARIOS), RECORDED: recorded.NAMES}


def is_held_out(name: str) -> bool:
    """Return whether nothing was tuned on the scenario."""
    return name in HELD_OUT or name in recorded.HELD_OUT
