"""Since when each engine of the page has made no progress, or has had nothing to do."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from msgspec import Struct, field

from vllm_headroom.derive.life.activity import ActivityTrack, update_activity
from vllm_headroom.derive.life.hangs import (
    CpuUse,
    Hint,
    HintSpan,
    list_hang_signs,
    update_cpu_use,
    update_hints,
    update_waits_since,
)
from vllm_headroom.derive.pages import list_named
from vllm_headroom.derive.series import label_engine
from vllm_headroom.model import EnginePage, EngineProcess, EngineReading, HangSign, Snapshot

IDLE_SECONDS: Final = 60.0
"""After this idle time, KV cache that is still in use counts as stranded."""

STRANDED_READINGS: Final = 4
"""The lowest of this many readings of stranded blocks counts; the probe writes one every 5 seconds.
"""

Labels = tuple[str, str]
"""The labels `model_name` and `engine` of an engine on the page."""


class WorkCounters(NamedTuple):
    """The values that change while an engine works; None where its page does not show one.

    A step that only prefills changes no counter (vllm/v1/engine/async_llm.py: no IterationStats
    without outputs), but the KV cache grows with each chunk. Waiting requests are left out, because
    clients change their number.
    """

    finished_total: float | None
    prompt_tokens_total: float | None
    generation_tokens_total: float | None
    steps_total: float | None
    kv_used_ratio: float | None

    @property
    def totals(self) -> tuple[float | None, ...]:
        """Return the counters, without the KV cache."""
        return self[:-1]

    @property
    def done(self) -> tuple[float | None, ...]:
        """Return the counters of tokens and steps only.

        An aborted request also counts as finished and frees its cache.
        """
        return self[1:4]


class EngineProgress(Struct, frozen=True, kw_only=True):
    """The progress of one engine, on the monotonic clock."""

    counters: WorkCounters
    has_work: bool
    moved_seconds: float
    """When its work last progressed; the present time while it has no work."""
    done_seconds: float
    """When its tokens or steps last changed."""
    idle_since_seconds: float | None
    """Since when it has been idle; None while it works or sleeps, or where its load is unknown."""
    kv_stranded_ratios: tuple[float, ...] = ()
    """The probe's newest readings of stranded KV cache."""


class Progress(Struct, frozen=True, kw_only=True):
    """Everything that shows whether the engines of one page work or hang."""

    engines: dict[Labels, EngineProgress] = field(default_factory=dict)
    """As the newest page shows them."""
    age_seconds: float | None = None
    """The longest time an engine with work has made no progress; None without a page or work."""
    hints: dict[Hint, HintSpan] = field(default_factory=dict)
    """The signs of a hang that the page does not show."""
    cpu_use: CpuUse | None = None
    activity: ActivityTrack = field(default_factory=ActivityTrack)
    """The activity of core, workers and GPUs."""
    waits_since_seconds: float | None = None
    """Since when a request has been waiting at every sample; None where none is waiting."""

    @property
    def hang_signs(self) -> tuple[HangSign, ...]:
        """Return the signs of a hang that have been present for long enough."""
        return list_hang_signs(self.hints)


def update_progress(
    previous: Progress, snapshot: Snapshot, processes: tuple[EngineProcess, ...] | None
) -> Progress:
    """Return the progress with one more sample; without a page no work is visible.

    `processes` are None where it is unknown which are the engine's.
    """
    now = snapshot.monotonic_seconds
    engines = previous.engines
    age_seconds = None
    if snapshot.page is not None:
        engines = _update_engines(engines, snapshot.page, now)
        # The longest age counts, because one hung rank blocks all requests that were sent to it.
        age_seconds = _find_age(engines, now, snapshot.unanswered_since_seconds)
    # The time since any engine last produced tokens or steps.
    rest_seconds = min((now - engine.done_seconds for engine in engines.values()), default=0.0)
    return Progress(
        engines=engines,
        age_seconds=age_seconds,
        hints=update_hints(
            previous.hints,
            processes,
            now,
            rest_seconds=rest_seconds,
            has_silent_core=snapshot.has_silent_core,
        ),
        cpu_use=update_cpu_use(previous.cpu_use, processes, now),
        activity=update_activity(
            previous.activity,
            snapshot,
            processes,
            is_without_work=_is_without_work(snapshot, engines),
        ),
        waits_since_seconds=update_waits_since(previous.waits_since_seconds, processes, now),
    )


def _is_without_work(snapshot: Snapshot, engines: Mapping[Labels, EngineProgress]) -> bool:
    """Return whether a page shows that no engine has work, or had any since the last page."""
    if snapshot.page is None or not engines:
        return False
    now = snapshot.monotonic_seconds
    return all(
        engine.idle_since_seconds is not None and engine.done_seconds < now
        for engine in engines.values()
    )


def _update_engines(
    previous: Mapping[Labels, EngineProgress], page: EnginePage, now: float
) -> dict[Labels, EngineProgress]:
    """Return the progress of each engine on the page, updated from the previous page."""
    return {
        label_engine(engine): _update_engine(previous.get(label_engine(engine)), engine, now)
        for engine in list_named(page)
    }


def _update_engine(
    previous: EngineProgress | None, engine: EngineReading, now: float
) -> EngineProgress:
    """Return the progress of an engine.

    For an idle or sleeping engine, the time without progress starts when it gets work.
    """
    counters = _read_counters(engine)
    is_asleep = engine.awake is False
    # Sleep with mode=keep leaves requests on the page. They are no work until the engine wakes.
    has_work = bool(engine.running or engine.waiting) and not is_asleep
    is_idle = not has_work and not is_asleep and engine.running is not None
    # Without work no progress is due: its age counts from when there is work.
    moved_seconds = now
    done_seconds = now
    idle_since_seconds = now
    stranded_ratios: tuple[float, ...] = ()
    if previous is not None:
        # Any difference counts, even a fall: the KV cache shrinks when a request ends.
        if previous.has_work and previous.counters == counters:
            moved_seconds = previous.moved_seconds
        if previous.counters.done == counters.done:
            done_seconds = previous.done_seconds
        if previous.idle_since_seconds is not None:
            idle_since_seconds = previous.idle_since_seconds
        stranded_ratios = previous.kv_stranded_ratios[1 - STRANDED_READINGS :]
    # The readings count only without a gap.
    if engine.kv_stranded_ratio is None:
        stranded_ratios = ()
    else:
        stranded_ratios = (*stranded_ratios, engine.kv_stranded_ratio)
    return EngineProgress(
        counters=counters,
        has_work=has_work,
        moved_seconds=moved_seconds,
        done_seconds=done_seconds,
        idle_since_seconds=idle_since_seconds if is_idle else None,
        kv_stranded_ratios=stranded_ratios,
    )


def _read_counters(engine: EngineReading) -> WorkCounters:
    """Return the figures that change from sample to sample while the engine works."""
    return WorkCounters(
        finished_total=engine.finished_total,
        prompt_tokens_total=engine.prompt_tokens_total,
        generation_tokens_total=engine.generation_tokens_total,
        steps_total=engine.steps_total,
        kv_used_ratio=engine.kv_used_ratio,
    )


def _find_age(
    engines: Mapping[Labels, EngineProgress], now: float, unanswered_since_seconds: float | None
) -> float | None:
    """Return the longest time that an engine with work has made no progress.

    None without visible work.

    A request of the daemon that has been pending since `unanswered_since_seconds` counts as work
    too, because the gauges of a hung core are frozen. The time counts from the last progress of any
    request.
    """
    ages = [
        now - engine.moved_seconds
        for engine in engines.values()
        if engine.has_work and set(engine.counters) != {None}
    ]
    if unanswered_since_seconds is not None and engines:
        # A busy rank proves that the server answers: the request may only be waiting for its turn.
        newest_done_seconds = max(engine.done_seconds for engine in engines.values())
        ages.append(now - max(unanswered_since_seconds, newest_done_seconds))
    return max(ages, default=None)


def find_stranded(
    engines: Mapping[Labels, EngineProgress], now: float
) -> tuple[tuple[Labels, float], ...]:
    """Return the stranded share of each engine's KV cache, which no request holds, where known.

    After an idle minute, that is everything that is in use. Otherwise it is the lowest of the
    probe's last readings, because the probe counts while the scheduler works.
    """
    stranded = []
    for labels, engine in engines.items():
        ratio = None
        if (
            engine.idle_since_seconds is not None
            and now - engine.idle_since_seconds >= IDLE_SECONDS
        ):
            ratio = engine.counters.kv_used_ratio
        # While the scheduler works, a reading may catch blocks that are about to be freed.
        elif len(engine.kv_stranded_ratios) == STRANDED_READINGS:
            ratio = min(engine.kv_stranded_ratios)
        if ratio is not None:
            stranded.append((labels, ratio))
    return tuple(stranded)


def has_worked(page: EnginePage) -> bool | None:
    """Return whether any engine of the page has ever processed a request.

    True for a page without engines. None for engines that have a name but no counters, as in
    Dynamo's own series.
    """
    if not page.engines:
        return True
    figures: list[float | None] = []
    for engine in list_named(page):
        figures += _read_counters(engine).totals
        figures.append(engine.running)
    # Names without counters show neither work nor idleness.
    if figures and set(figures) == {None}:
        return None
    return any(figures)
