"""Everything that watches one engine.

A daemon may have several watches, which share nothing. A tick reads all sources in parallel,
evaluates the readings and publishes the result. The published result is afterwards shown, saved and
recorded.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from vllm_headroom.clock import Clock
from vllm_headroom.daemon import loop
from vllm_headroom.daemon.canary import Canary
from vllm_headroom.daemon.flight import Flight
from vllm_headroom.daemon.logs import RecentLines
from vllm_headroom.daemon.server_pages import ServerPages
from vllm_headroom.daemon.sources import GpuSource, Sources
from vllm_headroom.daemon.state.file import HISTORY
from vllm_headroom.daemon.state.lock import FolderLock
from vllm_headroom.daemon.state.store import StateKeeper
from vllm_headroom.daemon.transitions import Transitions
from vllm_headroom.derive.pages import count_running, find_highest_kv_use
from vllm_headroom.derive.tick import (
    UNEXPECTED,
    Evaluation,
    TickReadings,
    TickResult,
    TickRules,
)
from vllm_headroom.expose.view import History, LastIncident
from vllm_headroom.model import (
    EnginePage,
    Failure,
    ProcessReadings,
    Published,
    ReadingTime,
    Snapshot,
)
from vllm_headroom.scrape.shortage import build_unavailable
from vllm_headroom.trace.recorder import Recorder
from vllm_headroom.vocabulary import Reason, Source
from vllm_headroom.worker import Worker

SMALL_PAGE: Final = 128 * 2**10
"""The maximum number of characters in a page that is parsed on the event loop. A page of vLLM has
67,000 characters. For a page this small, a thread would cost more than the parsing itself. The
worst-case page of this size takes 50 ms.
"""

PARSE_SECONDS: Final = 2.0
"""The time limit for parsing a page. A page with eight engines takes 1 ms. The worst-case page of
the allowed size takes half a second.
"""

SAVE_SECONDS: Final = 60.0
"""The interval at which the state is saved."""

LAST_SAVE_SECONDS: Final = 0.5
"""The time limit for saving the state at shutdown. Scrapes in progress get the same amount of time,
in parallel.
"""

T = TypeVar("T")
F = TypeVar("F")
Timed = tuple[T, ReadingTime]
"""What was read, and how long it took to read."""

ProcessTask = asyncio.Task[Timed[ProcessReadings | Failure]]

Parse = Callable[[str], EnginePage | Failure]
Recall = Callable[[Snapshot], Awaitable[Mapping[str, Any]]]
"""Returns the states that an earlier process saved, keyed by derivation. The derivations continue
from them. Usually, there are none.
"""


class Sampler:
    """Samples one engine."""

    def __init__(
        self,
        *,
        sources: Sources,
        parse: Parse,
        rules: TickRules,
        clock: Clock,
        gpu_timeout_seconds: float,
        recall: Recall | None = None,
        canary: Canary | None = None,
        server_pages: ServerPages | None = None,
    ) -> None:
        """Build a sampler that has not read anything yet."""
        self._sources = sources
        self._parse = parse
        self._clock = clock
        self._gpu_timeout_seconds = gpu_timeout_seconds
        self._recall = recall
        self._canary = canary
        self._server_pages = server_pages
        self._parser = Worker[EnginePage | Failure]("parse")
        self._process_task: ProcessTask | None = None
        """The reading of the processes for the next tick. None if this reading has not begun."""
        self._transitions = Transitions(rules.selection)
        self._evaluation = Evaluation(rules, self._run_guarded)
        self.latest: TickResult | None = None
        """The latest tick's result, or None before the first tick. The result is always replaced as
        a whole.
        """

    @property
    def states(self) -> Mapping[str, Any]:
        """Return the states to save: the engine's run and each derivation, by name."""
        return self._evaluation.states

    @property
    def published(self) -> Published | None:
        """Return the latest tick's samples, or None before the first tick."""
        return None if self.latest is None else self.latest.published

    def begin_processes(self) -> ProcessTask | None:
        """Begin to read the processes for the next tick, and return the task.

        Returns None before the first tick. The first tick waits for the page before it reads the
        processes.
        """
        if self.latest is not None:
            page = self.latest.snapshot.engines
            self._process_task = asyncio.create_task(self._read_processes(page))
        return self._process_task

    async def tick(self) -> TickResult:
        """Read all sources in parallel, evaluate the readings, and publish the result.

        An error in a source or an evaluation step is logged. Only the samples from that part are
        missing.
        """
        snapshot = self._evaluation.build_snapshot(await self._read_sources())
        # The states are recalled first, so that this sample continues the saved run.
        if self._recall is not None:
            self._evaluation.states.update(await self._recall_guarded(self._recall, snapshot))
        snapshot = self._evaluation.follow_run(snapshot)
        # Changes are logged first. An error in a verdict therefore cannot hide a change.
        self._run_guarded("log of changes", partial(self._transitions.report, snapshot), None)
        result = self._evaluation.judge(snapshot)
        report_leaks = partial(self._transitions.report_leaks, result.values)
        self._run_guarded("log of leaks", report_leaks, None)
        self.latest = result
        return result

    async def _recall_guarded(self, recall: Recall, snapshot: Snapshot) -> Mapping[str, Any]:
        """Return the states to continue from.

        If `recall` raises, logs the error and returns an empty mapping.
        """
        try:
            states = await recall(snapshot)
        except Exception as error:  # noqa: BLE001 - any error: the states start over
            self._transitions.log_fault("saved state", error)
            return {}
        self._transitions.log_fault("saved state", None)
        return states

    async def _read_sources(self) -> TickReadings:
        """Read all sources."""
        # The sources are read in parallel, so all readings have nearly the same time.
        async with asyncio.TaskGroup() as group:
            engine_task = group.create_task(self._read_engine())
            gpu_task = group.create_task(
                self._time_reading(
                    Source.NVML, partial(self._sources.gpus.read, self._gpu_timeout_seconds)
                )
            )
            process_task = self._process_task
            self._process_task = None
            if process_task is None:
                process_task = group.create_task(self._read_processes_after(engine_task))
            probe_task = self._begin_optional(group, Source.PROBE, self._sources.probe)
            log_task = self._begin_optional(group, Source.LOG, self._sources.log)
        page, engine_time = engine_task.result()
        gpus, gpu_time = gpu_task.result()
        # A reading that began before the tick is not in the group.
        processes, process_time = await process_task
        reading_times = [engine_time, gpu_time, process_time]
        probe_files = None
        if probe_task is not None:
            probe_files, probe_time = probe_task.result()
            reading_times.append(probe_time)
        engine_log = None
        if log_task is not None:
            engine_log, log_time = log_task.result()
            reading_times.append(log_time)

        now_seconds = self._clock.time()
        unanswered_since_seconds = None
        if self._canary is not None:
            self._run_guarded("canary", self._canary.note_tick, None)
            unanswered_since_seconds = self._canary.unanswered_since_seconds
        token_bytes = None
        if self._sources.model is not None:
            find_model = partial(self._sources.model, processes)
            token_bytes = self._run_guarded("served model", find_model, None)
        return TickReadings(
            time_seconds=now_seconds,
            monotonic_seconds=self._clock.monotonic(),
            page=page,
            gpus=gpus,
            processes=processes,
            probe_files=probe_files,
            log=engine_log,
            reading_times=tuple(reading_times),
            token_bytes=token_bytes,
            unanswered_since_seconds=unanswered_since_seconds,
            server=None if self._server_pages is None else self._server_pages.latest,
        )

    async def _read_engine(self) -> Timed[EnginePage | Failure]:
        """Return the parsed page or a Failure, and how long fetching took.

        A large page is parsed on a thread, to avoid delaying scrapes and GPU samples.
        """
        text, time = await self._time_reading(Source.ENGINE, self._sources.engine.fetch)
        if isinstance(text, Failure):
            return text, time
        page = await self._read_guarded(Source.ENGINE, "parsing", partial(self._parse_page, text))
        return page, time

    async def _parse_page(self, text: str) -> EnginePage | Failure:
        """Return the engines on a page.

        Returns a Failure if parsing fails or takes too long.
        """
        # For a small page, a thread would cost more than parsing the page here.
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

    async def _read_processes_after(
        self, engine_task: asyncio.Task[Timed[EnginePage | Failure]]
    ) -> Timed[ProcessReadings | Failure]:
        """Read the engine's processes.

        The engine's page helps to identify its processes. The first tick waits for the page. Later
        ticks use the previous tick's page. Later ticks can therefore read the page and the
        processes in parallel.
        """
        if self.latest is None:
            page, _ = await engine_task
        else:
            page = self.latest.snapshot.engines
        return await self._read_processes(page)

    async def _read_processes(self, page: EnginePage | Failure) -> Timed[ProcessReadings | Failure]:
        """Read the engine's processes with the help of this page."""
        return await self._time_reading(
            Source.PROCESS, partial(self._sources.processes, self._gpu_timeout_seconds, page)
        )

    def _begin_optional(
        self,
        group: asyncio.TaskGroup,
        source: Source,
        read: Callable[[float], Awaitable[T | Failure]] | None,
    ) -> asyncio.Task[Timed[T | Failure]] | None:
        """Begin reading an optional source; return None if it is not configured."""
        if read is None:
            return None
        return group.create_task(
            self._time_reading(source, partial(read, self._gpu_timeout_seconds))
        )

    async def _time_reading(
        self, source: Source, read: Callable[[], Awaitable[T | Failure]]
    ) -> Timed[T | Failure]:
        """Return a reader's result and the time it took.

        The result is a Failure if the reader raises.
        """
        # The machine's clock measures the time, because the demo's clock runs faster.
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
        """Return what a reader returns; if it raises, log the error and return a Failure.

        Every reader is called through this method. Bad content from one source therefore cannot end
        the daemon. Even a MemoryError, for example because a source is too large, affects only that
        source.
        """
        try:
            value = await read()
        except Exception as error:  # noqa: BLE001 - any error: it is counted and logged
            self._transitions.log_reader_fault(source, step, error)
            return UNEXPECTED[source]
        if not isinstance(value, Failure):
            self._transitions.log_reader_fault(source, step, None)
        return value

    def _run_guarded(self, name: str, step: Callable[[], T], fallback: F) -> T | F:
        """Return what an evaluation step returns; log any error and return `fallback`.

        Thanks to the fallback, the page is published even if a step raises.
        """
        try:
            outcome = step()
        except Exception as error:  # noqa: BLE001 - any error: it costs only what the step adds
            self._transitions.log_fault(name, error)
            return fallback
        self._transitions.log_fault(name, None)
        return outcome


class EngineWatch:
    """Samples one engine, and owns everything remembered, saved and recorded about it."""

    def __init__(
        self,
        *,
        sampler: Sampler,
        history: History,
        keeper: StateKeeper | None,
        flight: Flight | None,
        recorder: Recorder | None,
        canary: Canary | None,
        server_pages: ServerPages | None,
        gpus: GpuSource,
        clock: Clock,
        lock: FolderLock | None = None,
        recent_lines: RecentLines | None = None,
    ) -> None:
        """`lock` is the lock on the folder that contains the state and the flight record."""
        self.history = history
        """The curves that the page draws for the last day."""
        self._sampler = sampler
        self._keeper = keeper
        self._flight = flight
        self._recorder = recorder
        self._canary = canary
        self._server_pages = server_pages
        self._gpus = gpus
        self._clock = clock
        self._lock = lock
        self._recent_lines = recent_lines
        # The guarded steps follow the sampling. An error in one step must not prevent the other
        # steps from running.
        self._history_guard = loop.StepGuard()
        self._recorder_guard = loop.StepGuard()
        self._flight_guard = loop.StepGuard()

    def close(self) -> None:
        """Release the folder, so that the engine can be watched again.

        No sample may be taken after this.
        """
        if self._lock is not None:
            self._lock.release()
        if self._recent_lines is not None:
            self._recent_lines.close()

    @property
    def latest(self) -> TickResult | None:
        """Return the latest tick's result, or None before the first tick."""
        return self._sampler.latest

    @property
    def published(self) -> Published | None:
        """Return the latest tick's samples, or None before the first tick."""
        return self._sampler.published

    @property
    def last_incident(self) -> LastIncident | None:
        """The newest incident on disk, or None without an incident or a configured folder."""
        return None if self._flight is None else self._flight.last

    def begin_processes(self) -> ProcessTask | None:
        """Begin to read the processes for the next sample; None before the first sample."""
        return self._sampler.begin_processes()

    async def sample(self) -> TickResult:
        """Take one sample and add it to the history."""
        result = await self._sampler.tick()
        await self._history_guard.run(partial(self._add_to_history, result))
        return result

    async def _add_to_history(self, result: TickResult) -> None:
        snapshot = result.snapshot
        page = snapshot.page
        self.history.step(snapshot, result.verdicts, count_running(page), find_highest_kv_use(page))

    async def record(self) -> None:
        """Write the latest tick to the trace and the flight record, if they are configured."""
        result = self.latest
        if result is None:
            return
        if self._recorder is not None:
            await self._recorder_guard.run(partial(self._recorder.record, result.snapshot))
        if self._flight is not None:
            step = partial(self._flight.step, result.snapshot, result.verdicts, result.values)
            await self._flight_guard.run(step)

    async def sample_gpu_memory(self, timeout_seconds: float) -> None:
        """Read only the GPUs' used memory, for their peaks and the flight record."""
        used_bytes = await self._gpus.sample_used(timeout_seconds)
        if self._flight is not None:
            self._flight.recent.add(self._clock.time(), used_bytes)

    def list_loops(self) -> list[Coroutine[Any, Any, None]]:
        """Return the loops that run alongside the sampling until shutdown."""
        loops: list[Coroutine[Any, Any, None]] = []
        if self._keeper is not None:
            loops.append(self._save_states(self._keeper))
        if self._canary is not None:
            loops.append(self._canary.run(self._read_snapshot))
        if self._server_pages is not None:
            loops.append(self._server_pages.run(self._read_snapshot))
        return loops

    def _read_snapshot(self) -> Snapshot | None:
        """Return the latest sample's snapshot, or None before the first sample."""
        return None if self.latest is None else self.latest.snapshot

    async def _save_states(self, keeper: StateKeeper) -> None:
        """Save the states at regular intervals until shutdown, and once more at shutdown."""

        def collect_states() -> Mapping[str, Any]:
            return {**self._sampler.states, HISTORY.name: self.history.save()}

        try:
            await loop.run_every(SAVE_SECONDS, lambda: keeper.save(collect_states()), self._clock)
        finally:
            # The shutdown cancels this task, so changes since the last save are written here.
            await loop.StepGuard().run(lambda: keeper.save(collect_states(), LAST_SAVE_SECONDS))


async def recall_states(
    keeper: StateKeeper, history: History, snapshot: Snapshot
) -> Mapping[str, Any]:
    """Return the states to continue from, keyed by derivation, and restore the page's history.

    An earlier daemon saved the states and the history. On most ticks, the result is empty, because
    each state is returned only once.
    """
    states = dict(await keeper.recall(snapshot))
    saved_history = states.pop(HISTORY.name, None)
    if saved_history is not None:
        history.restore(saved_history)
    return states
