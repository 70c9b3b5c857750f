"""The load of an engine: requests that arrive, wait, run and finish, and the largest batches among its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log, pi, sin, sqrt
from typing import Any, Final

import numpy as np

HOUR: Final = 3600.0
STEP_SECONDS: Final = 0.08
"""Prompts that arrive within one step of a busy engine are one batch."""

PLAYED: Final = 2
"""Batches with prompts that a tick plays, the largest: smaller ones fit into what those leave in the cache."""

CAPACITY_SHARE: Final = 0.95
"""Of the KV cache, above which no request is admitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What requests look like, and what the engine takes at once; lengths are (median, sigma) in tokens.

    At the end of the day prompts are `lengthens` times as long as at its beginning.
    """

    rps: float
    load: str
    hours: float
    prompt: tuple[float, float]
    lengthens: float
    output: tuple[float, float]
    batch_tokens: int
    max_seqs: int
    abort_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Some seconds of an engine: what finished in them, what runs at their end, the batches of the largest steps."""

    seconds: float
    length: float
    started: int
    done: int
    aborted: int
    running: int
    waiting: int
    held_tokens: float
    prompt_tokens: int
    output_tokens: int
    batches: tuple[tuple[int, int], ...]


Rate = Callable[[float], float]
Draw = np.random.Generator


def _level(_draw: Draw, _hours: float) -> Rate:
    return lambda _seconds: 1.0


def _daily(draw: Draw, _hours: float) -> Rate:
    swing, phase = draw.uniform(0.5, 0.85), draw.uniform(0, 2 * pi)
    return lambda seconds: 1 + swing * sin(2 * pi * seconds / (24 * HOUR) + phase)


def _nights(draw: Draw, hours: float) -> Rate:
    begin = draw.uniform(0.3, 0.5) * hours * HOUR
    return lambda seconds: 0.0 if begin <= seconds < begin + 0.3 * hours * HOUR else 1.0


def _bursts(draw: Draw, hours: float) -> Rate:
    bursts = [
        (draw.uniform(0, hours) * HOUR, draw.uniform(120, 900), draw.uniform(1, 4)) for _ in range(int(hours * 1.5))
    ]
    return lambda seconds: 0.5 + sum(times for begin, length, times in bursts if begin <= seconds < begin + length)


def _rising(_draw: Draw, hours: float) -> Rate:
    return lambda seconds: 0.2 + 1.8 * seconds / (hours * HOUR)


def _pauses(draw: Draw, hours: float) -> Rate:
    pauses = [(draw.uniform(0, hours) * HOUR, draw.uniform(0.2, 0.8) * HOUR) for _ in range(4)]
    return lambda seconds: 0.0 if any(begin <= seconds < begin + length for begin, length in pauses) else 1.0


def _doubled(draw: Draw, hours: float) -> Rate:
    begin = draw.uniform(0.4, 0.6) * hours * HOUR
    return lambda seconds: 1.0 if seconds < begin else 2.5


LOADS: Final = {
    "level": _level,
    "daily": _daily,
    "nights": _nights,
    "bursts": _bursts,
    "rising": _rising,
    "pauses": _pauses,
    "doubled": _doubled,
}


class Requests:
    """The requests of one engine; `capacity` is the KV cache's, in tokens."""

    def __init__(self, draw: Draw, day: Draw, shape: Shape, capacity: int) -> None:
        self._draw, self._shape, self._capacity = draw, shape, capacity
        self._wanted = LOADS[shape.load](day, shape.hours)
        self._noise = 0.0
        self._left: Any = np.empty(0)
        self._held: Any = np.empty(0)
        self._waiting: Any = np.empty((0, 2))

    def step(self, seconds: float, length: float) -> Tick:
        """Return the next seconds of the engine."""
        self._arrive(seconds, length)
        admitted = self._admit()
        offsets = np.sort(self._draw.uniform(0, length, len(admitted)))
        speed = 60 / (1 + len(self._left) / 150)
        left_before = np.concatenate([self._left, admitted[:, 1]])
        spent = np.concatenate([np.full(len(self._left), length), length - offsets]) * speed
        held_tokens = np.concatenate([self._held, admitted[:, 0]]) + np.minimum(left_before, spent)
        left_tokens = left_before - spent
        self._left, self._held = left_tokens[left_tokens > 0], held_tokens[left_tokens > 0]
        ended_count = int((left_tokens <= 0).sum())
        aborted = int(self._draw.binomial(ended_count, self._shape.abort_ratio))
        return Tick(
            seconds=seconds,
            length=length,
            started=len(admitted),
            done=ended_count - aborted,
            aborted=aborted,
            running=len(self._left),
            waiting=len(self._waiting),
            held_tokens=float(self._held.sum()),
            prompt_tokens=int(admitted[:, 0].sum()),
            output_tokens=int(np.minimum(left_before, spent).sum()),
            batches=self._batch(admitted, offsets),
        )

    def drop(self) -> None:
        """End all requests, as at a sleep."""
        self._left, self._held, self._waiting = np.empty(0), np.empty(0), np.empty((0, 2))

    def _arrive(self, seconds: float, length: float) -> None:
        keeps = exp(-length / 600)
        self._noise = self._noise * keeps + self._draw.normal(0, 0.1) * sqrt(1 - keeps * keeps)
        rate = self._shape.rps * self._wanted(seconds) * exp(self._noise)
        count = int(self._draw.poisson(max(0.0, rate) * length))
        longer = self._shape.lengthens ** (seconds / (self._shape.hours * HOUR))
        (prompt, spread), (output, output_spread) = self._shape.prompt, self._shape.output
        lengths = [
            np.clip(self._draw.lognormal(log(median), sigma, count), 4, longest).round()
            for median, sigma, longest in ((prompt * longer, spread, 30_000), (output, output_spread, 4_000))
        ]
        self._waiting = np.concatenate([self._waiting, np.stack(lengths, axis=1)])

    def _admit(self) -> Any:
        room = CAPACITY_SHARE * self._capacity - self._held.sum() - self._left.sum()
        fits = int(np.searchsorted(self._waiting.sum(axis=1).cumsum(), room))
        count = min(fits, self._shape.max_seqs - len(self._left))
        admitted, self._waiting = self._waiting[:count], self._waiting[count:]
        return admitted

    def _batch(self, admitted: Any, offsets: Any) -> tuple[tuple[int, int], ...]:
        """Return the tokens and the sequences of the largest steps with prompts, in time's order, then of a decode."""
        running = len(self._left)
        tokens: Any = np.bincount((offsets / STEP_SECONDS).astype(int), weights=admitted[:, 0]) if len(offsets) else []
        largest = sorted(np.argsort(tokens)[-PLAYED:])
        prefill = [min(self._shape.batch_tokens, int(tokens[slot]) + running) for slot in largest if tokens[slot] > 0]
        return (
            *((prompt_tokens, max(1, running)) for prompt_tokens in prefill),
            *(((running, running),) if running else ()),
        )
