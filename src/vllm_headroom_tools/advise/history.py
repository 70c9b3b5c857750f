"""Facts from a trace."""

from collections import defaultdict
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.kv_cache import count_tokens_per_request
from vllm_headroom.derive.pages import count_running, is_page_awake, list_named
from vllm_headroom.derive.series import label_engine
from vllm_headroom.derive.verdicts import LOW_BYTES
from vllm_headroom.model import EnginePage, EngineReading, Failure, Gpu, Snapshot
from vllm_headroom.vocabulary import IncidentKind, LeakState
from vllm_headroom_tools.advise.facts import (
    FULL_RATIO,
    LASTING_SECONDS,
    PEAK_BYTES,
    CappedFacts,
    EngineFacts,
    Extent,
    Facts,
    FullFacts,
    GpuFacts,
    HostFacts,
    Leak,
    Origin,
    PrefixFacts,
    Shortage,
    Spell,
    StrandedFacts,
    measure_others,
)
from vllm_headroom_tools.advise.settings import EngineArgs, add_page_settings, find_oldest_version
from vllm_headroom_tools.history import (
    LONGEST_STEP_SECONDS,
    Histogram,
    LeakCourse,
    LeakReplay,
    Rise,
)
from vllm_headroom_tools.versions import OLDEST, Version

WAITING_REQUESTS: Final = 10
"""Fewer than this waiting is noise (alert HeadroomQueueBacklog)."""

ROOMY_RATIO: Final = 0.7
"""Ours: with more than three tenths of the KV cache free, requests wait for another reason."""

CHANGED_RATIO: Final = 0.01
"""Ours: a larger change of the KV cache's size means other settings; equal starts differ by less."""

CAP_RATIO = 0.97
CAP_SHARE = 0.9
"""Ours: the cap is what ran, to 3 %, in nine tenths of the time in which requests waited."""


class EngineHistory:
    """The history of one engine while its settings stay the same.

    `_roomy` is the time in which requests waited although the cache had room, by the requests that ran.
    """

    def __init__(self, model_name: str, engine: str) -> None:
        self._facts = EngineFacts(model_name=model_name, engine=engine)
        self._full = FullFacts(seconds=0.0, finished=0.0, preemptions=0.0, running=0.0, tokens=None)
        self._seconds = self._waited_seconds = self._queued_seconds = 0.0
        self._was_full = False
        self._started_at_seconds: float | None = None
        self._finished, self._preemptions, self._queries, self._hits = (
            Rise(),
            Rise(),
            Rise(),
            Rise(),
        )
        self._usual, self._full_running, self._full_tokens = Histogram(), Histogram(), Histogram()
        self._full_waiting, self._roomy_used = Histogram(), Histogram()
        self._roomy: defaultdict[float, float] = defaultdict(float)

    def has_other_settings(self, reading: EngineReading) -> bool:
        """Return whether the KV cache has changed its size."""
        before, now = self._facts.capacity_tokens, reading.kv_capacity_tokens
        return before is not None and now is not None and abs(now - before) > CHANGED_RATIO * before

    def step(self, reading: EngineReading, seconds: float, stranded: float | None) -> None:
        """Add a sample, `seconds` after the last; `stranded` is the share that an idle engine's cache holds."""
        self._seconds += seconds
        finished = self._finished.step(reading.finished_total)
        preempted = self._preemptions.step(reading.preemptions_total)
        self._queries.step(reading.prefix_queries_total)
        self._hits.step(reading.prefix_hits_total)
        capacity, facts = reading.kv_capacity_tokens, self._facts
        self._facts = replace(
            facts,
            capacity_tokens=facts.capacity_tokens if capacity is None else capacity,
            kv_known=facts.kv_known or reading.kv_used_ratio is not None,
            most_running=_find_higher(facts.most_running, reading.running),
            most_used_ratio=_find_higher(facts.most_used_ratio, reading.kv_used_ratio),
            stranded=_step_stranded(
                facts.stranded if reading.started_at_seconds == self._started_at_seconds else None,
                stranded,
            ),
        )
        self._started_at_seconds = reading.started_at_seconds
        self._step_queue(reading, seconds)
        if reading.kv_used_ratio is not None:
            self._step_cache(
                reading, seconds, finished, preempted, full=reading.kv_used_ratio > FULL_RATIO
            )

    def _step_queue(self, reading: EngineReading, seconds: float) -> None:
        """Add the time before a sample in which requests waited."""
        waiting, used, running = reading.waiting or 0.0, reading.kv_used_ratio, reading.running
        self._waited_seconds += seconds if waiting > 0 else 0.0
        if waiting >= WAITING_REQUESTS and used is not None and running is not None:
            self._queued_seconds += seconds
            if used < ROOMY_RATIO:
                self._roomy[running] += seconds
                self._roomy_used.add(used)

    def _step_cache(
        self,
        reading: EngineReading,
        seconds: float,
        finished: float,
        preempted: float,
        *,
        full: bool,
    ) -> None:
        """Add the load of a sample by whether the cache is full; the sample after it has the last preemptions."""
        if full or self._was_full:
            self._full = replace(
                self._full,
                seconds=(self._full.seconds or 0.0) + (seconds if full else 0.0),
                finished=self._full.finished + finished,
                preemptions=self._full.preemptions + preempted,
            )
        self._was_full = full
        if full:
            if (reading.waiting or 0) >= WAITING_REQUESTS:
                self._full = replace(self._full, queued_seconds=self._full.queued_seconds + seconds)
                self._full_waiting.add(reading.waiting)
            self._full_running.add(reading.running)
            self._full_tokens.add(count_tokens_per_request(reading))
            return
        self._usual.add(count_tokens_per_request(reading))
        if reading.running and not preempted:
            self._facts = replace(
                self._facts, calm_running=_find_higher(self._facts.calm_running, reading.running)
            )

    def facts(self) -> EngineFacts:
        """Return the facts."""
        running, used, most = (
            self._full_running.quantile(0.5),
            self._roomy_used.quantile(0.9),
            self._facts.most_running,
        )
        full, capped, prefix = None, None, None
        if running is not None:
            tokens, waiting = self._full_tokens.quantile(0.5), self._full_waiting.quantile(0.5)
            full = replace(self._full, running=running, tokens=tokens, waiting=waiting)
        if most and used is not None:
            at_cap = sum(
                seconds for running, seconds in self._roomy.items() if running >= CAP_RATIO * most
            )
            if (
                at_cap >= CAP_SHARE * self._queued_seconds
            ):  # else they waited for another reason, as a full cache
                capped = CappedFacts(seconds=at_cap, running=most, kv_used_ratio=used)
        queries, hits, seconds = self._queries.total, self._hits.total, self._seconds
        if queries is not None and hits is not None:
            blocked = self._waited_seconds / seconds if seconds else 0.0
            prefix = PrefixFacts(queries=queries, hits=hits, seconds=seconds, blocked_ratio=blocked)
        return replace(
            self._facts,
            preemptions_known=self._preemptions.total is not None,
            finished=self._finished.total,
            usual_tokens=self._usual.quantile(0.5),
            high_tokens=self._usual.quantile(0.99),
            full=full,
            capped=capped,
            prefix=prefix,
        )


def _find_higher(before: float | None, now: float | None) -> float | None:
    return before if now is None else max(before or 0.0, now)


def _step_stranded(before: StrandedFacts | None, held: float | None) -> StrandedFacts | None:
    """Add the cache held a minute after the last request; a fall means that it was released: before was no leak."""
    if held is None:
        return before
    if before is None or held < before.ratio:
        return StrandedFacts(ratio=held, first_ratio=held, rises=0)
    return replace(before, ratio=held, rises=before.rises + (held > before.ratio))


APART_SECONDS: Final = 300.0
"""Shortages this far apart are two (the five minutes that HeadroomGpuMemoryLow looks back)."""

MOSTLY = 0.5
"""Ours: a spell with more time with room than this consists of peaks."""


class GpuHistory:
    """The history of one GPU; the memory of others does not count as the engine's shortage."""

    def __init__(self, index: int, uuid: str, began_seconds: float) -> None:
        self._facts = GpuFacts(index=index, uuid=uuid, leak=Leak(state=LeakState.UNKNOWN))
        self._held_since = began_seconds
        self._open: Spell | None = None
        self._low_at = 0.0

    def close_spell(self, now: float, *, ended_engine: bool) -> None:
        """Close a spell at the engine's exit or sleep, after which it takes memory again."""
        self._facts, self._open = self._add_spell(ended_engine=ended_engine), None
        self._held_since = now

    def step(
        self, gpu: Gpu, now: float, seconds: float, running: float | None, *, serving: bool
    ) -> None:
        """Add a sample, `seconds` after the last, with the running requests of all ranks.

        A peak during a start is no shortage of an engine that serves.
        """
        memory = gpu.reading.memory
        if memory is None:
            return
        usable, facts = float(memory.usable_bytes), self._facts
        others, extent = measure_others(memory.used_bytes, gpu.engine_bytes), facts.others
        if others is not None:
            least, most = (others, others) if extent is None else (extent.least, extent.most)
            extent = Extent(others, min(others, least), max(others, most))
        room = usable - memory.used_bytes
        self._facts = replace(
            facts,
            usable_bytes=usable,
            least_room_bytes=max(
                0.0, room if facts.least_room_bytes is None else min(room, facts.least_room_bytes)
            ),
            others=extent,
            leftovers=gpu.leftovers,
        )
        if serving:
            self._add_room(room + (others or 0.0), now, seconds, running)

    def facts(self, leak: Leak) -> GpuFacts:
        """Return the facts, including an open spell."""
        return replace(self._add_spell(ended_engine=False), leak=leak)

    def _add_room(self, room: float, now: float, seconds: float, running: float | None) -> None:
        if room < LOW_BYTES:
            spell = self._open or Spell(
                kind=Shortage.PEAK, least_bytes=LOW_BYTES, began_seconds=now, seconds=0.0
            )
            spell = replace(spell, seconds=(spell.seconds or 0.0) + seconds)
            if room < spell.least_bytes:
                spell = replace(spell, least_bytes=max(0.0, room), running=running)
            self._open, self._low_at = spell, now
            return
        if self._open is not None and now - self._low_at >= APART_SECONDS:
            self._facts, self._open = self._add_spell(ended_engine=False), None
        if running and self._open is None:
            self._facts = replace(
                self._facts, roomy_running=max(self._facts.roomy_running or 0.0, running)
            )

    def _add_spell(self, *, ended_engine: bool) -> GpuFacts:
        """Return the facts with the open spell, unless it was short and some room was left."""
        if self._open is None:
            return self._facts
        seconds, began = self._open.seconds or 0.0, self._open.began_seconds or 0.0
        if seconds >= LASTING_SECONDS and seconds >= MOSTLY * (self._low_at - began):
            kind = Shortage.LEVEL if began - self._held_since <= LASTING_SECONDS else Shortage.RISEN
        elif ended_engine or self._open.least_bytes < PEAK_BYTES:
            kind = Shortage.PEAK
        else:
            return self._facts
        spell = replace(self._open, kind=kind, ended_engine=ended_engine)
        return replace(self._facts, spells=(*self._facts.spells, spell))


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
        self._host_bytes: defaultdict[str, float] = defaultdict(float)

    def step(self, snapshot: Snapshot) -> None:
        """Add a sample."""
        seconds = snapshot.time_seconds - self._now if self._watch.samples else 0.0
        seconds = min(max(0.0, seconds), LONGEST_STEP_SECONDS)
        self._now = snapshot.time_seconds
        snapshot = self._watch.step(snapshot)
        engines = {label_engine(engine): engine for engine in list_named(snapshot.page)}
        self._page = snapshot.page if engines else self._page
        if any(
            key in self._engines and self._engines[key].has_other_settings(one)
            for key, one in engines.items()
        ):
            self._since, self._engines, self._gpus = self._now, {}, {}
        stranded = (
            {} if snapshot.engine_status is None else dict(snapshot.engine_status.stranded_ratios)
        )
        for key, engine in engines.items():
            self._engines.setdefault(key, EngineHistory(*key)).step(
                engine, seconds, stranded.get(key)
            )
        self._at_least = max(self._at_least, find_oldest_version(engines.values()))
        self._step_gpus(snapshot, seconds)
        if not isinstance(snapshot.processes, Failure):
            self._host_bytes.clear()
            for process in snapshot.processes:
                self._host_bytes[process.role] += process.rss_bytes

    def facts(self, settings: EngineArgs) -> Facts:
        """Return the facts of an engine with these settings; the trace fills in those that were not given."""
        begin, end = self._watch.span
        settings = settings if self._page is None else add_page_settings(settings, self._page)
        gpus = ((uuid, course) for _, uuid, course in self._watch.gpus if uuid in self._gpus)
        ends = (event for event in self._watch.events if event.kind is IncidentKind.ENDED)
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
                HostFacts(
                    process=str(role),
                    leak=_build_leak(course),
                    held_bytes=self._host_bytes.get(role),
                )
                for role, course in self._watch.host
            ),
            host=self._watch.memory,
            ends=tuple(
                end for end in ends if not end.has_served or end.seconds > (self._since or 0.0)
            ),
        )

    def _step_gpus(self, snapshot: Snapshot, seconds: float) -> None:
        running = count_running(snapshot.page)
        ended = (
            snapshot.engine_status is not None and snapshot.engine_status.exit_reason is not None
        )
        serving = (
            self._watch.engine.runs.present.is_ready and is_page_awake(snapshot.page) is not False
        )
        for history in self._gpus.values() if ended or not serving else ():
            history.close_spell(self._now, ended_engine=ended)
        for gpu in snapshot.devices:
            uuid = gpu.reading.uuid
            history = self._gpus.setdefault(uuid, GpuHistory(gpu.reading.index, uuid, self._now))
            history.step(gpu, self._now, seconds, running, serving=serving)


def _build_leak(course: LeakCourse) -> Leak:
    return Leak(
        state=course.state,
        alarm=course.last_alarm,
        ended_seconds=course.leaking[-1][1] if course.leaking else None,
    )
