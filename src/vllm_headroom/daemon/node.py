"""Watch several engines on one machine, each as if it were the only one."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import Context, copy_context
from functools import lru_cache, partial
from math import inf
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.clock import Clock
from vllm_headroom.daemon import loop
from vllm_headroom.daemon.engine_watch import EngineWatch, ProcessTask
from vllm_headroom.daemon.evict import Evictor
from vllm_headroom.daemon.sources import Closable, GpuSource, close_all
from vllm_headroom.derive.health import INITIAL, derive_health
from vllm_headroom.derive.readings import derive_readings
from vllm_headroom.derive.tick import UNEXPECTED
from vllm_headroom.log import ENGINE_NAME, Log
from vllm_headroom.model import (
    EngineName,
    Failure,
    Gpu,
    GpuReadings,
    Metric,
    Published,
    ReadingTime,
    Sample,
    Snapshot,
)
from vllm_headroom.scrape.proc.node import LocatedEngine, NodeProcesses
from vllm_headroom.vocabulary import EngineKind, Reason, Source

log = Log(__name__)

SCAN_SECONDS: Final = 2.0
"""The time limit for finding the pods and units of all processes. With 10,000 processes, this takes
0.1 s.
"""

MOST_FIND_SECONDS: Final = 60.0
"""How long a search may continue in the background if a command line hangs."""

FIND_SECONDS: Final = 1.0
"""How long a tick waits for the search for engines. If reading a command line hangs in a driver,
new engines are watched later.
"""

LONG_SEARCH_SECONDS: Final = 15.0
"""A search for engines that takes longer than this is reported. If CPU is scarce, a search takes
seconds.
"""

PROCESSES_SECONDS: Final = 0.25
"""How long a tick waits for all engines' processes before it requests the pages. Reading the
processes of 16 engines takes 10 ms.
"""

LAST_SAMPLE_SECONDS: Final = 300.0
"""How long an engine's last series are kept after its pod is gone. The series are kept for a final
scrape.
"""

UNIT_SECONDS: Final = 3600.0
"""How long an engine without a pod is watched after its last process has exited. It is unknown
whether systemd will restart the engine. A crash must also stay visible until every alert has had
time to fire.
"""

STALE_INTERVALS: Final = 3
"""After this many intervals without a new sample, an engine has no series. Heartbeat has the same
limit.
"""

NO_PAGE: Final = Failure(source=Source.ENGINE, reason=Reason.NOT_FOUND, message="")
"""Used in place of the page if only the GPUs are read."""

_SOURCE_METRICS: Final = frozenset(
    metric.name
    for metric in (
        catalog.SOURCE_UP,
        catalog.SOURCE_READ_SECONDS,
        catalog.SOURCE_FAILURES,
        catalog.SOURCE_LAST_SUCCESS,
    )
)
"""The metrics of the sources. Samples about the driver describe the machine and not a single
engine.
"""


_GPU_METRICS: Final = frozenset(
    metric.name for metric in catalog.METRICS if metric.labels[:2] == catalog.GPU_LABELS
)
"""The metrics whose first labels name a GPU."""


class SharedGpus:
    """Gives every engine the same reading of the GPUs, which are read once per tick."""

    def __init__(self, gpus: GpuSource) -> None:
        self._gpus = gpus
        self._reading: asyncio.Task[GpuReadings | Failure] | None = None
        self._used_bytes: Mapping[str, int] = {}
        self._is_faulty = False
        """Whether the last reading raised an error."""

    def begin(self, timeout_seconds: float) -> None:
        """Begin this tick's reading."""
        self._reading = asyncio.create_task(self._read_guarded(timeout_seconds))

    async def read(self, timeout_seconds: float) -> GpuReadings | Failure:
        """Return this tick's reading, or a Failure if no GPU could be read."""
        reading = self._reading
        if reading is None:
            return await self._read_guarded(timeout_seconds)
        # The reading is shielded. If one engine is given up, the others are still read.
        return await asyncio.shield(reading)

    async def _read_guarded(self, timeout_seconds: float) -> GpuReadings | Failure:
        """Return a reading; if the reader raises, log the error once and return a Failure."""
        try:
            readings = await self._gpus.read(timeout_seconds)
        except Exception:
            # The error is logged only once, because it would recur on every tick.
            if not self._is_faulty:
                log.exception("source raised, its series are absent", source=str(Source.NVML))
            self._is_faulty = True
            return UNEXPECTED[Source.NVML]
        self._is_faulty = False
        return readings

    async def begin_used(self, timeout_seconds: float) -> None:
        """Read the memory in use on all GPUs; `sample_used` returns the result to each engine."""
        self._used_bytes = await self._gpus.sample_used(timeout_seconds)

    async def sample_used(
        self,
        timeout_seconds: float,  # noqa: ARG002 - as GpuSource has it
    ) -> Mapping[str, int]:
        """Return the used bytes of each readable GPU, keyed by UUID."""
        return self._used_bytes

    async def close(self) -> None:
        """Do nothing, because the owner of the GPUs closes them."""


class WatchParts(Struct, frozen=True, kw_only=True):
    """The parts that watch one engine."""

    watch: EngineWatch
    evictor: Evictor | None = None
    resources: tuple[Closable | None, ...]
    """The resources to close when the daemon stops watching the engine."""


class WatchedEngine:
    """One of several engines: its watch, its tasks, and its samples with the engine's labels."""

    def __init__(self, located: LocatedEngine, parts: WatchParts, context: Context) -> None:
        """`context` names the engine in the log."""
        self.located = located
        self.watch = parts.watch
        self._evictor = parts.evictor
        self.absent_since_seconds: float | None = None
        """When the engine's pod or unit was first found without processes, on the monotonic clock.
        """
        self._resources = parts.resources
        self._context = context
        self._sampling: asyncio.Task[None] | None = None
        self._evicting: asyncio.Task[None] | None = None
        self._is_faulty = False
        self._published: Published | None = None
        self._samples: tuple[Sample, ...] = ()
        self._loops = self._start(self._run_loops())

    @property
    def name(self) -> EngineName:
        """Return the engine's names, which are the labels of its series."""
        return self.located.name

    @property
    def _is_sampling(self) -> bool:
        """Return whether a sample is running."""
        return self._sampling is not None and not self._sampling.done()

    def begin_processes(self) -> ProcessTask | None:
        """Begin to read the processes for the next sample.

        Returns None before the first sample, and if the previous sample is still running.
        """
        if self._is_sampling:
            return None
        return self._context.run(self.watch.begin_processes)

    def begin_sample(self) -> None:
        """Begin a sample, unless the previous one is still running."""
        if not self._is_sampling:
            self._sampling = self._start(self._guard(self._sample))

    def begin_eviction_turn(self, *, is_stale: bool) -> None:
        """Let the evictor take its next step, based on the gate in the latest sample."""
        is_busy = self._evicting is not None and not self._evicting.done()
        if self._evictor is None or is_busy:
            return
        due = None
        # An old sample is not a reason to evict.
        if self.watch.latest is not None and not is_stale:
            due = self.watch.latest.gate.due
        self._evicting = self._start(self._evictor.turn(due))

    def list_owned(self) -> frozenset[str]:
        """Return the UUIDs of the GPUs that the engine holds according to its latest sample."""
        latest = self.watch.latest
        if latest is None:
            return frozenset()
        return frozenset(gpu.reading.uuid for gpu in latest.snapshot.owned_gpus)

    def list_samples(self) -> tuple[Sample, ...]:
        """Return the engine's latest samples with its labels, or () before the first sample."""
        published = self.watch.published
        if published is None:
            return ()
        if published is not self._published:
            self._samples = self._label_samples(published)
            self._published = published
        return self._samples

    async def close(self) -> None:
        """End the engine's tasks, so that they save its state, and close its sources."""
        started_tasks = (self._loops, self._sampling, self._evicting)
        tasks = [task for task in started_tasks if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # The Lease is given back after the evictor's last turn. If the Lease were given back
        # earlier, a later turn could take it again.
        if self._evictor is not None:
            await self._evictor.give_lease_back()
        self.watch.close()
        await close_all(*self._resources)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(coroutine, context=self._context)

    async def _run_loops(self) -> None:
        """Run the loops alongside the sampling until cancelled; restart them if one raises."""
        while True:
            await self._guard(self._run_loops_once)
            await asyncio.sleep(UNIT_SECONDS)

    async def _run_loops_once(self) -> None:
        async with asyncio.TaskGroup() as group:
            for running_loop in self.watch.list_loops():
                group.create_task(running_loop)

    async def _sample(self) -> None:
        await self.watch.sample()
        await self.watch.record()

    async def _guard(self, step: Callable[[], Awaitable[None]]) -> None:
        """Run a step, and log an error instead of raising it.

        The error is logged once. After an error, the other engines are still watched.
        """
        try:
            await step()
        except Exception:
            # An error in one engine must not affect the others.
            if not self._is_faulty:
                log.exception("engine cannot be sampled")
            self._is_faulty = True
        else:
            self._is_faulty = False

    def _label_samples(self, published: Published) -> tuple[Sample, ...]:
        """Return this engine's samples, with the engine's labels added in front.

        Samples of GPUs that the engine does not hold are omitted. The driver's samples are also
        omitted, because they describe the machine.
        """
        label_names = tuple(name for name, _ in self.name.labels)
        label_values = tuple(value for _, value in self.name.labels)
        owned_uuids = self.list_owned()
        samples = list(published.samples)
        if self.watch.last_incident is not None:
            samples.append(Sample(catalog.LAST_INCIDENT, (), self.watch.last_incident.seconds))
        labelled_samples = []
        # The driver's samples describe the machine and not a single engine.
        for metric, labels, value in samples:
            name = metric.name
            if name in _SOURCE_METRICS and labels[0] == Source.NVML:
                continue
            if name in _GPU_METRICS and labels[1] and labels[1] not in owned_uuids:
                continue
            labelled_metric = _add_labels(name, label_names)
            labelled_samples.append(Sample(labelled_metric, (*label_values, *labels), value))
        return tuple(labelled_samples)


@lru_cache(maxsize=4096)
def _add_labels(metric_name: str, label_names: tuple[str, ...]) -> Metric:
    """Return a metric from the catalogue with additional labels before its own."""
    metric = catalog.BY_NAME[metric_name]
    return replace(metric, labels=(*label_names, *metric.labels))


class NodeReadings(Struct, frozen=True, kw_only=True):
    """What one tick read about the machine itself."""

    gpus: GpuReadings | Failure
    samples: tuple[Sample, ...]
    """The samples of the driver and of every GPU. No GPU is attributed to an engine."""
    monotonic_seconds: float


class NodeWatch:
    """Samples all engines of a machine, as they start and exit.

    A tick begins a sample of each engine without waiting for it. An engine that responds slowly
    therefore does not make the others miss a sample.
    """

    def __init__(
        self,
        *,
        gpus: GpuSource,
        processes: NodeProcesses | None,
        engines: tuple[LocatedEngine, ...] = (),
        build_engine: Callable[[LocatedEngine, SharedGpus], WatchParts],
        clock: Clock,
        interval_seconds: float,
        gpu_timeout_seconds: float,
    ) -> None:
        """Build a watch that has not read anything yet.

        `processes` finds the engines. If `processes` is None, the engines are always `engines`.
        """
        self.located: tuple[LocatedEngine, ...] = engines
        """Every engine that was found, whether or not it is watched."""
        self.engines: dict[str, WatchedEngine] = {}
        """The watched engines, by key."""
        self.readings: NodeReadings | None = None
        """The readings of the latest tick, or None before the first tick."""
        self._gpus = SharedGpus(gpus)
        self._processes = processes
        self._build_engine = build_engine
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._gpu_timeout_seconds = gpu_timeout_seconds
        self._has_dropped_engines = False
        """Whether an engine was dropped since the last tick began."""
        self._finding: asyncio.Task[None] | None = None
        self._finding_since_seconds = 0.0
        """When the search for engines began, on the monotonic clock."""
        self._following_guard = loop.StepGuard()
        self._finding_guard = loop.StepGuard()
        self._health = INITIAL
        self._problems: dict[str, str] = {}
        """The last problem logged for each subject."""
        self._other_problems: dict[str, str] = {}
        """The logged reasons why engines are not watched, keyed by the engine's key."""
        self._scraped_seconds = -inf
        self._published_parts: tuple[object, ...] = ()
        """The parts that `_published` was built from."""
        self._published: Published | None = None

    async def tick(self) -> GpuReadings | Failure:
        """Follow the engines, begin a sample of each, and return a reading of the GPUs.

        If no GPU could be read, the result is a Failure. The engines are sampled anyway.
        """
        if self._has_dropped_engines:
            self._has_dropped_engines = False
            # The threads of an engine's readers end when the readers are garbage-collected. Python
            # itself rarely collects objects this old (YOUNG_OBJECTS).
            gc.collect()
        await self._following_guard.run(self._follow_engines)
        await self._read_processes()
        began_seconds = self._clock.monotonic()
        self._gpus.begin(self._gpu_timeout_seconds)
        for engine in self.engines.values():
            engine.begin_sample()
        gpus = await self._gpus.read(self._gpu_timeout_seconds)
        self.readings = self._derive(gpus, began_seconds)
        return gpus

    async def _read_processes(self) -> None:
        """Read the processes of all engines before the pages.

        If a reading hangs, the tick does not wait for it. The thread that reads /proc competes with
        the event loop for Python's lock. If the event loop waits during the reading, a tick takes a
        tenth less CPU time (measured with 16 engines).
        """
        tasks = [engine.begin_processes() for engine in self.engines.values()]
        begun_tasks = [task for task in tasks if task is not None]
        if begun_tasks:
            await asyncio.wait(begun_tasks, timeout=PROCESSES_SECONDS)

    async def sample_gpu_memory(self, timeout_seconds: float) -> None:
        """Read only the GPUs' used memory, for the flight record of each engine."""
        await self._gpus.begin_used(timeout_seconds)
        for engine in self.engines.values():
            await engine.watch.sample_gpu_memory(timeout_seconds)

    async def begin_eviction_turns(self) -> None:
        """Let each engine's evictor take its next step, without waiting for it."""
        for engine in self.engines.values():
            engine.begin_eviction_turn(is_stale=self._is_stale(engine))

    async def run(self) -> None:
        """Wait until cancelled, then end the watches of all engines at the same time."""
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.gather(*(engine.close() for engine in self.engines.values()))

    def build_published(self) -> Published | None:
        """Return the samples of the machine and of every engine.

        Returns None before the first tick.
        """
        self._scraped_seconds = self._clock.monotonic()
        readings = self.readings
        if readings is None:
            return None
        engines = [engine for engine in self.engines.values() if not self._is_stale(engine)]
        engine_samples = [engine.list_samples() for engine in engines]
        # The parts are compared by identity. A scrape between two ticks gets the same parts and
        # does not rebuild the page.
        parts = (readings, *engine_samples)
        is_same = len(parts) == len(self._published_parts) and all(
            part is built_part
            for part, built_part in zip(parts, self._published_parts, strict=True)
        )
        if not is_same:
            self._published_parts = parts
            self._published = self._merge(readings, engines, engine_samples)
        return self._published

    def list_others(self, kind: EngineKind) -> list[LocatedEngine]:
        """Return the engines of this kind that are not watched.

        Engines with the name of a watched engine are omitted. While a watched engine restarts, its
        server may briefly have no port.
        """
        watched_names = {engine.name for engine in self.engines.values()}
        return [
            engine
            for engine in self.located
            if engine.kind is kind and engine.name not in watched_names
        ]

    def _merge(
        self,
        readings: NodeReadings,
        engines: list[WatchedEngine],
        engine_samples: list[tuple[Sample, ...]],
    ) -> Published:
        """Return all samples.

        A GPU held by an engine has only the samples with the engine's labels.
        """
        owned_uuids = set[str]()
        for engine in engines:
            owned_uuids |= engine.list_owned()
        # A GPU without an engine is still shown, but without engine labels.
        samples = [
            sample
            for sample in readings.samples
            if sample.metric.labels[:2] != catalog.GPU_LABELS or sample.labels[1] not in owned_uuids
        ]
        counts = {
            EngineKind.WATCHED: len(self.engines),
            EngineKind.OWN_SIDECAR: len(self.list_others(EngineKind.OWN_SIDECAR)),
            EngineKind.UNREADABLE: len(self.list_others(EngineKind.UNREADABLE)),
        }
        for kind, count in counts.items():
            samples.append(Sample(catalog.ENGINES, (str(kind),), float(count)))
        for labelled_samples in engine_samples:
            samples += labelled_samples
        return Published(samples=tuple(samples), monotonic_seconds=readings.monotonic_seconds)

    def _is_stale(self, engine: WatchedEngine) -> bool:
        """Return whether an engine's latest sample is too old to be shown."""
        published = engine.watch.published
        if published is None:
            return True
        age_seconds = self._clock.monotonic() - published.monotonic_seconds
        longest_seconds = max(STALE_INTERVALS * self._interval_seconds, loop.LEAST_SILENCE_SECONDS)
        return age_seconds > longest_seconds

    def _derive(self, gpus: GpuReadings | Failure, began_seconds: float) -> NodeReadings:
        """Return the samples of the driver and of all GPUs, regardless of engines."""
        now_seconds = self._clock.monotonic()
        unowned_gpus: tuple[Gpu, ...] | Failure
        if isinstance(gpus, Failure):
            unowned_gpus = gpus
        else:
            unowned_gpus = tuple(Gpu(reading=device, attribution=None) for device in gpus.devices)
        snapshot = Snapshot(
            time_seconds=self._clock.time(),
            monotonic_seconds=now_seconds,
            engines=NO_PAGE,
            gpus=unowned_gpus,
            processes=(),
            reading_times=(
                ReadingTime(
                    source=Source.NVML,
                    seconds=now_seconds - began_seconds,
                    ended_monotonic_seconds=now_seconds,
                ),
            ),
        )
        self._health, health_samples = derive_health(self._health, snapshot)
        driver_samples = [
            sample
            for sample in health_samples
            if sample.metric.name in _SOURCE_METRICS and sample.labels[0] == Source.NVML
        ]
        return NodeReadings(
            gpus=gpus,
            samples=(*driver_samples, *derive_readings(snapshot)),
            monotonic_seconds=now_seconds,
        )

    async def _follow_engines(self) -> None:
        """Watch the engines that were found, and stop watching those that are gone."""
        if self._processes is None:
            await self._apply({engine.key: engine for engine in self.located})
            return
        try:
            await self._processes.scan(SCAN_SECONDS)
        except (TimeoutError, OSError) as error:
            self._report("processes", str(error) or "/proc does not answer")
            return
        self._report("processes", "")
        if self._finding is None:
            self._finding_since_seconds = self._clock.monotonic()
            find = partial(self._find, self._processes)
            self._finding = asyncio.create_task(self._finding_guard.run(find))
        # Unlike `wait_for`, `wait` does not cancel the search after the timeout. The search
        # continues in the next tick.
        await asyncio.wait((self._finding,), timeout=FIND_SECONDS)
        if not self._finding.done():
            if self._clock.monotonic() - self._finding_since_seconds > LONG_SEARCH_SECONDS:
                self._report("engines", "a command line in /proc does not answer: no new engine")
            return
        self._finding = None
        self._report("engines", "")
        await self._apply({engine.key: engine for engine in self.located})

    async def _find(self, processes: NodeProcesses) -> None:
        """Find the engines; if /proc cannot be read, keep those from the last search."""
        try:
            self.located = await processes.find_engines(MOST_FIND_SECONDS)
        except (TimeoutError, OSError) as error:
            self._report("search", str(error) or "/proc does not answer")
        else:
            self._report("search", "")

    async def _apply(self, located: Mapping[str, LocatedEngine]) -> None:
        """Start and stop watching engines, depending on which were found."""
        for key, watched in tuple(self.engines.items()):
            present = located.get(key)
            if present is None or present.kind is EngineKind.UNREADABLE:
                # The engine's server has exited or is about to exit. The engine stays watched for a
                # while.
                await self._drop_if_gone(watched, is_present=present is not None)
            elif present != watched.located:
                # The engine now has its own sidecar, or a different address or name.
                await self._drop(watched)
            else:
                watched.absent_since_seconds = None
        for engine in located.values():
            if engine.kind is EngineKind.WATCHED and engine.key not in self.engines:
                await self._add(engine)
        self._report_others()

    async def _drop_if_gone(self, engine: WatchedEngine, *, is_present: bool) -> None:
        """Stop watching an engine whose pod or unit has been gone for long enough."""
        now_seconds = self._clock.monotonic()
        # A systemd unit has no processes while it restarts, so it gets more time.
        is_in_pod = engine.name.pod is not None
        has_pod = is_in_pod and self._has_processes(engine)
        if is_present or has_pod:
            engine.absent_since_seconds = None
            return
        if engine.absent_since_seconds is None:
            engine.absent_since_seconds = now_seconds
        absent_seconds = now_seconds - engine.absent_since_seconds
        # By this time, a sample that began after the engine disappeared has been published.
        last_sample_seconds = engine.absent_since_seconds + 2 * self._interval_seconds
        is_scraped = self._scraped_seconds > last_sample_seconds
        if is_in_pod and (is_scraped or absent_seconds > LAST_SAMPLE_SECONDS):
            await self._drop(engine)
        if not is_in_pod and absent_seconds > UNIT_SECONDS:
            await self._drop(engine)

    def _has_processes(self, engine: WatchedEngine) -> bool:
        return self._processes is not None and self._processes.has_processes(
            engine.located.owner_key
        )

    async def _add(self, located: LocatedEngine) -> None:
        """Start watching an engine; stop watching any former engine with the same name."""
        for watched in tuple(self.engines.values()):
            if watched.name == located.name:
                await self._drop(watched)
        context = copy_context()
        context.run(ENGINE_NAME.set, located.name.text)
        parts = context.run(partial(self._build_engine, located, self._gpus))
        self.engines[located.key] = WatchedEngine(located, parts, context)
        log.info("engine is watched", of_engine=located.name.text, url=located.page_url)

    async def _drop(self, engine: WatchedEngine) -> None:
        """Stop watching an engine: save its state and end its series."""
        del self.engines[engine.located.key]
        await engine.close()
        self._has_dropped_engines = True
        log.info("engine is no longer watched", of_engine=engine.name.text)

    def _report_others(self) -> None:
        """Log each unwatched engine once, and again if the reason changes."""
        problems = {
            engine.key: "it has its own sidecar"
            for engine in self.list_others(EngineKind.OWN_SIDECAR)
        }
        for engine in self.list_others(EngineKind.UNREADABLE):
            problems[engine.key] = engine.problem
        for engine in self.located:
            problem = problems.get(engine.key)
            # A line is logged on each change, not on each tick.
            if problem is not None and self._other_problems.get(engine.key) != problem:
                log.warning("engine is not watched", of_engine=engine.name.text, problem=problem)
        self._other_problems = problems

    def _report(self, subject: str, problem: str) -> None:
        """Log a problem when it begins, changes or ends."""
        if self._problems.get(subject, "") == problem:
            return
        if problem:
            self._problems[subject] = problem
            log.warning("engines are not followed", subject=subject, problem=problem)
        else:
            del self._problems[subject]
