"""Facts from a trace."""

from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.readings import count_running, is_page_awake, label_engine, list_named
from vllm_headroom.derive.verdicts import LOW_BYTES
from vllm_headroom.model import EnginePage, Failure, Gpu, Snapshot
from vllm_headroom.vocabulary import IncidentKind, LeakState
from vllm_headroom_tools.advise.engine_history import EngineHistory
from vllm_headroom_tools.advise.facts import (
    LASTING_SECONDS,
    PEAK_BYTES,
    SOMEBODY_BYTES,
    Extent,
    Facts,
    GpuFacts,
    HostFacts,
    Leak,
    Origin,
    Shortage,
    Spell,
)
from vllm_headroom_tools.advise.settings import EngineArgs, add_page_settings, find_oldest_version
from vllm_headroom_tools.history import LONGEST_STEP_SECONDS, Course, LeakReplay
from vllm_headroom_tools.versions import OLDEST, Version

APART_SECONDS: Final = 300.0
"""Shortages this far apart are two (the five minutes that HeadroomGpuMemoryLow looks back)."""


def measure_others(gpu: Gpu) -> float | None:
    """Return the memory of others on a GPU, 0 up to SOMEBODY_BYTES; None where the engine's share is unknown."""
    memory = gpu.reading.memory
    if memory is None or gpu.engine_bytes is None:
        return None
    rest = float(max(0, memory.used_bytes - gpu.engine_bytes))
    return rest if rest > SOMEBODY_BYTES else 0.0


MOSTLY = 0.5
"""Ours: a spell with more time with room than this consists of peaks."""


class GpuHistory:
    """The history of one GPU; the memory of others does not count as the engine's shortage."""

    def __init__(self, index: int, uuid: str, began_seconds: float) -> None:
        self._facts = GpuFacts(index=index, uuid=uuid, leak=Leak(state=LeakState.UNKNOWN))
        self._held_since = began_seconds
        self._open: _OpenSpell | None = None

    def close_spell(self, now: float, *, ended_engine: bool) -> None:
        """Close a spell at the engine's exit or sleep, after which it takes memory again."""
        self._facts, self._open = self._add_spell(ended_engine=ended_engine), None
        self._held_since = now

    def step(self, gpu: Gpu, now: float, seconds: float, running: float | None, *, serving: bool) -> None:
        """Add a sample, `seconds` after the last, with the running requests of all ranks.

        A peak during a start is no shortage of an engine that serves.
        """
        memory = gpu.reading.memory
        if memory is None:
            return
        usable, others, facts = float(memory.usable_bytes), measure_others(gpu), self._facts
        room = usable - memory.used_bytes
        self._facts = replace(
            facts,
            usable_bytes=usable,
            least_room_bytes=max(0.0, room if facts.least_room_bytes is None else min(room, facts.least_room_bytes)),
            others=facts.others if others is None else (facts.others or Extent(others, others, others)).widen(others),
            leftovers=gpu.leftovers,
        )
        if serving:
            self._add_room(room + (others or 0.0), now, seconds, running)

    def facts(self, leak: Leak) -> GpuFacts:
        """Return the facts, including an open spell."""
        return replace(self._add_spell(ended_engine=False), leak=leak)

    def _add_room(self, room: float, now: float, seconds: float, running: float | None) -> None:
        if room >= LOW_BYTES:
            if self._open is not None and now - self._open.last_seconds >= APART_SECONDS:
                self._facts, self._open = self._add_spell(ended_engine=False), None
            if running and self._open is None:
                self._facts = replace(self._facts, roomy_running=max(self._facts.roomy_running or 0.0, running))
            return
        self._open = self._open or _OpenSpell(now)
        self._open.step(room, now, seconds, running)

    def _add_spell(self, *, ended_engine: bool) -> GpuFacts:
        spell = self._open and self._open.build_spell(self._held_since, ended_engine=ended_engine)
        return replace(self._facts, spells=(*self._facts.spells, spell)) if spell else self._facts


class _OpenSpell:
    def __init__(self, began_seconds: float) -> None:
        self.last_seconds = began_seconds
        self._began_seconds = began_seconds
        self._low_seconds = 0.0
        self._least_bytes = float(LOW_BYTES)
        self._running: float | None = None

    def step(self, room: float, now: float, seconds: float, running: float | None) -> None:
        """Add a sample with little room."""
        self._low_seconds += seconds
        self.last_seconds = now
        if room < self._least_bytes:
            self._least_bytes, self._running = max(0.0, room), running

    def build_spell(self, held_since: float, *, ended_engine: bool) -> Spell | None:
        """Return the spell; None where it was short and some room was left."""
        lasted = self.last_seconds - self._began_seconds
        if self._low_seconds >= LASTING_SECONDS and self._low_seconds >= MOSTLY * lasted:
            from_the_start = self._began_seconds - held_since <= LASTING_SECONDS
            kind = Shortage.LEVEL if from_the_start else Shortage.RISEN
        elif ended_engine or self._least_bytes < PEAK_BYTES:
            kind = Shortage.PEAK
        else:
            return None
        return Spell(
            kind=kind,
            least_bytes=self._least_bytes,
            began_seconds=self._began_seconds,
            seconds=self._low_seconds,
            running=self._running,
            ended_engine=ended_engine,
        )


class TraceHistory:
    """Collects the facts of a trace, sample by sample."""

    def __init__(self) -> None:
        self._watch = LeakReplay()
        self._at_least: Version = OLDEST
        self._since: float | None = None
        self._now = 0.0
        self._page: EnginePage | None = None
        self._engines: dict[tuple[str, str], EngineHistory] = {}
        self._gpus: dict[str, GpuHistory] = {}
        self._host_bytes: dict[str, float] = {}

    def step(self, snapshot: Snapshot) -> None:
        """Add a sample."""
        seconds = snapshot.time_seconds - self._now if self._watch.samples else 0.0
        seconds = min(max(0.0, seconds), LONGEST_STEP_SECONDS)
        self._now = snapshot.time_seconds
        snapshot = self._watch.step(snapshot)
        ended = snapshot.life is not None and snapshot.life.ended is not None
        page = snapshot.page
        engines = list_named(page)
        self._page = page if engines else self._page
        if any(
            self._engines[label_engine(one)].has_other_settings(one)
            for one in engines
            if label_engine(one) in self._engines
        ):
            self._since, self._engines, self._gpus = self._now, {}, {}
        stranded = {} if snapshot.life is None else dict(snapshot.life.stranded)
        for engine in engines:
            key = label_engine(engine)
            self._engines.setdefault(key, EngineHistory(*key)).step(engine, seconds, stranded.get(key))
        self._at_least = max(self._at_least, find_oldest_version(engines))
        self._step_gpus(snapshot, seconds, ended=ended)
        self._step_host(snapshot)

    def facts(self, settings: EngineArgs) -> Facts:
        """Return the facts of an engine with these settings; the trace fills in those that were not given."""
        begin, end = self._watch.span
        settings = settings if self._page is None else add_page_settings(settings, self._page)
        gpus = ((uuid, course) for _, uuid, course in self._watch.gpus if uuid in self._gpus)
        ends = (event for event in self._watch.events if event.what is IncidentKind.ENDED)
        return Facts(
            origin=Origin.TRACE,
            settings=replace(settings, at_least=max(self._at_least, settings.at_least)),
            samples=self._watch.samples,
            begin_seconds=begin,
            end_seconds=end,
            since_seconds=self._since,
            gpus=tuple(self._gpus[uuid].facts(_build_leak(course)) for uuid, course in gpus),
            engines=tuple(history.facts() for history in self._engines.values()),
            hosts=tuple(
                HostFacts(process=str(role), leak=_build_leak(course), held_bytes=self._host_bytes.get(role))
                for role, course in self._watch.host
            ),
            host=self._watch.memory,
            ends=tuple(end for end in ends if not end.served or end.seconds > (self._since or 0.0)),
        )

    def _step_gpus(self, snapshot: Snapshot, seconds: float, *, ended: bool) -> None:
        page = snapshot.page
        running = count_running(page)
        serving = self._watch.runs.present.ready and is_page_awake(page) is not False
        for history in self._gpus.values() if ended or not serving else ():
            history.close_spell(self._now, ended_engine=ended)
        for gpu in snapshot.devices:
            uuid = gpu.reading.uuid
            history = self._gpus.setdefault(uuid, GpuHistory(gpu.reading.index, uuid, self._now))
            history.step(gpu, self._now, seconds, running, serving=serving)

    def _step_host(self, snapshot: Snapshot) -> None:
        if isinstance(snapshot.processes, Failure):
            return
        self._host_bytes = {}
        for process in snapshot.processes:
            self._host_bytes[process.role] = self._host_bytes.get(process.role, 0.0) + process.rss_bytes


def _build_leak(course: Course) -> Leak:
    return Leak(state=course.state, alarm=course.last, ended_seconds=course.leaking[-1][1] if course.leaking else None)
