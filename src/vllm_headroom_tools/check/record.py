"""The figures of a trace that limits are set on."""

from array import array
from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.discrepancy import derive_discrepancy
from vllm_headroom.derive.leak.evidence import GROWING_SECONDS
from vllm_headroom.derive.leak.observation import Observation, observe_gpus, observe_host
from vllm_headroom.derive.life.service import keep_service
from vllm_headroom.derive.pages import count_finished, count_running, list_named
from vllm_headroom.derive.per_request import BASELINE_READINGS, WARM_REQUESTS, find_load_band
from vllm_headroom.derive.sums import sum_known
from vllm_headroom.model import EnginePage, Failure, Snapshot
from vllm_headroom.units import format_duration
from vllm_headroom.vocabulary import MemoryPart, Role
from vllm_headroom_tools.history import LONGEST_STEP_SECONDS, LeakCourse, LeakReplay, Rise

DetectorInput = tuple[Observation, float]
"""An observation that the detector was given, and the requests finished by then, as the detector counts them."""


class Budget(Struct, frozen=True, kw_only=True):
    """The operator's budget of the engine on each GPU, in bytes or as a ratio; it replaces what the engine reports."""

    reported_bytes: int | None = None
    utilization_ratio: float | None = None


class Excess(Struct, frozen=True):
    """A signed discrepancy, its ratio first, and its time."""

    ratio: float
    n_bytes: float
    seconds: float


def find_excesses(snapshot: Snapshot, budget: Budget) -> Iterator[tuple[str, Excess]]:
    """Yield the discrepancy of each GPU that has a budget, by UUID, from the daemon's derivation.

    The operator's budget goes on the engine's page, where a live engine has its own.
    """
    if budget != Budget() and not isinstance(snapshot.engines, Failure):
        own = {"kv_cache_memory_bytes": None, "memory_bytes": None}
        engines = tuple(
            replace(engine, gpu_memory_utilization_ratio=budget.utilization_ratio, **own)
            for engine in snapshot.engines.engines
        )
        snapshot = replace(snapshot, engines=replace(snapshot.engines, engines=engines))
    found = derive_discrepancy(snapshot, configured_bytes=budget.reported_bytes)
    in_bytes = {
        sample.labels: sample.value
        for sample in found
        if sample.metric is catalog.MEMORY_DISCREPANCY
    }
    for sample in found:
        if sample.metric is catalog.MEMORY_DISCREPANCY_RATIO:
            yield (
                sample.labels[1],
                Excess(sample.value, in_bytes[sample.labels], snapshot.time_seconds),
            )


class Coverage(Struct):
    """The time that something was read without a gap; `last` is its newest reading."""

    seconds: float = 0.0
    last: float | None = None

    def step(self, now: float) -> None:
        """Add a reading; after a step back of the clock the count goes on from there."""
        if self.last is not None and 0 < now - self.last <= LONGEST_STEP_SECONDS:
            self.seconds += now - self.last
        self.last = now


class Cost(Struct, frozen=True, kw_only=True):
    """Mean memory and mean running requests over the readings of one load band."""

    held_bytes: float
    running: float

    @property
    def bytes_per_request(self) -> float:
        """Memory divided by running requests."""
        return self.held_bytes / self.running


class MemorySeries:
    """The memory of one GPU or one role, which `key` names in the trace.

    `course` has the detector's verdicts; `readings`, the detector's input, is filled only with `keeps`. Only a GPU has
    `parts` by the probe, a size `total_bytes` and a highest discrepancy `excess`, known for the time in `budgeted`.
    """

    def __init__(self, key: str, name: str, course: LeakCourse, *, keeps: bool) -> None:
        self.key, self.name = key, name
        self.course = course
        self.coverage, self.budgeted = Coverage(), Coverage()
        self.parts: defaultdict[MemoryPart, array[float]] = defaultdict(lambda: array("d"))
        self._loads: defaultdict[int, tuple[array[float], array[float]]] = defaultdict(
            lambda: (array("d"), array("d"))
        )
        self.readings: list[DetectorInput] = []
        self.total_bytes: int | None = None
        self.excess: Excess | None = None
        self._keeps = keeps

    def step(
        self, seen: Observation, given: Observation | None, requests: float, running: float | None
    ) -> None:
        """Add a reading and the detector's view of it; `running` is its load, None where it does not count."""
        if self._keeps and given is not None:
            self.readings.append((given, requests))
        if seen.held_bytes is None:
            return
        self.coverage.step(seen.seconds)
        if running and seen.held_bytes:  # held is 0 where the engine died between the two readings
            held, ran = self._loads[find_load_band(running)]
            held.append(seen.held_bytes)
            ran.append(running)

    @property
    def costs(self) -> dict[int, Cost]:
        """The costs by the daemon's load bands, from the lowest load to the highest."""
        return {
            band: Cost(held_bytes=fmean(held), running=fmean(ran))
            for band, (held, ran) in sorted(self._loads.items())
            if len(held) >= BASELINE_READINGS
        }

    @property
    def busiest(self) -> Cost | None:
        """The cost at the highest load with enough readings; None without one."""
        return next(reversed(self.costs.values()), None)


class TraceRecord:
    """The figures of a whole trace; `host` is by role, `capacity_tokens` (the lowest) by engine."""

    def __init__(self, budget: Budget, *, keeps: bool) -> None:
        self.watched, self.engine = Coverage(), Coverage()
        self.finished, self.preemptions = Rise(), Rise()
        self.host: dict[Role, MemorySeries] = {}
        self.capacity_tokens: dict[str, float] = {}
        self.models: set[str] = set()
        self.budget = budget
        self._keeps = keeps
        self._gpus: dict[str, MemorySeries] = {}
        self.replay = LeakReplay()
        self._restarts = 0

    @property
    def span_seconds(self) -> float:
        """From the first sample to the last, or the time watched where the clock was set back."""
        begin, end = self.replay.span
        return max(end - begin, self.watched.seconds)

    @property
    def gpus(self) -> tuple[MemorySeries, ...]:
        """The GPUs, by index."""
        return tuple(self._gpus[uuid] for _, uuid, _ in self.replay.gpus if uuid in self._gpus)

    def step(self, snapshot: Snapshot) -> None:
        """Add one sample."""
        now = snapshot.time_seconds
        served = keep_service(self.replay.step(snapshot))
        given: dict[str, Observation] = {
            gpu.reading.uuid: seen for gpu, seen in observe_gpus(served, served.devices)
        }
        given.update(observe_host(served))
        self.watched.step(now)
        page = snapshot.page
        if page is not None and list_named(page):
            self._add_page(page, now)
        running = None if (count_finished(page) or 0.0) < WARM_REQUESTS else count_running(page)
        for gpu, seen in observe_gpus(snapshot, snapshot.devices):
            reading, uuid = gpu.reading, gpu.reading.uuid
            new = MemorySeries(
                uuid, reading.display_name, self.replay.course(uuid), keeps=self._keeps
            )
            series = self._gpus.setdefault(uuid, new)
            series.total_bytes = (
                series.total_bytes if reading.memory is None else reading.memory.total_bytes
            )
            series.step(seen, given.get(uuid), self.replay.requests(uuid), running)
            for part, n_bytes in () if running is None or gpu.inside is None else gpu.inside.parts:
                series.parts[part].append(n_bytes)
        for uuid, excess in find_excesses(snapshot, self.budget):
            series = self._gpus[uuid]
            series.budgeted.step(excess.seconds)
            if series.excess is None or excess.ratio > series.excess.ratio:
                series.excess = excess
        for role, seen in observe_host(snapshot):
            new = MemorySeries(role, role, self.replay.course(role), keeps=self._keeps)
            self.host.setdefault(role, new).step(
                seen, given.get(role), self.replay.requests(role), running
            )

    def _add_page(self, page: EnginePage, now: float) -> None:
        self.engine.step(now)
        restarted, self._restarts = (
            self.replay.engine.runs.restarts != self._restarts,
            self.replay.engine.runs.restarts,
        )
        self.finished.step(count_finished(page), restarted=restarted)
        self.preemptions.step(
            sum_known(engine.preemptions_total for engine in list_named(page)), restarted=restarted
        )
        for engine in list_named(page):
            self.models.add(engine.model_name)
            if engine.kv_capacity_tokens is not None:
                least = self.capacity_tokens.get(engine.engine, engine.kv_capacity_tokens)
                self.capacity_tokens[engine.engine] = min(least, engine.kv_capacity_tokens)


def pair_gpus(
    record: TraceRecord, before: TraceRecord | None
) -> Iterator[tuple[MemorySeries, MemorySeries | None]]:
    """Yield each GPU with its counterpart in another trace, or None.

    Counterparts have the same UUID or else the same place among the indices: another machine has other UUIDs.
    """
    old = () if before is None else before.gpus
    same = {gpu.key: gpu for gpu in old}
    for place, gpu in enumerate(record.gpus):
        yield gpu, same.get(gpu.key) or (old[place] if place < len(old) else None)


LEAST_REQUESTS: Final = WARM_REQUESTS
"""Kernels have been used for the first time by then; earlier memory does not predict later memory."""

LEAST_SHARE: Final = 0.9
"""The share of the trace in which a figure has to be known: the rest may hide a peak."""


def find_doubt(record: TraceRecord, coverage: Coverage | None, what: str) -> str | None:
    """Return why `what`, read for the time in `coverage`, cannot be judged; None where it can."""
    return (
        find_shortfall(record)
        or find_gap(record, record.engine, "the engine")
        or find_gap(record, coverage, what)
    )


def find_shortfall(record: TraceRecord) -> str | None:
    """Return why the trace is too short; None where it is long enough."""
    if not record.replay.samples:
        return "the trace has no samples"
    watched, done = record.watched.seconds, record.finished.total
    if watched < GROWING_SECONDS:
        return f"the trace is too short: {format_duration(watched)}, and a limit needs {GROWING_SECONDS / 60:.0f} min"
    if done is None:
        return "the engine does not report how many requests it finished"
    if done < LEAST_REQUESTS:
        return f"too little load: {done:,.0f} requests finished, and a limit needs {LEAST_REQUESTS:,.0f}"
    return None


def find_gap(record: TraceRecord, coverage: Coverage | None, what: str) -> str | None:
    """Return that `what` could not be read for too long; None where it could."""
    read = 0.0 if coverage is None else coverage.seconds
    if read >= LEAST_SHARE * record.span_seconds:
        return None
    return f"{what} could be read for {format_duration(read)} of {format_duration(record.span_seconds)}"
