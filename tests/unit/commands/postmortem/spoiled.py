"""The made-up incidents as a sidecar has them that saw less: a side is missing, it was away, or its clock was set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Final

from tests.unit.commands.postmortem.scenes import Record, Scene

MINUTE: Final = 60.0
Spoil = Callable[[Scene, Random], Scene]


def without_engines(scene: Scene, _: Random) -> Scene:
    """No page was ever read: another port, or a proxy before it."""
    return replace(scene, samples=[{**sample, "engines": None} for sample in scene.samples])


def without_gpus(scene: Scene, _: Random) -> Scene:
    """NVML never answered."""
    return replace(scene, samples=[{**sample, "gpus": None} for sample in scene.samples])


def without_processes(scene: Scene, _: Random) -> Scene:
    """The sidecar has no view of the engine's processes."""
    return replace(scene, samples=[{**sample, "processes": None} for sample in scene.samples])


def away_before(scene: Scene, rng: Random) -> Scene:
    """The sidecar was begun again minutes before the end, and back before it."""
    ends = end_of(scene)
    back = ends - rng.uniform(0.5, 3) * MINUTE
    return _without(scene, back - rng.uniform(1, 10) * MINUTE, back)


def away_at_the_end(scene: Scene, rng: Random) -> Scene:
    """It was away when the engine ended, and for a little before."""
    ends = end_of(scene)
    return _without(scene, ends - rng.uniform(5, 60), ends + rng.uniform(1, 10))


def clock_set(scene: Scene, rng: Random) -> Scene:
    """The clock is set in the midst of it, back or ahead; what began before has the old time."""
    at, shift = scene.samples[rng.randint(1, len(scene.samples) - 2)]["t"], rng.choice((-1, 1)) * rng.uniform(30, 9000)

    def moved(seconds: float) -> float:
        return seconds + shift if seconds >= at else seconds

    header = None if scene.header is None else {**scene.header, "t": moved(scene.header["t"])}
    return replace(scene, samples=[{**sample, "t": moved(sample["t"])} for sample in scene.samples], header=header)


def only_the_end(scene: Scene, rng: Random) -> Scene:
    """The record began minutes before: a volume that was made again."""
    return _without(scene, 0.0, end_of(scene) - rng.uniform(4, 12) * MINUTE)


def seldom(scene: Scene, _: Random) -> Scene:
    """A sample in half a minute."""
    slots = {int(sample["t"] // 30): sample for sample in reversed(scene.samples)}
    return replace(scene, samples=[slots[slot] for slot in sorted(slots)])


def end_of(scene: Scene) -> float:
    """Return when it ended: when nothing is held any more, or as its header says."""
    if scene.header is not None:
        return float(scene.header["t"])
    busy_seconds = [sample["t"] for sample in scene.samples if any(gpu["used"] for gpu in sample["gpus"])]
    free_seconds = [sample["t"] for sample in scene.samples if not any(gpu["used"] for gpu in sample["gpus"])]
    return float(
        min((at for at in free_seconds if at > busy_seconds[len(busy_seconds) // 2]), default=busy_seconds[-1])
    )


def _without(scene: Scene, begin: float, end: float) -> Scene:
    records: list[Record] = [sample for sample in scene.samples if not begin <= sample["t"] < end]
    return replace(scene, samples=records)


SPOILS: Final[tuple[Spoil, ...]] = (
    without_engines,
    without_gpus,
    without_processes,
    away_before,
    away_at_the_end,
    clock_set,
    only_the_end,
    seldom,
)

KEEP_ENOUGH: Final = (without_processes, clock_set, only_the_end)
"""What is still there shows the cause."""
