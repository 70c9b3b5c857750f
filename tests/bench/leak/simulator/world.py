"""A trace: the engine, its card and its neighbours, tick by tick, as a sidecar samples them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from random import Random
from typing import Any

from simulator.card import GIB, MIB, STEP, Card, CardFullError, rounded
from simulator.engine import Engine
from simulator.host import Heap
from simulator.neighbours import NEIGHBOURS
from simulator.recipe import Recipe
from simulator.traffic import HOUR, Tick, ticks

STARTED = 1_760_000_000.0
LONGEST_TICK = 30.0
LOADING = (60.0, 200.0)
UUID = "GPU-simulated"
JUMPY = ("large steps", "fast", "sibling")
"""Leaks whose rate cannot be said from minutes."""


@dataclass(slots=True)
class Course:
    """A trace and what is true of it."""

    name: str
    seed: int
    recipe: Recipe
    probed: bool = False
    samples: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    oom_at: float | None = None
    onset: float = 0.0
    place: str = "tensors"

    @property
    def leaks(self) -> bool:
        return self.name.startswith("leak_")

    @property
    def location(self) -> str | None:
        """Where it leaks, as the probe inside the engine can know; it asks no allocator of an engine that may sleep."""
        if not self.probed or not self.leaks or self.recipe.host is not None or self.recipe.group == "sibling":
            return None
        return self.place

    def truth(self) -> dict[str, Any]:
        """Return the labels, as the other generator writes them."""
        return {
            "scenario": self.name,
            "seed": self.seed,
            "group": self.recipe.group,
            "leak": self.leaks,
            "ambiguous": self.recipe.ambiguous,
            "series": "gpu" if self.recipe.host is None else Heap.role,
            "steady": self.recipe.load == "level" and self.recipe.group not in JUMPY and not self.recipe.restarts,
            "location": self.location,
            "onset": STARTED + self.onset,
            "started": STARTED,
            "ends": self.samples[-1]["t"],
            "oom_at": None if self.oom_at is None or not self.leaks else STARTED + self.oom_at,
            "t": self.times,
            "leaked_bytes": [round(lost) for lost in self.lost],
        }


class World:
    """Everything that goes on during one trace."""

    def __init__(self, name: str, seed: int, recipe: Recipe, *, probe: bool = False) -> None:
        self.rng = rng = Random(zlib.crc32(name.encode()) * 1_000 + seed)
        self.recipe, self.course = recipe, Course(name, seed, recipe, probed=probe and recipe.sleep is None)
        self.card = Card(rounded(recipe.card_gib * GIB))
        self.full = rng.uniform(*recipe.activations) * MIB
        self.fixed = rounded(self.card.total - rng.uniform(*recipe.room_gib) * GIB - self.full)
        self.neighbour = NEIGHBOURS[recipe.neighbour](rng, self.card)
        self.heap = Heap(rng) if recipe.host is None else recipe.host(rng)
        self.length = min(recipe.interval, LONGEST_TICK)
        self.load = ticks(rng, recipe.load, rng.uniform(*recipe.rps), recipe.hours, self.length)
        self.engine: Engine | None = None
        self.loads_from = self.loads_until = 0.0
        self.process = 0
        self.ends = sorted(rng.uniform(1, recipe.hours - 1) * HOUR for _ in range(recipe.restarts))
        self.resets = sorted(rng.uniform(0, recipe.hours) * HOUR for _ in range(int(recipe.hours / 4)))
        self.counted_from = 0

    def run(self) -> Course:
        """Return the trace to its end, or to the moment a leak has filled the card."""
        self._begin(0.0)
        every = round(self.recipe.interval / self.length)
        for number, tick in enumerate(self.load):
            try:
                self._step(tick)
            except CardFullError:
                self.course.oom_at = tick.seconds
                break
            if self.heap.rss >= self.heap.limit:
                self.course.oom_at = tick.seconds
                break
            if number % every == 0:
                self.course.samples.append(self._sample(tick))
            if number % max(1, round(60 / self.length)) == 0:
                self.course.times.append(STARTED + tick.seconds)
                self.course.lost.append(self._lost())
        return self.course

    def _lost(self) -> float:
        if self.recipe.host is not None:
            return self.heap.lost
        neighbour_lost = 0.0 if self.recipe.attributed else self.neighbour.lost
        return neighbour_lost + (0.0 if self.engine is None else self.engine.lost)

    def _begin(self, now: float) -> None:
        self.engine = Engine(self.rng, self.card, self.recipe, now, fixed=self.fixed, full=self.full)
        self.counted_from = 0
        if now:
            self.process, self.heap = self.process + 1, type(self.heap)(self.rng)
        if self.engine.leak is not None:
            self.course.place = self.engine.leak.place
        self.course.onset = self.heap.onset if self.recipe.host is not None else self._onset()

    def _onset(self) -> float:
        leak = None if self.engine is None else self.engine.leak
        return self.neighbour.onset if leak is None else leak.onset

    def _step(self, tick: Tick) -> None:
        self.neighbour.step(tick)
        if self.engine is None:
            if tick.seconds >= self.loads_until:
                self._begin(tick.seconds)
            return
        if self.ends and tick.seconds >= self.ends[0]:
            self.ends.pop(0)
            self.engine.stop()
            self.engine, self.loads_from = None, tick.seconds
            self.loads_until = tick.seconds + self.rng.uniform(*LOADING)
            return
        self._sleep(tick)
        if not self.engine.asleep:
            self.engine.step(tick)
            self.heap.step(tick)
        if self.recipe.counter == "reset" and self.resets and tick.seconds >= self.resets[0]:
            self.resets.pop(0)
            self.counted_from = self.engine.finished

    def _sleep(self, tick: Tick) -> None:
        assert self.engine is not None
        if self.recipe.sleep is None:
            return
        awake, asleep = self.recipe.sleep
        due = tick.seconds % (awake + asleep) >= awake
        if due and not self.engine.asleep:
            self.engine.sleep()
        elif self.engine.asleep and not due:
            self.engine.wake(self.fixed)

    def _sample(self, tick: Tick) -> dict[str, Any]:
        missed = [self.rng.random() < self.recipe.missed for _ in range(2)]
        return {
            "t": STARTED + tick.seconds,
            "gpus": None if missed[0] else [self._gpu(tick)],
            "engines": None if missed[1] or self.engine is None else [self._page(tick, self.engine)],
            "processes": [{"role": self.heap.role, "rss": self.heap.rss, "started_at": STARTED + self.process}],
            "host": {"used": self.heap.rss, "limit": self.heap.limit},
        }

    def _gpu(self, tick: Tick) -> dict[str, Any]:
        held_bytes = 0 if self.engine is None else self.engine.held
        if self.engine is None:
            done = (tick.seconds - self.loads_from) / (self.loads_until - self.loads_from)
            held_bytes = int(self.fixed * 0.9 * min(1.0, done)) // STEP * STEP
        gpu: dict[str, Any] = {
            "gpu": 0,
            "uuid": UUID,
            "total": self.card.total,
            "used": held_bytes + self.neighbour.held,
        }
        gpu["processes"] = self.neighbour.processes + 1
        if self.recipe.attributed:
            gpu |= {"engine": held_bytes, "other": self.neighbour.held}
        if self.course.probed and self.engine is not None:
            inside = self.engine.inside
            gpu |= {"allocated": inside["allocated"], "reserved_by_torch": inside["reserved"]}
            gpu["parts"] = {"fragmented": inside["inactive_split"]}
        return gpu

    def _page(self, tick: Tick, engine: Engine) -> dict[str, Any]:
        page: dict[str, Any] = {
            "model_name": "m",
            "engine": "0",
            "running": 0.0 if engine.asleep else tick.running,
            "waiting": 0.0,
            "awake": not engine.asleep,
            "started_at": None if self.recipe.counter == "unnamed" else STARTED + engine.began,
        }
        if self.recipe.counter == "none":
            return page
        total = engine.finished - self.counted_from
        if self.recipe.counter == "two":
            is_first_server = round(tick.seconds / self.recipe.interval) % 2 == 0
            total = round(total * (0.53 if is_first_server else 0.47))
        return page | {"finished_total": float(total)}
