"""The straight line, once per tick: read, attribute, derive, publish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any, Final, TypeVar

from vllm_headroom.clock import Clock
from vllm_headroom.daemon.canary import Canary
from vllm_headroom.daemon.sources import Sources
from vllm_headroom.daemon.transitions import Transitions
from vllm_headroom.derive.attribution import AttributionState, Selection, attribute
from vllm_headroom.derive.container import ContainerState, container
from vllm_headroom.derive.derivation import Derivation, answer
from vllm_headroom.derive.inside.ledger import with_inside
from vllm_headroom.derive.inside.present import told
from vllm_headroom.derive.inside.schedulers import with_steps
from vllm_headroom.derive.life.follow import LIFE, LifeState, forgotten, lived
from vllm_headroom.derive.lost import with_lost
from vllm_headroom.model import (
    EnginePage,
    Failure,
    Gpu,
    GpuReadings,
    ProbedProcess,
    ProcessReadings,
    Published,
    ReadingTime,
    Sample,
    Snapshot,
    Values,
)
from vllm_headroom.scrape.shortage import unavailable
from vllm_headroom.vocabulary import Reason, Source
from vllm_headroom.worker import Worker

PARSE_SECONDS: Final = 2.0
"""A page of eight engines is understood in 1 ms, the costliest that is read at all in half a second."""

T = TypeVar("T")
Timed = tuple[T, ReadingTime]


class Sampler:
    """Owns the state of every derivation and what is published; `published` is None before the first tick ended.

    `values` are the answers of the last tick's derivations.
    `recall` is asked with every snapshot for states of an earlier process, by derivation, that replace those here.
    `host_limit_bytes` is what the operator says that the engine's container may take of the host's memory.
    `judge` returns the question that is asked last, of the values of all others.
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
        judge: Callable[[Values], Derivation[Any]] | None = None,
        canary: Canary | None = None,
    ) -> None:
        self.published: Published | None = None
        self.snapshot: Snapshot | None = None
        self.values = Values(())
        self._sources = sources
        self._parse = parse
        self._parser = Worker[EnginePage | Failure]("parse")
        self._selection = selection
        self._attribution = AttributionState()
        self._container = ContainerState()
        self._host_limit_bytes = host_limit_bytes
        self._derivations = derivations
        self._states: dict[str, Any] = {derivation.name: derivation.initial for derivation in derivations}
        self._states[LIFE] = LifeState()
        self._clock = clock
        self._gpu_timeout_seconds = gpu_timeout_seconds
        self._transitions = Transitions(selection)
        self._recall = recall
        self._judge = judge
        if judge is not None:
            last = judge(self.values)
            self._states[last.name] = last.initial
        self._canary = canary

    @property
    def states(self) -> Mapping[str, Any]:
        """The state of every derivation, by its name, and of the engine's life."""
        return dict(self._states)

    async def tick(self) -> None:
        """Read all sources at once, derive and publish; a fault in one part costs that part only."""
        snapshot = await self._snapshot()
        if self._recall is not None:
            self._states.update(await self._recall(snapshot))
        snapshot = self._lived(snapshot)
        self._transitions.report(snapshot)
        samples = tuple(chain.from_iterable(self._derive(derivation, snapshot) for derivation in self._derivations))
        values = Values(samples)
        if self._judge is not None and (judged := self._derive(self._judge(values), snapshot)):
            samples += judged
            values = Values(samples)
        self._transitions.verdicts(values)
        self.snapshot, self.values = snapshot, values
        self.published = Published(samples=samples, monotonic_seconds=snapshot.monotonic_seconds)

    async def _snapshot(self) -> Snapshot:
        async with asyncio.TaskGroup() as group:
            engine = group.create_task(self._engine())
            gpu = group.create_task(self._timed(Source.NVML, self._sources.gpus.read(self._gpu_timeout_seconds)))
            process = group.create_task(self._processes(engine))
            inside = group.create_task(self._inside())
        page, engine_time = engine.result()
        readings, gpu_time = gpu.result()
        processes, process_time = process.result()
        files, probe_time = inside.result()
        seen = processes if isinstance(processes, Failure) else processes.engine
        now = self._clock.time()
        probe = told(files, seen, now)
        self._container, host = container(self._container, processes, probe, limit_bytes=self._host_limit_bytes)
        gpus = readings if isinstance(readings, Failure) else self._attribute(readings, processes)
        return Snapshot(
            time_seconds=now,
            monotonic_seconds=self._clock.monotonic(),
            engines=with_steps(page, probe),
            gpus=with_inside(gpus, probe),
            processes=seen,
            probe=probe,
            reading_times=(engine_time, gpu_time, process_time, *probe_time),
            host=host,
            unanswered_since_seconds=None if self._canary is None else self._canary.unanswered_since(),
            neighbours=frozenset() if isinstance(processes, Failure) else processes.neighbours,
            ambiguous=0 if isinstance(processes, Failure) else processes.ambiguous_roots,
            left_behind=frozenset() if isinstance(processes, Failure) else processes.left_behind,
        )

    async def _engine(self) -> Timed[EnginePage | Failure]:
        text, time = await self._timed(Source.ENGINE, self._sources.engine.fetch())
        return (text if isinstance(text, Failure) else await self._understood(text)), time

    async def _processes(self, engine: asyncio.Task[Timed[EnginePage | Failure]]) -> Timed[ProcessReadings | Failure]:
        """Read the processes beside the page, by what the last one told of them; the first look waits for a page."""
        page = (await engine)[0] if self.snapshot is None else self.snapshot.engines
        return await self._timed(Source.PROCESS, self._sources.processes.read(self._gpu_timeout_seconds, page))

    async def _inside(self) -> tuple[tuple[ProbedProcess, ...] | Failure | None, tuple[ReadingTime, ...]]:
        if self._sources.probe is None:
            return None, ()
        files, time = await self._timed(Source.PROBE, self._sources.probe.read(self._gpu_timeout_seconds))
        return files, (time,)

    async def _timed(self, source: Source, reading: Awaitable[T]) -> Timed[T]:
        machine = asyncio.get_running_loop().time
        began = machine()
        value = await reading
        ended = machine()
        return value, ReadingTime(source=source, seconds=ended - began, ended_monotonic_seconds=ended)

    async def _understood(self, page: str) -> EnginePage | Failure:
        """Parse where a page that is made to be costly holds up no scrape and no look at the GPUs."""
        try:
            return await self._parser.call(partial(self._parse, page), PARSE_SECONDS)
        except TimeoutError:
            message = f"the engine's page was not understood within {PARSE_SECONDS:g} s: check that it is vLLM's"
            return Failure(source=Source.ENGINE, reason=Reason.OUT_OF_BOUNDS, message=message)
        except OSError as error:
            return unavailable(Source.ENGINE, "the engine's page cannot be parsed", error)

    def _attribute(self, readings: GpuReadings, processes: ProcessReadings | Failure) -> tuple[Gpu, ...]:
        self._attribution, gpus = attribute(self._attribution, readings, processes, self._selection)
        return gpus

    def _lived(self, snapshot: Snapshot) -> Snapshot:
        try:
            self._states[LIFE], snapshot = lived(self._states[LIFE], snapshot)
            snapshot = with_lost(snapshot)
        except Exception as error:  # noqa: BLE001 - the loop's rim, as below: without the life nothing is judged
            self._states[LIFE] = forgotten(self._states[LIFE])
            self._transitions.derivation(LIFE, error)
        else:
            self._transitions.derivation(LIFE, None)
        return snapshot

    def _derive(self, derivation: Derivation[Any], snapshot: Snapshot) -> tuple[Sample, ...]:
        try:
            self._states[derivation.name], samples = answer(derivation, self._states[derivation.name], snapshot)
        except Exception as error:  # noqa: BLE001 - the loop's rim: one derivation's fault never costs the page
            self._states[derivation.name] = derivation.initial
            self._transitions.derivation(derivation.name, error)
            return ()
        self._transitions.derivation(derivation.name, None)
        return samples
