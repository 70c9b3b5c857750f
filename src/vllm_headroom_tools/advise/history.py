"""Collect the facts from a trace."""

from collections import defaultdict
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.kv_cache import count_tokens_per_request
from vllm_headroom.derive.leak.leak import is_alone
from vllm_headroom.derive.pages import count_running, is_page_awake, list_named
from vllm_headroom.derive.series import label_engine
from vllm_headroom.derive.verdicts import LOW_BYTES
from vllm_headroom.model import BudgetExcess, EnginePage, EngineReading, Failure, Gpu, Snapshot
from vllm_headroom.vocabulary import IncidentKind, LeakState
from vllm_headroom_tools.advise.facts import (
    PEAK_BYTES,
    CappedFacts,
    EngineFacts,
    Extent,
    Facts,
    FactsSource,
    FullFacts,
    GpuFacts,
    HostFacts,
    Leak,
    PrefixFacts,
    Shortage,
    Spell,
    StrandedFacts,
    measure_others,
)
from vllm_headroom_tools.advise.settings import EngineArgs, add_page_settings, find_oldest_version
from vllm_headroom_tools.full_cache import (
    FULL_RATIO,
    LASTING_SECONDS,
    ROOMY_RATIO,
    WAITING_REQUESTS,
    CollapseHistory,
    StepCounts,
    find_higher,
)
from vllm_headroom_tools.history import (
    LONGEST_INTERVAL_SECONDS,
    RESIZED_RATIO,
    Histogram,
    LeakCourse,
    LeakReplay,
    Rise,
    judge_course,
)
from vllm_headroom_tools.versions import OLDEST_SUPPORTED, Version

CAP_RUNNING_RATIO: Final = 0.97
"""Our choice: the limit counts as reached just below the highest number. The number of running
requests must be within 3 % of it.
"""

CAP_TIME_RATIO: Final = 0.9
"""Our choice: a limit made requests wait if it was reached meanwhile. It must be reached for this
share of the waiting time.
"""


class EngineHistory:
    """Collects the facts about one engine until its settings change."""

    def __init__(self, model_name: str, engine: str) -> None:
        self._facts = EngineFacts(model_name=model_name, engine=engine)
        self._started_at_seconds: float | None = None
        self._seconds = 0.0
        self._finished = Rise()
        self._preemptions = Rise()
        self._queries = Rise()
        self._hits = Rise()
        # Cached tokens per running request while the cache was not full.
        self._usual_tokens = Histogram()
        # The facts about the period with a full cache.
        self._full = FullFacts(seconds=0.0, finished=0.0, preemptions=0.0, running=0.0, tokens=None)
        self._was_full = False
        self._full_running = Histogram()
        self._full_tokens = Histogram()
        self._full_waiting = Histogram()
        self._collapses = CollapseHistory()
        # How long any requests waited, and how long at least WAITING_REQUESTS requests waited.
        self._waited_seconds = 0.0
        self._queued_seconds = 0.0
        # How long at least WAITING_REQUESTS waited although the cache had room. The key is the
        # number of running requests. The second field is a histogram of cache usage during that
        # time.
        self._roomy_seconds: defaultdict[float, float] = defaultdict(float)
        self._roomy_used = Histogram()

    def has_other_settings(self, reading: EngineReading) -> bool:
        """Return whether the KV cache's size has changed.

        If either size is unknown, returns False.
        """
        known_tokens = self._facts.capacity_tokens
        tokens = reading.kv_capacity_tokens
        if known_tokens is None or tokens is None:
            return False
        return abs(tokens - known_tokens) > RESIZED_RATIO * known_tokens

    def step(self, reading: EngineReading, seconds: float, stranded_ratio: float | None) -> None:
        """Add a sample that was taken `seconds` after the previous one.

        `stranded_ratio` is the share of the cache in use while the engine is idle. While the engine
        is busy, `stranded_ratio` is None.
        """
        self._seconds += seconds
        counts = StepCounts(
            seconds=seconds,
            finished=self._finished.step(reading.finished_total),
            preemptions=self._preemptions.step(reading.preemptions_total),
        )
        self._queries.step(reading.prefix_queries_total)
        self._hits.step(reading.prefix_hits_total)
        facts = self._facts
        # Keep the last known capacity, because later pages may temporarily lack it.
        capacity_tokens = reading.kv_capacity_tokens
        if capacity_tokens is None:
            capacity_tokens = facts.capacity_tokens
        # A restart frees the cache, so forget blocks that were stranded before the restart.
        has_restarted = reading.started_at_seconds != self._started_at_seconds
        earlier_stranded = None if has_restarted else facts.stranded
        self._started_at_seconds = reading.started_at_seconds
        self._facts = replace(
            facts,
            capacity_tokens=capacity_tokens,
            has_kv_usage=facts.has_kv_usage or reading.kv_used_ratio is not None,
            highest_running=find_higher(facts.highest_running, reading.running),
            highest_kv_used_ratio=find_higher(facts.highest_kv_used_ratio, reading.kv_used_ratio),
            stranded=_step_stranded(earlier_stranded, stranded_ratio),
        )
        self._collapses.step(reading, counts, self._seconds, has_restarted=has_restarted)
        self._step_queue(reading, seconds)
        if reading.kv_used_ratio is not None:
            self._step_cache(reading, counts, is_full=reading.kv_used_ratio > FULL_RATIO)

    def _step_queue(self, reading: EngineReading, seconds: float) -> None:
        """If requests are waiting, add the time since the last sample to the waiting times."""
        waiting = reading.waiting or 0.0
        if waiting > 0:
            self._waited_seconds += seconds
        # A single waiting request is not a queue. The engine may admit it in the next step.
        if waiting < WAITING_REQUESTS or reading.kv_used_ratio is None or reading.running is None:
            return
        self._queued_seconds += seconds
        # The requests wait even though the cache has room. Record how long they wait at each number
        # of running requests. The limit that makes them wait is found from this.
        if reading.kv_used_ratio < ROOMY_RATIO:
            self._roomy_seconds[reading.running] += seconds
            self._roomy_used.add(reading.kv_used_ratio)

    def _step_cache(self, reading: EngineReading, counts: StepCounts, *, is_full: bool) -> None:
        """Record a sample's load, separately for a full cache and one with room."""
        # The counts cover the time since the previous sample. In the first sample after a full
        # cache, this time includes the full cache.
        if is_full or self._was_full:
            self._full = replace(
                self._full,
                finished=self._full.finished + counts.finished,
                preemptions=self._full.preemptions + counts.preemptions,
            )
        self._was_full = is_full
        if is_full:
            self._step_full_cache(reading, counts.seconds)
            return
        self._usual_tokens.add(count_tokens_per_request(reading))
        # If there was no preemption, the cache can sustain this load.
        if reading.running and not counts.preemptions:
            calm_running = find_higher(self._facts.calm_running, reading.running)
            self._facts = replace(self._facts, calm_running=calm_running)

    def _step_full_cache(self, reading: EngineReading, seconds: float) -> None:
        """Add the load of a sample taken while the cache is full."""
        full = replace(self._full, seconds=(self._full.seconds or 0.0) + seconds)
        if (reading.waiting or 0.0) >= WAITING_REQUESTS:
            full = replace(full, queued_seconds=full.queued_seconds + seconds)
            self._full_waiting.add(reading.waiting)
        self._full = full
        self._full_running.add(reading.running)
        self._full_tokens.add(count_tokens_per_request(reading))

    def build_facts(self) -> EngineFacts:
        """Return the facts of all samples so far."""
        return replace(
            self._facts,
            has_preemptions=self._preemptions.total is not None,
            finished=self._finished.total,
            usual_tokens=self._usual_tokens.quantile(0.5),
            high_tokens=self._usual_tokens.quantile(0.99),
            full=self._build_full(),
            thrash=self._collapses.worst,
            capped=self._build_capped(),
            prefix=self._build_prefix(),
        )

    def _build_full(self) -> FullFacts | None:
        """Return the facts about a full cache.

        Returns None if the cache was never full under load.
        """
        running = self._full_running.quantile(0.5)
        if running is None:
            return None
        return replace(
            self._full,
            running=running,
            tokens=self._full_tokens.quantile(0.5),
            waiting=self._full_waiting.quantile(0.5),
        )

    def _build_capped(self) -> CappedFacts | None:
        """Return the facts about a limit on running requests.

        Returns None if no requests waited while the cache had room. Also returns None if requests
        often waited while fewer than the highest number were running. In these cases, requests did
        not wait because of a limit.
        """
        # The maximum is not used, because a single sample may be an outlier.
        kv_used_ratio = self._roomy_used.quantile(0.9)
        highest_running = self._facts.highest_running
        if not highest_running or kv_used_ratio is None:
            return None
        capped_seconds = 0.0
        for running, seconds in self._roomy_seconds.items():
            if running >= CAP_RUNNING_RATIO * highest_running:
                capped_seconds += seconds
        if capped_seconds < CAP_TIME_RATIO * self._queued_seconds:
            return None
        return CappedFacts(
            seconds=capped_seconds, running=highest_running, kv_used_ratio=kv_used_ratio
        )

    def _build_prefix(self) -> PrefixFacts | None:
        """Return the facts about the prefix cache.

        Returns None if the engine does not count hits.
        """
        queries = self._queries.total
        hits = self._hits.total
        if queries is None or hits is None:
            return None
        blocked_ratio = self._waited_seconds / self._seconds if self._seconds else 0.0
        return PrefixFacts(
            queries=queries, hits=hits, seconds=self._seconds, blocked_ratio=blocked_ratio
        )


def _step_stranded(
    earlier: StrandedFacts | None, stranded_ratio: float | None
) -> StrandedFacts | None:
    """Update the facts on the cache share in use while the engine is idle.

    If the share is unknown (None), the facts do not change. If the share falls, the engine has
    freed cache, so nothing had leaked. In that case, the facts about lost cache start over.
    """
    if stranded_ratio is None:
        return earlier
    if earlier is None or stranded_ratio < earlier.ratio:
        return StrandedFacts(ratio=stranded_ratio, first_ratio=stranded_ratio, rises=0)
    if stranded_ratio > earlier.ratio:
        return replace(earlier, ratio=stranded_ratio, rises=earlier.rises + 1)
    return earlier


SPELL_GAP_SECONDS: Final = 300.0
"""Two shortages are separate spells if at least this much time lies between them. The alert
HeadroomGpuMemoryLow looks back equally far.
"""

LOW_TIME_RATIO: Final = 0.5
"""Our choice: a spell consists of peaks if memory was short only briefly. This fraction of the
spell is the limit.
"""


class GpuHistory:
    """Collects the facts about one GPU.

    Memory of other processes counts as free. The engine cannot be blamed for it.
    """

    def __init__(self, index: int, uuid: str, began_seconds: float) -> None:
        self._facts = GpuFacts(index=index, uuid=uuid, leak=Leak(state=LeakState.UNKNOWN))
        # When the engine began to use memory on the GPU.
        self._held_since_seconds = began_seconds
        # The current spell, and the time of the latest sample with too little room.
        self._open_spell: Spell | None = None
        self._low_at_seconds = 0.0

    def close_spell(self, now_seconds: float, *, has_engine_exited: bool) -> None:
        """Close any current spell when the engine exits or goes to sleep.

        The engine allocates its memory again when it restarts or wakes up.
        """
        self._facts = self._add_open_spell(has_engine_exited=has_engine_exited)
        self._open_spell = None
        self._held_since_seconds = now_seconds

    def step(
        self,
        gpu: Gpu,
        now_seconds: float,
        seconds: float,
        running: float | None,
        *,
        is_serving: bool,
    ) -> None:
        """Add a sample that was taken `seconds` after the previous one.

        `running` is the number of running requests across all ranks. A spell can only begin while
        the engine is serving. A peak during startup is normal.
        """
        memory = gpu.reading.memory
        if memory is None:
            return
        facts = self._facts
        usable_bytes = float(memory.usable_bytes)
        room_bytes = usable_bytes - memory.used_bytes
        least_room_bytes = room_bytes
        if facts.least_room_bytes is not None:
            least_room_bytes = min(room_bytes, facts.least_room_bytes)
        others_bytes = measure_others(memory.used_bytes, gpu.engine_bytes)
        self._facts = replace(
            facts,
            usable_bytes=usable_bytes,
            least_room_bytes=max(0.0, least_room_bytes),
            others_memory=_widen_extent(facts.others_memory, others_bytes),
            leftovers=gpu.leftovers,
            is_holder_known=is_alone(gpu),
        )
        # Until the engine serves requests, the free memory does not depend on its load.
        if is_serving:
            # Memory of other processes counts as free. The engine cannot be blamed for it.
            own_room_bytes = room_bytes + (others_bytes or 0.0)
            self._step_room(own_room_bytes, now_seconds, seconds, running)

    def set_excess(self, excess: BudgetExcess | None) -> None:
        """Set the engine's excess over its budget on this GPU, or None without one."""
        self._facts = replace(self._facts, excess=excess)

    def build_facts(self, leak: Leak) -> GpuFacts:
        """Return the facts from all samples so far, including the current spell."""
        return replace(self._add_open_spell(has_engine_exited=False), leak=leak)

    def _step_room(
        self, room_bytes: float, now_seconds: float, seconds: float, running: float | None
    ) -> None:
        """Begin, extend or close a spell, depending on the room in this sample."""
        if room_bytes < LOW_BYTES:
            # A new spell's lowest room is the threshold. The first sample lowers it.
            spell = self._open_spell or Spell(
                kind=Shortage.PEAK,
                lowest_room_bytes=LOW_BYTES,
                began_seconds=now_seconds,
                seconds=0.0,
            )
            spell = replace(spell, seconds=(spell.seconds or 0.0) + seconds)
            if room_bytes < spell.lowest_room_bytes:
                spell = replace(spell, lowest_room_bytes=max(0.0, room_bytes), running=running)
            self._open_spell = spell
            self._low_at_seconds = now_seconds
            return
        roomy_seconds = now_seconds - self._low_at_seconds
        if self._open_spell is not None and roomy_seconds >= SPELL_GAP_SECONDS:
            self._facts = self._add_open_spell(has_engine_exited=False)
            self._open_spell = None
        # Samples shortly after a shortage may still be part of the spell. Such early samples do not
        # count as samples with enough room.
        if running and self._open_spell is None:
            roomy_running = max(self._facts.roomy_running or 0.0, running)
            self._facts = replace(self._facts, roomy_running=roomy_running)

    def _add_open_spell(self, *, has_engine_exited: bool) -> GpuFacts:
        """Return the facts, including the current spell if there is one.

        A brief spell that left some room is ignored, unless the spell ended with the engine's exit.
        """
        spell = self._open_spell
        if spell is None:
            return self._facts
        seconds = spell.seconds or 0.0
        began_seconds = spell.began_seconds or 0.0
        span_seconds = self._low_at_seconds - began_seconds
        # If memory was short only from time to time, the shortage consists of peaks. If memory was
        # short for most of the time, the shortage is lasting.
        if seconds >= LASTING_SECONDS and seconds >= LOW_TIME_RATIO * span_seconds:
            roomy_start_seconds = began_seconds - self._held_since_seconds
            is_from_start = roomy_start_seconds <= LASTING_SECONDS
            kind = Shortage.LEVEL if is_from_start else Shortage.RISEN
        elif has_engine_exited or spell.lowest_room_bytes < PEAK_BYTES:
            kind = Shortage.PEAK
        else:
            return self._facts
        spell = replace(spell, kind=kind, has_engine_exited=has_engine_exited)
        return replace(self._facts, spells=(*self._facts.spells, spell))


def _widen_extent(extent: Extent | None, others_bytes: float | None) -> Extent | None:
    """Widen the extent to include a value; an unknown value changes nothing.

    Returns None if no value has been known so far.
    """
    if others_bytes is None:
        return extent
    if extent is None:
        return Extent(others_bytes, others_bytes, others_bytes)
    return Extent(
        newest_bytes=others_bytes,
        lowest_bytes=min(others_bytes, extent.lowest_bytes),
        highest_bytes=max(others_bytes, extent.highest_bytes),
    )


class TraceHistory:
    """Collects the facts from a trace, sample by sample.

    `reported_bytes` is the engine's memory per GPU as reported by the operator.
    """

    def __init__(self, *, reported_bytes: int | None = None) -> None:
        self._replay = LeakReplay(reported_bytes=reported_bytes)
        self._at_least: Version = OLDEST_SUPPORTED
        # When the engine's settings last changed, or None if they have not changed.
        self._since_seconds: float | None = None
        self._newest_seconds = 0.0
        # The latest page that had engines.
        self._page: EnginePage | None = None
        self._engines: dict[tuple[str, str], EngineHistory] = {}
        self._gpus: dict[str, GpuHistory] = {}
        self._host_bytes: defaultdict[str, float] = defaultdict(float)

    def step(self, snapshot: Snapshot) -> None:
        """Add a sample."""
        seconds = self._measure_interval(snapshot)
        self._newest_seconds = snapshot.time_seconds
        snapshot = self._replay.step(snapshot)
        self._step_engines(snapshot, seconds)
        self._step_gpus(snapshot, seconds)
        if not isinstance(snapshot.processes, Failure):
            self._host_bytes.clear()
            for process in snapshot.processes:
                self._host_bytes[process.role] += process.rss_bytes

    def _measure_interval(self, snapshot: Snapshot) -> float:
        """Return the seconds since the previous sample, capped at the longest sampling interval.

        Returns 0 for the first sample, or if the clock went backwards. The cap matters after a
        clock jump or a gap in the trace.
        """
        if not self._replay.samples:
            return 0.0
        seconds = snapshot.time_seconds - self._newest_seconds
        return min(max(0.0, seconds), LONGEST_INTERVAL_SECONDS)

    def _step_engines(self, snapshot: Snapshot, seconds: float) -> None:
        """Add a sample to each engine's history; start over if the settings have changed."""
        readings = {label_engine(reading): reading for reading in list_named(snapshot.page)}
        if readings:
            self._page = snapshot.page
        # A cache of a different size behaves differently.
        if self._have_other_settings(readings):
            # Facts that were collected under other settings say nothing about the current settings.
            self._since_seconds = self._newest_seconds
            self._engines = {}
            self._gpus = {}
        stranded_ratios: dict[tuple[str, str], float] = {}
        if snapshot.engine_status is not None:
            stranded_ratios = dict(snapshot.engine_status.stranded_ratios)
        for label, reading in readings.items():
            if label not in self._engines:
                self._engines[label] = EngineHistory(*label)
            self._engines[label].step(reading, seconds, stranded_ratios.get(label))
        self._at_least = max(self._at_least, find_oldest_version(readings.values()))

    def _have_other_settings(self, readings: dict[tuple[str, str], EngineReading]) -> bool:
        """Return whether any engine's settings have changed."""
        for label, reading in readings.items():
            engine = self._engines.get(label)
            if engine is not None and engine.has_other_settings(reading):
                return True
        return False

    def _step_gpus(self, snapshot: Snapshot, seconds: float) -> None:
        """Add a sample to each GPU's history.

        If the engine is not serving, the spells are closed.
        """
        running = count_running(snapshot.page)
        status = snapshot.engine_status
        has_exited = status is not None and status.exit_reason is not None
        is_awake = is_page_awake(snapshot.page) is not False
        is_serving = self._replay.engine.runs.present.is_ready and is_awake
        # While the engine is not serving, shortages are not caused by its load.
        if has_exited or not is_serving:
            for history in self._gpus.values():
                history.close_spell(self._newest_seconds, has_engine_exited=has_exited)
        for gpu in snapshot.devices:
            uuid = gpu.reading.uuid
            if uuid not in self._gpus:
                self._gpus[uuid] = GpuHistory(gpu.reading.index, uuid, self._newest_seconds)
            self._gpus[uuid].step(
                gpu, self._newest_seconds, seconds, running, is_serving=is_serving
            )
            if status is not None and snapshot.page is not None and is_serving:
                self._gpus[uuid].set_excess(dict(status.excesses).get(uuid))

    def build_facts(self, settings: EngineArgs) -> Facts:
        """Return the facts of all samples so far.

        `settings` come from the operator. Settings that the operator did not give are read from the
        trace.
        """
        begin_seconds, end_seconds = self._replay.span
        span_seconds = end_seconds - begin_seconds
        if self._page is not None:
            settings = add_page_settings(settings, self._page)
        gpus = []
        for _, uuid, course in self._replay.gpus:
            if uuid in self._gpus:
                gpus.append(self._gpus[uuid].build_facts(_build_leak(course, span_seconds)))
        hosts = []
        for role, course in self._replay.host:
            held_bytes = self._host_bytes.get(role)
            leak = _build_leak(course, span_seconds)
            hosts.append(HostFacts(process=str(role), leak=leak, held_bytes=held_bytes))
        since_seconds = self._since_seconds or 0.0
        exits = [event for event in self._replay.events if event.kind is IncidentKind.ENDED]
        return Facts(
            origin=FactsSource.TRACE,
            settings=replace(settings, at_least=max(self._at_least, settings.at_least)),
            samples=self._replay.samples,
            begin_seconds=begin_seconds,
            end_seconds=end_seconds,
            since_seconds=self._since_seconds,
            gpus=tuple(gpus),
            engines=tuple(history.build_facts() for history in self._engines.values()),
            hosts=tuple(hosts),
            host=self._replay.memory,
            # Failed starts are included even if the settings were different.
            ends=tuple(end for end in exits if not end.has_served or end.seconds > since_seconds),
        )


def _build_leak(course: LeakCourse, span_seconds: float) -> Leak:
    """Return a series' leak facts: the final state, the verdict and the alarm."""
    # Use the end of the last alarm. Earlier alarms say nothing about the current state.
    verdict, reason = judge_course(course, span_seconds)
    ended_seconds = None
    if course.leaking:
        _, ended_seconds = course.leaking[-1]
    return Leak(
        state=course.state,
        verdict=verdict,
        reason=reason,
        alarm=course.last_alarm,
        ended_seconds=ended_seconds,
    )
