"""Sample once per tick: read, attribute, derive, publish."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any, Final, Protocol, TypeVar

from msgspec import Struct

from vllm_headroom.clock import Clock
from vllm_headroom.daemon.transitions import Transitions
from vllm_headroom.derive import Derivation, answer
from vllm_headroom.derive.attribution import AttributionState, Selection, attribute
from vllm_headroom.derive.configured import complete_page, list_pools
from vllm_headroom.derive.health import add_lost_gpus
from vllm_headroom.derive.host_memory import ContainerState, update_container
from vllm_headroom.derive.inside import add_inside, classify_probe
from vllm_headroom.derive.life.runs import ENGINE_RUN, RunState, forget_run, update_run
from vllm_headroom.derive.readings import is_page_awake, list_named
from vllm_headroom.log import Log
from vllm_headroom.model import (
    EnginePage,
    Failure,
    Gpu,
    GpuReadings,
    ProbedProcess,
    ProbeReadings,
    ProcessReadings,
    Published,
    ReadingTime,
    Sample,
    Snapshot,
    TokenBytes,
    Values,
)
from vllm_headroom.scrape.shortage import build_unavailable
from vllm_headroom.vocabulary import EngineState, Reason, Source
from vllm_headroom.worker import Worker

log = Log(__name__)

RETRY_SECONDS: Final = 10.0
"""An engine that did not answer gets the next request so soon, before a passing error counts as a hang."""

CANARY_EVENTS: Final = {
    True: "canary is answered",
    False: "canary is not answered",
    None: "canary cannot be asked: the engine must serve its model at /v1/completions to this sidecar's credentials",
}


class Canary:
    """Sends one request at a time, on a separate task, and only while the engine is awake and idle.

    `since_seconds` is the monotonic time since when there is no answer; None while there is. With more than
    `pause_seconds` between two ticks the daemon itself was stopped, and could have received no answer.
    """

    def __init__(
        self,
        ask: Callable[[str], Awaitable[bool | None]],
        interval_seconds: float,
        clock: Clock,
        *,
        pause_seconds: float,
    ) -> None:
        self._ask, self._clock = ask, clock
        self._interval_seconds, self._pause_seconds = interval_seconds, pause_seconds
        self._ticked_seconds = clock.monotonic()
        self.since_seconds: float | None = None
        self._said: bool | None = True

    async def run(self, snapshot: Callable[[], Snapshot | None]) -> None:
        """Send requests for ever; `snapshot` returns the newest one."""
        while True:
            doubted = self.since_seconds is not None
            seconds = (
                min(RETRY_SECONDS, self._interval_seconds) if doubted else self._interval_seconds
            )
            await self._clock.sleep_until(self._clock.monotonic() + seconds)
            await self.turn(snapshot())

    def unanswered_since(self) -> float | None:
        """Return, once a tick, since when there is no answer, without pauses of the daemon itself."""
        before, self._ticked_seconds = self._ticked_seconds, self._clock.monotonic()
        pause = self._ticked_seconds - before
        if self.since_seconds is not None and pause > self._pause_seconds:
            self.since_seconds = min(self.since_seconds + pause, self._ticked_seconds)
        return self.since_seconds

    async def turn(self, snapshot: Snapshot | None) -> None:
        """Send one request, if the engine of this snapshot is known to be idle."""
        model_name = None if snapshot is None else _find_idle_model(snapshot)
        if model_name is None:
            self.since_seconds = None
            return
        if self.since_seconds is None:
            self.since_seconds = self._clock.monotonic()
        answered = await self._ask(model_name)
        if answered is not False:
            self.since_seconds = None
        if answered is not self._said:
            write = log.info if answered else log.warning
            write(CANARY_EVENTS[answered])
        self._said = answered


def _find_idle_model(snapshot: Snapshot) -> str | None:
    """Return a model of the server while all its engines are present, awake and idle."""
    if (
        isinstance(snapshot.engines, Failure)
        or snapshot.engine_status is None
        or is_page_awake(snapshot.engines) is False
    ):
        return None
    engines = list_named(snapshot.engines)
    may_answer = snapshot.engine_status.state in (EngineState.SERVING, EngineState.STALLED) or bool(
        snapshot.engine_status.hang_signs
    )
    if not may_answer or not engines:
        return None
    idle = all(engine.running == 0 and engine.waiting == 0 for engine in engines)
    return engines[0].model_name if idle else None


CLOSE_SECONDS: Final = 0.3


class Closable(Protocol):
    """A resource to close."""

    async def close(self) -> None:
        """Release it."""


class EngineSource(Closable, Protocol):
    """The source of the engine's page."""

    async def fetch(self) -> str | Failure:
        """Return the page's text."""


class GpuSource(Closable, Protocol):
    """The source of GPU readings."""

    async def read(self, timeout_seconds: float) -> GpuReadings | Failure:
        """Return one reading of every device."""

    async def sample_used(self, timeout_seconds: float) -> Mapping[str, int]:
        """Return the memory in use by UUID of the GPUs that can be read, and add it to their peaks."""


async def close_all(*opened: Closable | None) -> None:
    """Close the resources, within CLOSE_SECONDS."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            for each in filter(None, opened):
                await each.close()


class Sources(Struct, frozen=True, kw_only=True):
    """What one tick reads in parallel, each within some seconds; `probe` is None where no folder is configured.

    `processes` finds the engine's with the help of its page, `probe` returns the last record of each process, `model`
    the bytes per token of the served model; None where they are configured.
    """

    engine: EngineSource
    gpus: GpuSource
    processes: Callable[[float, EnginePage | Failure], Awaitable[ProcessReadings | Failure]]
    probe: Callable[[float], Awaitable[tuple[ProbedProcess, ...] | Failure]] | None = None
    model: Callable[[ProcessReadings | Failure], TokenBytes | None] | None = None


SMALL_PAGE: Final = 128 * 2**10
"""Characters of a page that is parsed in place: vLLM's has 67,000, for which a thread costs more than the parsing. The
costliest page of this size takes 50 ms."""

PARSE_SECONDS: Final = 2.0
"""A page of eight engines takes 1 ms, the costliest page of the allowed size half a second."""

Judge = Callable[[Values, Mapping[str, Any]], Derivation[Any]]

NO_PROCESSES: Final = ProcessReadings(engine=(), visible_pids=frozenset(), sees_host_pids=False)

T = TypeVar("T")
Timed = tuple[T, ReadingTime]


class Sampler:
    """Owns the `states` of all derivations and the engine's run, by name, and what is published, None before a tick.

    `recall` returns, at any snapshot, the states of an earlier process, by derivation, to continue from.
    `host_limit_bytes` is the operator's limit of the engine's container. `judges` build the last derivations, from the
    values and states of those before.
    """

    def __init__(
        self,
        *,
        sources: Sources,
        parse: Callable[[str], EnginePage | Failure],
        selection: Selection,
        derivations: tuple[Derivation[Any], ...],
        clock: Clock,
        gpu_timeout_seconds: float,
        recall: Callable[[Snapshot], Awaitable[Mapping[str, Any]]] | None = None,
        host_limit_bytes: int | None = None,
        judges: tuple[Judge, ...] = (),
        canary: Canary | None = None,
    ) -> None:
        self.published: Published | None = None
        self.snapshot: Snapshot | None = None
        self.values = Values(())
        self._sources, self._parse, self._clock, self._recall = sources, parse, clock, recall
        self._selection, self._derivations, self._judges, self._canary = (
            selection,
            derivations,
            judges,
            canary,
        )
        self._gpu_timeout_seconds, self._host_limit_bytes = gpu_timeout_seconds, host_limit_bytes
        self._parser = Worker[EnginePage | Failure]("parse")
        self._transitions = Transitions(selection)
        self._attribution = AttributionState()
        self._container = ContainerState()
        self.states: dict[str, Any] = {
            derivation.name: derivation.initial for derivation in derivations
        }
        self.states[ENGINE_RUN] = RunState()
        for build in judges:
            last = build(self.values, self.states)
            self.states[last.name] = last.initial

    async def tick(self) -> Snapshot:
        """Read all sources at once, derive, publish and return the snapshot; a fault costs only its part."""
        snapshot = await self._snapshot()
        if self._recall is not None:
            self.states.update(await self._recall(snapshot))
        snapshot = self._update_run(snapshot)
        self._transitions.report(snapshot)
        samples = tuple(
            chain.from_iterable(
                self._derive(derivation, snapshot) for derivation in self._derivations
            )
        )
        values = Values(samples)
        for build in self._judges:
            judged = self._derive(build(values, self.states), snapshot)
            samples += judged
            values.add(judged)
        self._transitions.verdicts(values)
        self.snapshot, self.values = snapshot, values
        self.published = Published(samples=samples, monotonic_seconds=snapshot.monotonic_seconds)
        return snapshot

    async def _snapshot(self) -> Snapshot:
        async with asyncio.TaskGroup() as group:
            engine = group.create_task(self._engine())
            gpu = group.create_task(
                self._time_reading(Source.NVML, self._sources.gpus.read(self._gpu_timeout_seconds))
            )
            process = group.create_task(self._processes(engine))
            inside = group.create_task(self._read_probe())
        page, engine_time = engine.result()
        readings, gpu_time = gpu.result()
        processes, process_time = process.result()
        files, probe_time = inside.result()
        found = NO_PROCESSES if isinstance(processes, Failure) else processes
        seen = processes if isinstance(processes, Failure) else processes.engine
        now = self._clock.time()
        probe = classify_probe(files, seen, now)
        self._container, host = update_container(
            self._container, processes, probe, limit_bytes=self._host_limit_bytes
        )
        gpus: tuple[Gpu, ...] | Failure
        if isinstance(readings, Failure):
            gpus = readings
        else:
            self._attribution, gpus = attribute(
                self._attribution, readings, processes, self._selection
            )
        return Snapshot(
            time_seconds=now,
            monotonic_seconds=self._clock.monotonic(),
            engines=complete_page(page, probe, found.options),
            gpus=add_inside(gpus, probe),
            processes=seen,
            probe=probe,
            reading_times=(engine_time, gpu_time, process_time, *probe_time),
            host=host,
            unanswered_since_seconds=None
            if self._canary is None
            else self._canary.unanswered_since(),
            neighbours=found.neighbours,
            ambiguous=found.ambiguous_roots,
            left_behind=found.left_behind,
            has_silent_core=isinstance(probe, ProbeReadings) and probe.has_silent_core,
            pools=list_pools(page, seen, found.options),
            token_bytes=None if self._sources.model is None else self._sources.model(processes),
        )

    async def _engine(self) -> Timed[EnginePage | Failure]:
        """Parse a large page on a thread, so that one made to be costly blocks no scrape and no GPU sample."""
        text, time = await self._time_reading(Source.ENGINE, self._sources.engine.fetch())
        if isinstance(text, Failure):
            return text, time
        if len(text) <= SMALL_PAGE:
            return self._parse(text), time
        try:
            return await self._parser.call(partial(self._parse, text), PARSE_SECONDS), time
        except TimeoutError:
            message = f"the engine's page was not understood within {PARSE_SECONDS:g} s: check that it is vLLM's"
            return Failure(source=Source.ENGINE, reason=Reason.OUT_OF_BOUNDS, message=message), time
        except OSError as error:
            return build_unavailable(
                Source.ENGINE, "the engine's page cannot be parsed", error
            ), time

    async def _processes(
        self, engine: asyncio.Task[Timed[EnginePage | Failure]]
    ) -> Timed[ProcessReadings | Failure]:
        """Read the processes in parallel to the page, with the last page; the first reading waits for a page."""
        page = (await engine)[0] if self.snapshot is None else self.snapshot.engines
        return await self._time_reading(
            Source.PROCESS, self._sources.processes(self._gpu_timeout_seconds, page)
        )

    async def _read_probe(
        self,
    ) -> tuple[tuple[ProbedProcess, ...] | Failure | None, tuple[ReadingTime, ...]]:
        if self._sources.probe is None:
            return None, ()
        files, time = await self._time_reading(
            Source.PROBE, self._sources.probe(self._gpu_timeout_seconds)
        )
        return files, (time,)

    async def _time_reading(self, source: Source, reading: Awaitable[T]) -> Timed[T]:
        machine = asyncio.get_running_loop().time
        began = machine()
        value = await reading
        ended = machine()
        return value, ReadingTime(
            source=source, seconds=ended - began, ended_monotonic_seconds=ended
        )

    def _update_run(self, snapshot: Snapshot) -> Snapshot:
        try:
            self.states[ENGINE_RUN], snapshot = update_run(self.states[ENGINE_RUN], snapshot)
            snapshot = add_lost_gpus(snapshot)
        except Exception as error:  # noqa: BLE001 - as below: without the run's state nothing is judged
            self.states[ENGINE_RUN] = forget_run(self.states[ENGINE_RUN])
            self._transitions.log_fault(ENGINE_RUN, error)
        else:
            self._transitions.log_fault(ENGINE_RUN, None)
        return snapshot

    def _derive(self, derivation: Derivation[Any], snapshot: Snapshot) -> tuple[Sample, ...]:
        try:
            self.states[derivation.name], samples = answer(
                derivation, self.states[derivation.name], snapshot
            )
        except Exception as error:  # noqa: BLE001 - one derivation's fault never costs the page
            self.states[derivation.name] = derivation.initial
            self._transitions.log_fault(derivation.name, error)
            return ()
        self._transitions.log_fault(derivation.name, None)
        return samples
