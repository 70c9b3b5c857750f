"""Readings over a trace: of a memory, of what was held at which load, and beyond what was to be held."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.discrepancy import discrepancy
from vllm_headroom.derive.leak.baseline import READINGS, load_band
from vllm_headroom.derive.leak.facts import Observation
from vllm_headroom.model import Failure, Snapshot
from vllm_headroom.trace.course import Course
from vllm_headroom.trace.replay import LONGEST_STEP_SECONDS
from vllm_headroom.vocabulary import MemoryPart

Key = TypeVar("Key", int, MemoryPart)
Reading = tuple[Observation, float]
"""What the detector was told, and the requests that had finished by then as it counts them."""


class Budget(Struct, frozen=True, kw_only=True):
    """What the operator says that the engine should use of each GPU: bytes, a ratio of the whole, or nothing.

    It stands for what the engine says itself.
    """

    reported_bytes: int | None = None
    utilization_ratio: float | None = None


class Excess(Struct, frozen=True, kw_only=True):
    """A discrepancy (signed), as ratio and in bytes, and when it was read."""

    ratio: float
    n_bytes: float
    seconds: float


def excesses(snapshot: Snapshot, budget: Budget) -> Iterator[tuple[str, Excess]]:
    """Yield the UUID of each GPU of which it is said what to use, and the discrepancy, by the daemon's derivation."""
    found = discrepancy(_told(snapshot, budget), configured_bytes=budget.reported_bytes)
    in_bytes = {sample.labels: sample.value for sample in found if sample.metric is catalog.MEMORY_DISCREPANCY}
    for sample in found:
        if sample.metric is catalog.MEMORY_DISCREPANCY_RATIO:
            n_bytes = in_bytes[sample.labels]
            yield sample.labels[1], Excess(ratio=sample.value, n_bytes=n_bytes, seconds=snapshot.time_seconds)


def _told(snapshot: Snapshot, budget: Budget) -> Snapshot:
    """Return the snapshot with the operator's budget on the engine's page, where a live engine has it."""
    if budget == Budget() or isinstance(snapshot.engines, Failure):
        return snapshot
    engines = tuple(
        replace(
            engine,
            gpu_memory_utilization_ratio=budget.utilization_ratio,
            kv_cache_memory_bytes=None,
            memory_bytes=None,
        )
        for engine in snapshot.engines.engines
    )
    return replace(snapshot, engines=replace(snapshot.engines, engines=engines))


class Coverage:
    """The time in which something was read without a gap."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: float | None = None

    def step(self, now: float) -> None:
        """Add a reading; a clock that was set back begins anew."""
        if self._last is not None and 0 < now - self._last <= LONGEST_STEP_SECONDS:
            self.seconds += now - self._last
        self._last = now


class Cost(Struct, frozen=True, kw_only=True):
    """Memory while about as many requests ran: means over the readings."""

    held_bytes: float
    running: float

    @property
    def bytes_per_request(self) -> float:
        """Memory over running requests."""
        return self.held_bytes / self.running


class Means(Generic[Key]):
    """The means of a figure, by what it was read of."""

    def __init__(self) -> None:
        self._counts: Counter[Key] = Counter()
        self._sums: defaultdict[Key, float] = defaultdict(float)

    def step(self, key: Key, value: float) -> None:
        """Add a reading."""
        self._counts[key] += 1
        self._sums[key] += value

    def of(self, least: int = 1) -> dict[Key, float]:
        """Return the means in the order of their keys, those of fewer than `least` readings left out."""
        return {key: self._sums[key] / count for key, count in sorted(self._counts.items()) if count >= least}


class MemorySeries:
    """What was read of the memory of one GPU or one role, which `key` names in the trace.

    `course` is what the detector says of it. `readings` are what the detector is fed, and only kept if `keeps` says so.
    Of a GPU alone, `total_bytes` is its size, `excess` its highest discrepancy, known for so long as `told` says.
    """

    def __init__(self, key: str, name: str, course: Course, *, keeps: bool) -> None:
        self.key, self.name = key, name
        self.course = course
        self.coverage, self.told = Coverage(), Coverage()
        self.parts: Means[MemoryPart] = Means()
        self._held: Means[int] = Means()
        self._ran: Means[int] = Means()
        self.readings: list[Reading] = []
        self.total_bytes: int | None = None
        self.excess: Excess | None = None
        self._keeps = keeps

    def step(self, seen: Observation, told: Observation | None, requests: float, running: float | None) -> None:
        """Add a reading after so many requests, and what the detector was told of it.

        `running` is the load it counts for, None where it counts for none.
        """
        if self._keeps and told is not None:
            self.readings.append((told, requests))
        if seen.held_bytes is None:
            return
        self.coverage.step(seen.seconds)
        if running and seen.held_bytes:  # held is 0 where the engine died between the two readings
            self._held.step(load_band(running), seen.held_bytes)
            self._ran.step(load_band(running), running)

    @property
    def costs(self) -> dict[int, Cost]:
        """What was held by the bands of load in which the daemon compares it, from the idlest to the busiest."""
        held, ran = self._held.of(READINGS), self._ran.of(READINGS)
        return {band: Cost(held_bytes=held[band], running=ran[band]) for band in held}

    @property
    def busiest(self) -> Cost | None:
        """The cost at the highest load with enough readings; None when no load has as many."""
        return next(reversed(self.costs.values()), None)

    def exceeds(self, excess: Excess) -> None:
        """Add a discrepancy."""
        self.told.step(excess.seconds)
        if self.excess is None or excess.ratio > self.excess.ratio:
            self.excess = excess
