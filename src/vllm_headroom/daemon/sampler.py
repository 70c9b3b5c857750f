"""Sample once per tick: read, attribute, derive, judge, publish."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from msgspec import Struct

from vllm_headroom.clock import Clock
from vllm_headroom.daemon.canary import Canary
from vllm_headroom.daemon.judge import Judge
from vllm_headroom.daemon.server_pages import ServerPages
from vllm_headroom.daemon.sources import Sources
from vllm_headroom.daemon.transitions import Transitions
from vllm_headroom.derive import LEAK, Derivation, answer
from vllm_headroom.derive.attribution import AttributionState, Selection, attribute
from vllm_headroom.derive.configured import complete_page, list_pools
from vllm_headroom.derive.gates import GATE, Gate
from vllm_headroom.derive.host_memory import ContainerState, update_container
from vllm_headroom.derive.inside import add_inside
from vllm_headroom.derive.leak.leak import LeakMemory
from vllm_headroom.derive.life.engine import ENGINE_RUN, EngineMemory, forget_run, update_engine
from vllm_headroom.derive.lost_gpus import add_lost_gpus
from vllm_headroom.derive.probe_files import classify_probe
from vllm_headroom.derive.verdicts import VERDICTS
from vllm_headroom.model import (
    NO_VERDICT,
    EnginePage,
    EngineProcess,
    Failure,
    Gpu,
    ProbedProcess,
    ProbeReadings,
    ProcessReadings,
    Published,
    ReadingTime,
    Sample,
    Snapshot,
    Values,
    Verdict,
)
from vllm_headroom.scrape.shortage import build_unavailable
from vllm_headroom.vocabulary import Reason, Source
from vllm_headroom.worker import Worker

SMALL_PAGE: Final = 128 * 2**10
"""A page of at most this many characters is parsed on the event loop. vLLM's has 67,000, for which
a thread costs more than the parsing. The costliest page of this size takes 50 ms."""

PARSE_SECONDS: Final = 2.0
"""How long parsing a page may take. A page of eight engines takes 1 ms, the costliest page of the
allowed size half a second."""

NO_PROCESSES: Final = ProcessReadings(engine=(), visible_pids=frozenset(), sees_host_pids=False)
"""The facts of /proc where it could not be read."""

UNEXPECTED: Final = {
    source: Failure(
        source=source,
        reason=Reason.UNEXPECTED,
        message="reading it raised an error that is a fault of the sidecar: report the traceback"
        " in the sidecar's log",
    )
    for source in Source
}
"""The failure of each source whose reading, or whose evaluation, raised an error."""

T = TypeVar("T")
F = TypeVar("F")
Timed = tuple[T, ReadingTime]
"""What was read, and how long that took."""

Parse = Callable[[str], EnginePage | Failure]
Recall = Callable[[Snapshot], Awaitable[Mapping[str, Any]]]
"""Returns the states of an earlier process to continue from, by derivation; mostly empty."""


class TickResult(Struct, frozen=True, kw_only=True):
    """What one tick read, derived and judged: all that is shown, published and recorded of it."""

    snapshot: Snapshot
    """What was read. `snapshot.engine_status.event` is the engine's exit or stall, where this tick
    saw one."""
    published: Published
    """The samples of the metrics page."""
    values: Values
    """The same samples, to look up by metric and labels."""
    verdicts: tuple[Verdict, ...]
    gate: Gate


class Sampler:
    """Samples one engine, and owns what the derivations remember of it."""

    def __init__(
        self,
        *,
        sources: Sources,
        parse: Parse,
        selection: Selection,
        derivations: tuple[Derivation[Any], ...],
        clock: Clock,
        gpu_timeout_seconds: float,
        recall: Recall | None = None,
        host_limit_bytes: int | None = None,
        reported_bytes: float | None = None,
        judge: Judge | None = None,
        canary: Canary | None = None,
        server_pages: ServerPages | None = None,
    ) -> None:
        """Build a sampler that has read nothing yet.

        `host_limit_bytes` is the operator's limit of the engine's container, `reported_bytes` the
        operator's figure of what the engine uses of each GPU. Without a judge there are no gate and
        no verdicts.
        """
        self._sources = sources
        self._parse = parse
        self._selection = selection
        self._derivations = derivations
        self._clock = clock
        self._gpu_timeout_seconds = gpu_timeout_seconds
        self._recall = recall
        self._host_limit_bytes = host_limit_bytes
        self._reported_bytes = reported_bytes
        self._judge = judge
        self._canary = canary
        self._server_pages = server_pages
        self._parser = Worker[EnginePage | Failure]("parse")
        self._transitions = Transitions(selection)
        self._attribution = AttributionState()
        self._container = ContainerState()
        self.states: dict[str, Any] = {ENGINE_RUN: EngineMemory()}
        """The state of the engine's run and of each derivation, by name, as they are saved."""
        for derivation in derivations:
            self.states[derivation.name] = derivation.initial
        self.latest: TickResult | None = None
        """The newest tick's result, None before the first. It is replaced as a whole."""

    @property
    def published(self) -> Published | None:
        """The newest tick's samples, None before the first."""
        return None if self.latest is None else self.latest.published

    async def tick(self) -> TickResult:
        """Read all sources at once, derive, judge and publish.

        An error in one source, in one derivation, in the gate or in the verdicts is logged, and
        leaves out only the samples of that part.
        """
        snapshot = await self._read_sources()
        if self._recall is not None:
            self.states.update(await self._recall(snapshot))
        # The derivations read the status of the engine's run, so it comes first.
        snapshot = self._update_run(snapshot)
        self._transitions.report(snapshot)
        samples: list[Sample] = []
        for derivation in self._derivations:
            samples += self._derive(derivation, snapshot)
        values = Values(samples)

        # The verdicts read the gate, and both read the samples of all derivations.
        gate, gate_samples = self._judge_gate(snapshot, values)
        samples += gate_samples
        values.add(gate_samples)
        verdicts, verdict_samples = self._judge_verdicts(snapshot, values)
        samples += verdict_samples
        values.add(verdict_samples)

        self._transitions.report_leaks(values)
        self.latest = TickResult(
            snapshot=snapshot,
            published=Published(
                samples=tuple(samples), monotonic_seconds=snapshot.monotonic_seconds
            ),
            values=values,
            verdicts=verdicts,
            gate=gate,
        )
        return self.latest

    async def _read_sources(self) -> Snapshot:
        """Return the snapshot of all sources, without the status of the engine's run."""
        # In parallel, so that all readings are of nearly the same moment.
        async with asyncio.TaskGroup() as group:
            engine_task = group.create_task(self._read_engine())
            gpu_task = group.create_task(
                self._time_reading(
                    Source.NVML, partial(self._sources.gpus.read, self._gpu_timeout_seconds)
                )
            )
            process_task = group.create_task(self._read_processes(engine_task))
            probe_task = group.create_task(self._read_probe())
        page, engine_time = engine_task.result()
        gpu_readings, gpu_time = gpu_task.result()
        process_readings, process_time = process_task.result()
        probe_files, probe_times = probe_task.result()

        processes: tuple[EngineProcess, ...] | Failure
        if isinstance(process_readings, Failure):
            process_facts = NO_PROCESSES
            processes = process_readings
        else:
            process_facts = process_readings
            processes = process_readings.engine

        now_seconds = self._clock.time()
        options = process_facts.options
        no_probe = None if probe_files is None else UNEXPECTED[Source.PROBE]
        probe = self._complete(
            "probe files", partial(classify_probe, probe_files, processes, now_seconds), no_probe
        )
        self._container, host = self._complete(
            "host memory",
            partial(
                update_container,
                self._container,
                process_readings,
                probe,
                limit_bytes=self._host_limit_bytes,
            ),
            (ContainerState(), None),
        )
        gpus: tuple[Gpu, ...] | Failure
        if isinstance(gpu_readings, Failure):
            gpus = gpu_readings
        else:
            self._attribution, gpus = self._complete(
                "attribution",
                partial(
                    attribute, self._attribution, gpu_readings, process_readings, self._selection
                ),
                (AttributionState(), UNEXPECTED[Source.NVML]),
            )
        unanswered_since_seconds = None
        if self._canary is not None:
            self._canary.note_tick()
            unanswered_since_seconds = self._canary.unanswered_since_seconds
        token_bytes = None
        if self._sources.model is not None:
            token_bytes = self._complete(
                "served model", partial(self._sources.model, process_readings), None
            )
        return Snapshot(
            time_seconds=now_seconds,
            monotonic_seconds=self._clock.monotonic(),
            engines=self._complete(
                "page's facts", partial(complete_page, page, probe, options), page
            ),
            gpus=self._complete("inside", partial(add_inside, gpus, probe), gpus),
            processes=processes,
            probe=probe,
            reading_times=(engine_time, gpu_time, process_time, *probe_times),
            host=host,
            unanswered_since_seconds=unanswered_since_seconds,
            server=None if self._server_pages is None else self._server_pages.latest,
            neighbours=process_facts.neighbours,
            ambiguous_engines=process_facts.ambiguous_engines,
            left_behind=process_facts.left_behind,
            has_silent_core=isinstance(probe, ProbeReadings) and probe.has_silent_core,
            pools=self._complete("pools", partial(list_pools, page, processes, options), ()),
            token_bytes=token_bytes,
        )

    async def _read_engine(self) -> Timed[EnginePage | Failure]:
        """Return the parsed page, or why there is none, and how long fetching it took.

        A large page is parsed on a thread: a page crafted to parse slowly must not delay scrapes or
        GPU samples.
        """
        text, time = await self._time_reading(Source.ENGINE, self._sources.engine.fetch)
        if isinstance(text, Failure):
            return text, time
        page = await self._read_guarded(Source.ENGINE, "parsing", partial(self._parse_page, text))
        return page, time

    async def _parse_page(self, text: str) -> EnginePage | Failure:
        if len(text) <= SMALL_PAGE:
            return self._parse(text)
        try:
            return await self._parser.call(partial(self._parse, text), PARSE_SECONDS)
        except TimeoutError:
            return Failure(
                source=Source.ENGINE,
                reason=Reason.OUT_OF_BOUNDS,
                message=f"the engine's page was not understood within {PARSE_SECONDS:g} s: check"
                " that it is vLLM's",
            )
        except OSError as error:
            return build_unavailable(Source.ENGINE, "the engine's page cannot be parsed", error)

    async def _read_processes(
        self, engine_task: asyncio.Task[Timed[EnginePage | Failure]]
    ) -> Timed[ProcessReadings | Failure]:
        """Read the engine's processes, which its page helps to identify.

        The first tick waits for the page. Later ticks use the last tick's page, so that both are
        read in parallel.
        """
        if self.latest is None:
            page, _ = await engine_task
        else:
            page = self.latest.snapshot.engines
        return await self._time_reading(
            Source.PROCESS, partial(self._sources.processes, self._gpu_timeout_seconds, page)
        )

    async def _read_probe(
        self,
    ) -> tuple[tuple[ProbedProcess, ...] | Failure | None, tuple[ReadingTime, ...]]:
        """Return the probe's files and how long reading them took.

        None and an empty tuple where no folder of the probe is configured.
        """
        if self._sources.probe is None:
            return None, ()
        files, time = await self._time_reading(
            Source.PROBE, partial(self._sources.probe, self._gpu_timeout_seconds)
        )
        return files, (time,)

    async def _time_reading(
        self, source: Source, read: Callable[[], Awaitable[T | Failure]]
    ) -> Timed[T | Failure]:
        """Return what a reader returns, or why it raised, and how long it took."""
        # By the machine's clock: the clock of the demo's daemon runs faster.
        read_machine_seconds = asyncio.get_running_loop().time
        began_seconds = read_machine_seconds()
        value = await self._read_guarded(source, "reading", read)
        ended_seconds = read_machine_seconds()
        return value, ReadingTime(
            source=source,
            seconds=ended_seconds - began_seconds,
            ended_monotonic_seconds=ended_seconds,
        )

    async def _read_guarded(
        self, source: Source, step: str, read: Callable[[], Awaitable[T | Failure]]
    ) -> T | Failure:
        """Return what a reader returns; where it raises, log the error and return a failure.

        Every call of a reader goes through here: what one source contains must not end the daemon.
        A MemoryError is raised: the loop skips the tick.
        """
        try:
            value = await read()
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - any error: it is counted and logged
            self._transitions.log_reader_fault(source, step, error)
            return UNEXPECTED[source]
        if not isinstance(value, Failure):
            self._transitions.log_reader_fault(source, step, None)
        return value

    def _complete(self, name: str, step: Callable[[], T], fallback: F) -> T | F:
        """Return what a step of building the snapshot returns.

        Where it raises, log the error and return `fallback`.
        """
        try:
            outcome = step()
        except Exception as error:  # noqa: BLE001 - any error: it costs only what the step adds
            self._transitions.log_fault(name, error)
            return fallback
        self._transitions.log_fault(name, None)
        return outcome

    def _update_run(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with the status of the engine's run.

        Where deriving the status fails, return the snapshot without it and forget the run.
        """
        try:
            self.states[ENGINE_RUN], snapshot = update_engine(
                self.states[ENGINE_RUN], snapshot, configured_bytes=self._reported_bytes
            )
            snapshot = add_lost_gpus(snapshot)
        except Exception as error:  # noqa: BLE001 - without the run's state nothing is judged
            self.states[ENGINE_RUN] = forget_run(self.states[ENGINE_RUN])
            self._transitions.log_fault(ENGINE_RUN, error)
        else:
            self._transitions.log_fault(ENGINE_RUN, None)
        return snapshot

    def _derive(self, derivation: Derivation[Any], snapshot: Snapshot) -> tuple[Sample, ...]:
        """Return a derivation's samples and store its new state.

        Where it fails, there are no samples and it starts over from its initial state.
        """
        self.states[derivation.name], samples = self._attempt(
            derivation.name,
            lambda: answer(derivation, self.states[derivation.name], snapshot),
            derivation.initial,
        )
        return samples

    def _judge_gate(self, snapshot: Snapshot, values: Values) -> tuple[Gate, tuple[Sample, ...]]:
        """Return the gate and its samples; an open gate without samples where judging fails."""
        judge = self._judge
        if judge is None:
            return Gate(), ()
        return self._attempt(GATE, lambda: judge.judge_gate(snapshot, values), Gate())

    def _judge_verdicts(
        self, snapshot: Snapshot, values: Values
    ) -> tuple[tuple[Verdict, ...], tuple[Sample, ...]]:
        """Return the verdicts and their samples; NO_VERDICT without samples where judging fails."""
        judge = self._judge
        if judge is None:
            return (NO_VERDICT,), ()
        leak_memory: LeakMemory = self.states.get(LEAK.name, LEAK.initial)
        return self._attempt(
            VERDICTS,
            lambda: judge.judge_verdicts(snapshot, values, leak_memory),
            (NO_VERDICT,),
        )

    def _attempt(
        self, name: str, step: Callable[[], tuple[T, tuple[Sample, ...]]], initial: T
    ) -> tuple[T, tuple[Sample, ...]]:
        """Return what a step returns; where it raises, log the error and return `initial`.

        An error in one step must not keep the page from being published.
        """
        return self._complete(name, step, (initial, ()))
