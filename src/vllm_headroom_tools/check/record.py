"""The figures from a trace to which limits apply."""

from array import array
from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.discrepancy import derive_discrepancy
from vllm_headroom.derive.leak.facts import Observation
from vllm_headroom.derive.leak.growth_evidence import GROWING_SECONDS
from vllm_headroom.derive.leak.leak import keep_service, observe_gpus, observe_host
from vllm_headroom.derive.pages import count_finished, count_running, list_named
from vllm_headroom.derive.per_request import BASELINE_READINGS, WARM_REQUESTS, find_load_band
from vllm_headroom.derive.sums import sum_known
from vllm_headroom.model import EnginePage, Failure, Gpu, Snapshot
from vllm_headroom.units import format_duration
from vllm_headroom.vocabulary import MemoryPart, Role
from vllm_headroom_tools.history import LONGEST_INTERVAL_SECONDS, LeakCourse, LeakReplay, Rise

DetectorInput = tuple[Observation, float]
"""An observation that the detector received, and the number of requests finished by then."""


class Budget(Struct, frozen=True, kw_only=True):
    """The operator's budget for the engine on each GPU, in bytes or a share.

    The operator's budget replaces the budget that the engine reports. Both fields are None if the
    operator did not set a budget.
    """

    reported_bytes: int | None = None
    utilization_ratio: float | None = None


class SignedDiscrepancy(Struct, frozen=True):
    """The memory held on a GPU minus the budget in one sample.

    The difference may be negative.
    """

    ratio: float  # as a share of the budget
    n_bytes: float
    seconds: float  # the time of the sample


def find_discrepancies(
    snapshot: Snapshot, budget: Budget
) -> Iterator[tuple[str, SignedDiscrepancy]]:
    """Yield the UUID and the discrepancy of each GPU that has a budget.

    As in the daemon, the discrepancy is computed from the engine's page. On this page, the
    operator's budget replaces the engine's own.
    """
    # The computation reads the engine's page, so put the operator's budget on that page.
    page = snapshot.engines
    if budget != Budget() and not isinstance(page, Failure):
        engines = tuple(
            replace(
                engine,
                gpu_memory_utilization_ratio=budget.utilization_ratio,
                kv_cache_memory_bytes=None,
                memory_bytes=None,
            )
            for engine in page.engines
        )
        snapshot = replace(snapshot, engines=replace(page, engines=engines))
    samples = derive_discrepancy(snapshot, configured_bytes=budget.reported_bytes)
    # The ratio and byte samples have the same labels.
    n_bytes = {
        sample.labels: sample.value
        for sample in samples
        if sample.metric is catalog.MEMORY_DISCREPANCY
    }
    for sample in samples:
        if sample.metric is catalog.MEMORY_DISCREPANCY_RATIO:
            uuid = sample.labels[1]
            yield (
                uuid,
                SignedDiscrepancy(sample.value, n_bytes[sample.labels], snapshot.time_seconds),
            )


class Coverage(Struct):
    """The total time during which a source could be read, excluding gaps."""

    seconds: float = 0.0
    newest_seconds: float | None = None  # the time of the newest reading

    def step(self, now_seconds: float) -> None:
        """Add a reading.

        Add the time since the previous reading. A gap or a clock that went backwards adds no time.
        """
        if self.newest_seconds is not None:
            step_seconds = now_seconds - self.newest_seconds
            if 0 < step_seconds <= LONGEST_INTERVAL_SECONDS:
                self.seconds += step_seconds
        self.newest_seconds = now_seconds


class Cost(Struct, frozen=True, kw_only=True):
    """The mean memory and mean number of running requests in one load band's readings."""

    held_bytes: float
    running: float

    @property
    def bytes_per_request(self) -> float:
        """Return memory divided by running requests."""
        return self.held_bytes / self.running


class _LoadReadings:
    """The readings in one load band: held bytes and running requests at matching indices."""

    def __init__(self) -> None:
        self.held_bytes: array[float] = array("d")
        self.running: array[float] = array("d")


class MemorySeries:
    """The memory of one GPU or one role over a trace.

    `key` is the UUID or the role.
    """

    def __init__(self, key: str, name: str, course: LeakCourse, *, keeps_readings: bool) -> None:
        self.key = key
        self.name = name
        self.course = course  # the detector's states over the trace
        self.coverage = Coverage()
        # the detector's input, stored only if `keeps_readings` is set, to save memory
        self.readings: list[DetectorInput] = []
        self._keeps_readings = keeps_readings
        self._loads: defaultdict[int, _LoadReadings] = defaultdict(_LoadReadings)
        # The following fields are for GPUs only. The last of them is the time during which a
        # discrepancy was known.
        self.total_bytes: int | None = None
        self.parts: defaultdict[MemoryPart, array[float]] = defaultdict(lambda: array("d"))
        self.highest_discrepancy: SignedDiscrepancy | None = None
        self.budget_coverage = Coverage()

    def step(
        self,
        observation: Observation,
        detector_observation: Observation | None,
        requests: float,
        running: float | None,
    ) -> None:
        """Add a reading, and the observation that the detector received for it.

        `detector_observation` is None if the detector did not receive this reading. `requests` is
        the detector's count. `running` is the load. If `running` is None, the reading is not used
        for the costs.
        """
        if self._keeps_readings and detector_observation is not None:
            self.readings.append((detector_observation, requests))
        held_bytes = observation.held_bytes
        if held_bytes is None:
            return
        self.coverage.step(observation.seconds)
        # no memory is held if the engine exited after its page was read
        if running and held_bytes:
            load = self._loads[find_load_band(running)]
            load.held_bytes.append(held_bytes)
            load.running.append(running)

    def add_discrepancy(self, discrepancy: SignedDiscrepancy) -> None:
        """Add a discrepancy on this GPU; only the highest is kept."""
        self.budget_coverage.step(discrepancy.seconds)
        highest = self.highest_discrepancy
        if highest is None or discrepancy.ratio > highest.ratio:
            self.highest_discrepancy = discrepancy

    @property
    def costs(self) -> dict[int, Cost]:
        """Return the cost for each of the daemon's load bands with enough readings."""
        return {
            band: Cost(held_bytes=fmean(load.held_bytes), running=fmean(load.running))
            for band, load in sorted(self._loads.items())
            if len(load.held_bytes) >= BASELINE_READINGS
        }

    @property
    def busiest_cost(self) -> Cost | None:
        """Return the cost at the highest load with enough readings, or None."""
        return next(reversed(self.costs.values()), None)


class TraceRecord:
    """Collects the figures from a whole trace.

    `host` holds the series of each role. `capacity_tokens` holds the smallest size of each engine's
    KV cache.
    """

    def __init__(self, budget: Budget, *, keeps_readings: bool) -> None:
        self.budget = budget
        self.replay = LeakReplay()
        self.coverage = Coverage()  # The time covered by all samples.
        self.engine_coverage = Coverage()  # The time covered by samples with the engine's page.
        self.finished_requests = Rise()
        self.preemptions = Rise()
        self.host: dict[Role, MemorySeries] = {}
        self.capacity_tokens: dict[str, float] = {}
        self.models: set[str] = set()
        self._keeps_readings = keeps_readings
        self._gpus: dict[str, MemorySeries] = {}
        self._restarts = 0

    @property
    def span_seconds(self) -> float:
        """Return the time from the first sample to the last.

        If the covered time is longer, it is returned instead. The covered time can be longer if the
        clock was set back.
        """
        begin, end = self.replay.span
        return max(end - begin, self.coverage.seconds)

    @property
    def gpus(self) -> tuple[MemorySeries, ...]:
        """Return the GPUs, ordered by index."""
        return tuple(self._gpus[uuid] for _, uuid, _ in self.replay.gpus if uuid in self._gpus)

    @property
    def restarts(self) -> int:
        """Return how often the engine restarted."""
        return self.replay.engine.runs.restarts

    def step(self, snapshot: Snapshot) -> None:
        """Add one sample to the detector and to all figures."""
        # The detector only judges memory held while the engine was serving. Therefore, its
        # observations come from `served_snapshot`. The other figures include all readings.
        served_snapshot = keep_service(self.replay.step(snapshot))

        self.coverage.step(snapshot.time_seconds)
        page = snapshot.page
        if page is not None and list_named(page):
            self._add_page(page, snapshot.time_seconds)
        # the first requests load kernels, so their memory is not caused by the load
        is_warm = (count_finished(page) or 0.0) >= WARM_REQUESTS
        running = count_running(page) if is_warm else None
        detector_gpus = {
            gpu.reading.uuid: observation
            for gpu, observation in observe_gpus(served_snapshot, served_snapshot.devices)
        }
        for gpu, observation in observe_gpus(snapshot, snapshot.devices):
            uuid = gpu.reading.uuid
            self._add_gpu(gpu, observation, detector_gpus.get(uuid), running)
        for uuid, discrepancy in find_discrepancies(snapshot, self.budget):
            self._gpus[uuid].add_discrepancy(discrepancy)
        detector_host = dict(observe_host(served_snapshot))
        for role, observation in observe_host(snapshot):
            self._add_role(role, observation, detector_host.get(role), running)

    def _add_gpu(
        self,
        gpu: Gpu,
        observation: Observation,
        detector_observation: Observation | None,
        running: float | None,
    ) -> None:
        """Add a GPU reading to its series; create the series for the first reading."""
        uuid = gpu.reading.uuid
        if uuid not in self._gpus:
            self._gpus[uuid] = self._build_series(uuid, gpu.reading.display_name)
        series = self._gpus[uuid]
        if gpu.reading.memory is not None:
            series.total_bytes = gpu.reading.memory.total_bytes
        series.step(observation, detector_observation, self.replay.requests(uuid), running)
        if running is not None and gpu.inside is not None:
            for part, n_bytes in gpu.inside.parts:
                series.parts[part].append(n_bytes)

    def _add_role(
        self,
        role: Role,
        observation: Observation,
        detector_observation: Observation | None,
        running: float | None,
    ) -> None:
        """Add a role's reading to its series; create the series for the first reading."""
        if role not in self.host:
            self.host[role] = self._build_series(role, role)
        requests = self.replay.requests(role)
        self.host[role].step(observation, detector_observation, requests, running)

    def _build_series(self, key: str, name: str) -> MemorySeries:
        course = self.replay.course(key)
        return MemorySeries(key, name, course, keeps_readings=self._keeps_readings)

    def _add_page(self, page: EnginePage, now_seconds: float) -> None:
        """Add the counters, models and KV caches from a page."""
        self.engine_coverage.step(now_seconds)
        has_restarted = self.restarts != self._restarts
        self._restarts = self.restarts
        engines = list_named(page)
        self.finished_requests.step(count_finished(page), restarted=has_restarted)
        # After a restart, counters begin at 0. The whole value of a restarted counter is added as
        # an increase.
        preemptions = sum_known(engine.preemptions_total for engine in engines)
        self.preemptions.step(preemptions, restarted=has_restarted)
        for engine in engines:
            self.models.add(engine.model_name)
            if engine.kv_capacity_tokens is not None:
                tokens = self.capacity_tokens.get(engine.engine, engine.kv_capacity_tokens)
                # Keep the smallest KV-cache size of all starts. One start may have had less room
                # than another.
                self.capacity_tokens[engine.engine] = min(tokens, engine.kv_capacity_tokens)


def pair_gpus(
    record: TraceRecord, baseline: TraceRecord | None
) -> Iterator[tuple[MemorySeries, MemorySeries | None]]:
    """Yield each GPU in a trace with its baseline match, or with None.

    A matching GPU has the same UUID. If no GPU has this UUID, as on a different machine, GPUs are
    matched in the order of their indices.
    """
    baseline_gpus = () if baseline is None else baseline.gpus
    baseline_by_uuid = {gpu.key: gpu for gpu in baseline_gpus}
    for place, gpu in enumerate(record.gpus):
        counterpart = baseline_by_uuid.get(gpu.key)
        if counterpart is None and place < len(baseline_gpus):
            counterpart = baseline_gpus[place]
        yield gpu, counterpart


LEAST_TRACE_REQUESTS: Final = WARM_REQUESTS
"""The number of requests that a trace needs in order to be judged. By then, the engine has loaded
its kernels. Memory usage before that does not predict later usage.
"""

LEAST_SHARE: Final = 0.9
"""Our choice: a figure must be known for this share of the trace. The rest may hide a peak."""


def find_doubt(record: TraceRecord, coverage: Coverage | None, subject: str) -> str | None:
    """Return why a subject cannot be judged, or None if it can be.

    There are two possible reasons: the trace is too short, or the engine's page or the subject was
    unreadable too long. `coverage` is the time during which the subject was read, or None if never.
    """
    return (
        find_shortfall(record)
        or find_gap(record, record.engine_coverage, "the engine")
        or find_gap(record, coverage, subject)
    )


def find_shortfall(record: TraceRecord) -> str | None:
    """Return why a trace is too short or has too few requests.

    Returns None if it has enough.
    """
    if not record.replay.samples:
        return "the trace has no samples"
    watched_seconds = record.coverage.seconds
    if watched_seconds < GROWING_SECONDS:
        watched = format_duration(watched_seconds)
        needed_minutes = GROWING_SECONDS / 60
        return f"the trace is too short: {watched}, and a limit needs {needed_minutes:.0f} min"
    requests = record.finished_requests.total
    if requests is None:
        return "the engine does not report how many requests it finished"
    if requests < LEAST_TRACE_REQUESTS:
        needed = f"and a limit needs {LEAST_TRACE_REQUESTS:,.0f}"
        return f"too little load: {requests:,.0f} requests finished, {needed}"
    return None


def find_gap(record: TraceRecord, coverage: Coverage | None, subject: str) -> str | None:
    """Return a text if a subject was unreadable for too much of the trace.

    Otherwise, returns None.
    """
    read_seconds = 0.0 if coverage is None else coverage.seconds
    if read_seconds >= LEAST_SHARE * record.span_seconds:
        return None
    span = format_duration(record.span_seconds)
    return f"{subject} could be read for {format_duration(read_seconds)} of {span}"
