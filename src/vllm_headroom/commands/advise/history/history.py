"""A recorded past to facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from vllm_headroom.commands.advise.facts import Facts, HostFacts, Leak, Origin
from vllm_headroom.commands.advise.history.engine_history import EngineHistory
from vllm_headroom.commands.advise.history.gpu_history import GpuHistory, Serving
from vllm_headroom.commands.advise.history.lives import Ends
from vllm_headroom.commands.advise.settings import COUNTS_PREFIXES, OLDEST, TELLS_SLEEP, Settings, Version, with_page
from vllm_headroom.derive.page_facts import awake, named, running_requests
from vllm_headroom.derive.readings import engine_labels
from vllm_headroom.model import EnginePage, EngineReading, Failure, Gpu, Snapshot
from vllm_headroom.trace.course import Course
from vllm_headroom.trace.replay import Watch

LONGEST_INTERVAL_SECONDS: Final = 300.0
"""The longest that the daemon may be told to sample at; what lies between two samples further apart was not seen."""


class History:
    """Gathers what the rules want to know of a past, sample by sample."""

    def __init__(self) -> None:
        self._watch = Watch()
        self._ends = Ends()
        self._at_least: Version = OLDEST
        self._since: float | None = None
        self._now = 0.0
        self._page: EnginePage | None = None
        self._engines: dict[tuple[str, str], EngineHistory] = {}
        self._gpus: dict[str, GpuHistory] = {}
        self._host_bytes: dict[str, float] = {}

    def step(self, snapshot: Snapshot) -> None:
        """Go on to the next sample."""
        seconds = snapshot.time_seconds - self._now if self._watch.samples else 0.0
        seconds = min(max(0.0, seconds), LONGEST_INTERVAL_SECONDS)
        self._now = snapshot.time_seconds
        self._watch.step(snapshot)
        self._ends.step(snapshot, self._watch.lives)
        page = snapshot.page
        engines = () if page is None else named(page)
        self._page = page if engines else self._page
        if any(
            self._engines[engine_labels(one)].other_settings(one)
            for one in engines
            if engine_labels(one) in self._engines
        ):
            self._since, self._engines, self._gpus = self._now, {}, {}
        for engine in engines:
            self._engines.setdefault(engine_labels(engine), EngineHistory()).step(engine, seconds)
            self._at_least = max(self._at_least, _shown_by(engine))
        running = None if page is None else running_requests(page)
        asleep = page is not None and awake(page) is False
        serving = Serving(running=running, asleep=asleep) if self._ends.serving else None
        for gpu in snapshot.devices:
            self._gpu(gpu).step(gpu, self._now, seconds, serving)
        self._step_host(snapshot)

    def facts(self, settings: Settings) -> Facts:
        """Return the facts, of an engine started with these settings; the trace tells those that nobody gave."""
        begin, end = self._watch.span
        settings = settings if self._page is None else with_page(settings, self._page)
        gpus = ((uuid, course) for _, uuid, course in self._watch.gpus if uuid in self._gpus)
        engines = (history.facts() for history in self._engines.values())
        return Facts(
            origin=Origin.TRACE,
            settings=replace(settings, at_least=max(self._at_least, settings.at_least)),
            samples=self._watch.samples,
            begin_seconds=begin,
            end_seconds=end,
            since_seconds=self._since,
            gpus=tuple(self._gpus[uuid].facts(_leak(course)) for uuid, course in gpus),
            engines=tuple(facts for facts in engines if facts is not None),
            hosts=tuple(
                HostFacts(process=str(role), leak=_leak(course), held_bytes=self._host_bytes.get(role))
                for role, course in self._watch.host
            ),
            host=self._watch.memory,
            failed_starts=tuple(self._ends.failed),
            endings=tuple(ending for ending in self._ends.found if ending.seconds > (self._since or 0.0)),
        )

    def _gpu(self, gpu: Gpu) -> GpuHistory:
        reading = gpu.reading
        if reading.uuid not in self._gpus:
            self._gpus[reading.uuid] = GpuHistory(reading.index, reading.uuid, self._now)
        return self._gpus[reading.uuid]

    def _step_host(self, snapshot: Snapshot) -> None:
        if isinstance(snapshot.processes, Failure):
            return
        self._host_bytes = {}
        for process in snapshot.processes:
            self._host_bytes[process.role] = self._host_bytes.get(process.role, 0.0) + process.rss_bytes


def _shown_by(engine: EngineReading) -> Version:
    """Return the version that an engine has at least, by what it says at all."""
    if engine.awake is not None:
        return TELLS_SLEEP
    return OLDEST if engine.prefix_queries_total is None else COUNTS_PREFIXES


def _leak(course: Course) -> Leak:
    return Leak(state=course.state, alarm=course.last, ended_seconds=course.leaking[-1][1] if course.leaking else None)
