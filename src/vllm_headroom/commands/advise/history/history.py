"""A recorded past to facts."""

from __future__ import annotations

from msgspec.structs import replace

from vllm_headroom.commands.advise.facts import Facts, HostFacts, Leak, Origin
from vllm_headroom.commands.advise.history.engine_history import EngineHistory
from vllm_headroom.commands.advise.history.gpu_history import GpuHistory
from vllm_headroom.commands.advise.history.lives import Ends
from vllm_headroom.commands.advise.settings import OLDEST, EngineArgs, Version, shown_by, with_page
from vllm_headroom.derive.page_facts import awake, named, running_requests
from vllm_headroom.derive.readings import engine_labels
from vllm_headroom.model import EnginePage, Failure, Snapshot
from vllm_headroom.trace.course import Course
from vllm_headroom.trace.replay import LONGEST_STEP_SECONDS, Watch


class Past:
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
        seconds = min(max(0.0, seconds), LONGEST_STEP_SECONDS)
        self._now = snapshot.time_seconds
        snapshot = self._watch.step(snapshot)
        ended = self._ends.step(snapshot, self._watch.lives)
        page = snapshot.page
        engines = named(page)
        self._page = page if engines else self._page
        if any(
            self._engines[engine_labels(one)].other_settings(one)
            for one in engines
            if engine_labels(one) in self._engines
        ):
            self._since, self._engines, self._gpus = self._now, {}, {}
        stranded = {} if snapshot.life is None else dict(snapshot.life.stranded)
        for engine in engines:
            key = engine_labels(engine)
            self._engines.setdefault(key, EngineHistory()).step(engine, seconds, stranded.get(key))
        self._at_least = max(self._at_least, shown_by(engines))
        self._step_gpus(snapshot, seconds, ended=ended)
        self._step_host(snapshot)

    def facts(self, settings: EngineArgs) -> Facts:
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

    def _step_gpus(self, snapshot: Snapshot, seconds: float, *, ended: bool) -> None:
        page = snapshot.page
        running = running_requests(page)
        serving = self._ends.serving and awake(page) is not False
        for history in self._gpus.values() if ended or not serving else ():
            history.rest(self._now, ended_engine=ended)
        for gpu in snapshot.devices:
            index, uuid = gpu.reading.index, gpu.reading.uuid
            history = self._gpus.setdefault(uuid, GpuHistory(index, uuid, self._now))
            history.step(gpu, self._now, seconds, running, serving=serving)

    def _step_host(self, snapshot: Snapshot) -> None:
        if isinstance(snapshot.processes, Failure):
            return
        self._host_bytes = {}
        for process in snapshot.processes:
            self._host_bytes[process.role] = self._host_bytes.get(process.role, 0.0) + process.rss_bytes


def _leak(course: Course) -> Leak:
    return Leak(state=course.state, alarm=course.last, ended_seconds=course.leaking[-1][1] if course.leaking else None)
