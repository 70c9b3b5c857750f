"""What a scenario is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from simulator.allocator import Allocator
from simulator.card import Card
from simulator.leaks import Leak
from simulator.parts import Part

MakePart = Callable[[Random, Allocator, Card], Part]
MakeLeak = Callable[[Random, Allocator, Card], Leak]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A scenario: ranges are drawn from for each seed; sizes in MiB or GiB as the names say, times in seconds.

    `ambiguous` ones are benign growth that nobody
    outside the process can tell from a leak for hours. `sleep` is (awake, asleep), `restarts` the number of runs more,
    `counter` one of whole, none, two, reset and unnamed.
    """

    group: str
    ambiguous: bool = False
    leak: MakeLeak | None = None
    host: Callable[[Random], Any] | None = None
    hours: float = 24.0
    interval: float = 5.0
    load: str = "level"
    rps: tuple[float, float] = (2.0, 20.0)
    card_gib: float = 79.6
    room_gib: tuple[float, float] = (3.5, 7.5)
    activations: tuple[float, float] = (200.0, 1500.0)
    drift: float = 0.0
    expandable: bool = False
    parts: tuple[MakePart, ...] = ()
    sleep: tuple[float, float] | None = None
    restarts: int = 0
    neighbour: str = "none"
    counter: str = "whole"
    attributed: bool = True
    missed: float = 0.0
