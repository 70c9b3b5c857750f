"""Everything about a trace that a limit may be set on, and why it may not suffice."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.discrepancy import discrepancy
from vllm_headroom.derive.leak.facts import Observation, observations
from vllm_headroom.derive.leak.leak import host_observations
from vllm_headroom.derive.leak.shape import GROWING_SECONDS
from vllm_headroom.derive.life.signs import of_service
from vllm_headroom.derive.per_request import READINGS, WARM_REQUESTS, load_band
from vllm_headroom.derive.readings import finished, named, running_requests, together
from vllm_headroom.model import EnginePage, Failure, Gpu, Snapshot
from vllm_headroom.units import duration
from vllm_headroom.vocabulary import MemoryPart, Role
from vllm_headroom_tools.history.counter import Rise
from vllm_headroom_tools.history.course import Course
from vllm_headroom_tools.history.replay import LONGEST_STEP_SECONDS, Watch

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


class Record:
    """A trace, read to its end.

    `host` is by role, `capacity_tokens` (the least seen) by engine.
    """

    def __init__(self, budget: Budget, *, keeps_gpus: bool, keeps_host: bool) -> None:
        self.watched, self.engine = Coverage(), Coverage()
        self.finished, self.preemptions = Rise(), Rise()
        self.host: dict[Role, MemorySeries] = {}
        self.capacity_tokens: dict[str, float] = {}
        self.models: set[str] = set()
        self._budget = budget
        self._keeps_gpus, self._keeps_host = keeps_gpus, keeps_host
        self._gpus: dict[str, MemorySeries] = {}
        self._detector = Watch()
        self._life = 0

    @property
    def restarts(self) -> int:
        """How often the engine began anew."""
        return self._detector.lives.restarts

    @property
    def samples(self) -> int:
        """How many samples the trace has."""
        return self._detector.samples

    @property
    def span_seconds(self) -> float:
        """From the first sample to the last; what was watched where a clock was set back."""
        begin, end = self._detector.span
        return max(end - begin, self.watched.seconds)

    @property
    def gpus(self) -> tuple[MemorySeries, ...]:
        """The GPUs, in the order of their indices."""
        return tuple(self._gpus[uuid] for _, uuid, _ in self._detector.gpus if uuid in self._gpus)

    @property
    def expects(self) -> bool:
        """Whether anybody, the operator or the engine, says what the engine should use."""
        return self._budget != Budget() or any(gpu.excess for gpu in self._gpus.values())

    def step(self, snapshot: Snapshot) -> None:
        """Add one sample."""
        now = snapshot.time_seconds
        served = of_service(self._detector.step(snapshot))
        told: dict[str, Observation] = {gpu.reading.uuid: seen for gpu, seen in observations(served, served.devices)}
        told.update(host_observations(served))
        self.watched.step(now)
        page = snapshot.page
        if page is not None and named(page):
            self._engines(page, now)
        running = None if (finished(page) or 0.0) < WARM_REQUESTS else running_requests(page)
        for gpu, seen in observations(snapshot, snapshot.devices):
            self._gpu(gpu, seen, told.get(gpu.reading.uuid), running)
        for uuid, excess in excesses(snapshot, self._budget):
            self._gpus[uuid].exceeds(excess)
        for role, seen in host_observations(snapshot):
            new = MemorySeries(role, role, self._detector.course(role), keeps=self._keeps_host)
            self.host.setdefault(role, new).step(seen, told.get(role), self._detector.requests(role), running)

    def _gpu(self, gpu: Gpu, seen: Observation, told: Observation | None, running: float | None) -> None:
        reading, uuid = gpu.reading, gpu.reading.uuid
        new = MemorySeries(uuid, reading.called, self._detector.course(uuid), keeps=self._keeps_gpus)
        series = self._gpus.setdefault(uuid, new)
        series.total_bytes = series.total_bytes if reading.memory is None else reading.memory.total_bytes
        series.step(seen, told, self._detector.requests(uuid), running)
        for part, part_bytes in () if running is None or gpu.inside is None else gpu.inside.parts:
            series.parts.step(part, part_bytes)

    def _engines(self, page: EnginePage, now: float) -> None:
        self.engine.step(now)
        anew, self._life = self.restarts != self._life, self.restarts
        self.finished.step(finished(page), anew=anew)
        self.preemptions.step(together(engine.preemptions_total for engine in named(page)), anew=anew)
        for engine in named(page):
            self.models.add(engine.model_name)
            if engine.kv_capacity_tokens is not None:
                least = self.capacity_tokens.get(engine.engine, engine.kv_capacity_tokens)
                self.capacity_tokens[engine.engine] = min(least, engine.kv_capacity_tokens)


def paired(record: Record, before: Record | None) -> Iterator[tuple[MemorySeries, MemorySeries | None]]:
    """Yield each GPU and its like in another trace, or None.

    They are alike by UUID, else by their place among the indices: another machine's GPUs have other UUIDs.
    """
    old = () if before is None else before.gpus
    same = {gpu.key: gpu for gpu in old}
    for place, gpu in enumerate(record.gpus):
        yield gpu, same.get(gpu.key) or (old[place] if place < len(old) else None)


LEAST_SECONDS: Final = GROWING_SECONDS
LEAST_REQUESTS: Final = WARM_REQUESTS
"""First uses of kernels are over by then; before, memory says little about what it will be."""

LEAST_SHARE: Final = 0.9
"""Of the trace, in which a figure must be known: a peak may hide in the rest."""


def doubt(record: Record, coverage: Coverage | None, what: str) -> str | None:
    """Return what is missing for `what`, which `coverage` tells was read for how long; None when nothing is."""
    return too_little(record) or unread(record, record.engine, "the engine") or unread(record, coverage, what)


def too_little(record: Record) -> str | None:
    """Return why the trace is too short; None when it is not."""
    if not record.samples:
        return "the trace has no samples"
    watched, done = record.watched.seconds, record.finished.total
    if watched < LEAST_SECONDS:
        return f"the trace is too short: it covers {duration(watched)}, and {LEAST_SECONDS / 60:.0f} min are the least"
    if done is None:
        return "the engine does not say how many requests it finished"
    if done < LEAST_REQUESTS:
        return f"too little load: {done:,.0f} requests finished, and {LEAST_REQUESTS:,.0f} are the least"
    return None


def unread(record: Record, coverage: Coverage | None, what: str) -> str | None:
    """Return that `what` could not be read for too long; None when it could."""
    read = 0.0 if coverage is None else coverage.seconds
    if read >= LEAST_SHARE * record.span_seconds:
        return None
    return f"{what} could be read for {duration(read)} of {duration(record.span_seconds)}"
