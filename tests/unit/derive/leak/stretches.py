"""Hand-made stretches of memory readings: one reading every 15 s, ten requests a second unless said otherwise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import Certainty, Estimate, Observation, Track, start_track
from vllm_headroom.derive.leak.track import observe
from vllm_headroom.units import MIB

HOUR = 3600.0
STEP = 15.0
BASE = 75_000 * MIB
TOTAL = 81_559 * MIB
RATE = 10.0
LEAK = 12_800.0
"""Bytes per request: 12.8 MB per thousand, the post-mortem's leak."""

Shape = Callable[[float], float]
"""Seconds since the start to bytes on top of the base."""


def segments(size: float, segment: int = 2 * MIB) -> float:
    """Round up to the allocator's segments."""
    return math.ceil(size / segment) * segment


def leak(seconds: float) -> float:
    return segments(seconds * RATE * LEAK)


def flat(_seconds: float) -> float:
    return 0.0


def records(seed: int, hours: float) -> Shape:
    """Return high water of random demand per reading: a running maximum, rarer and rarer."""
    usual, highest, steps = NormalDist(sigma=0.5), -math.inf, []
    chance = random.Random(seed)  # noqa: S311 - it plays demand
    for _ in range(int(hours * HOUR / STEP) + 2):
        highest = max(highest, usual.inv_cdf(chance.random() ** (1 / (STEP * RATE))))  # the largest of so many
        steps.append(segments(100 * MIB * math.exp(highest)))
    return lambda seconds: steps[int(seconds / STEP)]


def readings(shape: Shape, hours: float, *, start: float = 0.0, rate: float = RATE) -> Iterator[Observation]:
    for number in range(int(hours * HOUR / STEP)):
        seconds = start + number * STEP
        held_bytes = int(BASE + shape(seconds - start))
        yield Observation(
            seconds=seconds,
            held_bytes=held_bytes,
            finished_total=float(int((seconds - start) * rate)),
            run_id="1",
            room_bytes=max(0, TOTAL - held_bytes),
        )


@dataclass(frozen=True, slots=True)
class Course:
    """What became of a track: its last state, the verdict after every reading and the estimate at the first alarm."""

    track: Track
    verdicts: tuple[Certainty, ...]
    alarm: Estimate | None

    def first(self, verdict: Certainty) -> float | None:
        """Return the hours until the verdict was first reached."""
        first_number = next(
            (number for number, reached_verdict in enumerate(self.verdicts) if reached_verdict >= verdict), None
        )
        return None if first_number is None else first_number * STEP / HOUR

    @property
    def worst(self) -> Certainty:
        return max(self.verdicts)


def follow(observations: Iterable[Observation], track: Track | None = None) -> Course:
    verdicts, alarm = [], None
    for observation in observations:
        track = observe(track or start_track(observation.seconds), observation)
        verdicts.append(track.verdict)
        if track.verdict is Certainty.LEAKING and alarm is None:
            alarm = track.estimate
    assert track is not None
    return Course(track, tuple(verdicts), alarm)


def changed(
    observations: Iterable[Observation], when: Callable[[Observation], bool], **change: object
) -> Iterator[Observation]:
    """Yield the readings, with other values in those for which `when` holds."""
    for observation in observations:
        yield replace(observation, **change) if when(observation) else observation
