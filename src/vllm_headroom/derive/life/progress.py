"""Whether the engines on a page make progress, are idle, or seem to hang."""

from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import Final, NamedTuple

from msgspec import Struct, field

from vllm_headroom.derive.attribution import NEIGHBOUR_BYTES
from vllm_headroom.derive.pages import list_named
from vllm_headroom.derive.series import label_engine
from vllm_headroom.derive.sums import sum_known
from vllm_headroom.model import (
    EnginePage,
    EngineProcess,
    EngineReading,
    Gpu,
    HangSign,
    ProcessName,
    Snapshot,
)
from vllm_headroom.vocabulary import NECESSARY_ROLES, Role

IDLE_SECONDS: Final = 60.0
"""If an engine has been idle for this long, KV cache in use is stranded."""

STRANDED_READINGS: Final = 4
"""Stranded blocks are taken to be the lowest of this many readings. The probe writes a reading
every 5 seconds.
"""

STALLED_SECONDS: Final = 60.0
"""An engine is stalled after this long with work but without progress, or with processes but
without a page.

A single step takes less time. A prefill chunk, 8192 tokens by default, takes seconds on the slowest
cards. After 300 s, vLLM itself aborts a step (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS).
"""

SIGN_SECONDS: Final = 20.0
"""A sign of a hang is evidence once it has been present for this long. With a silent core probe,
this long without progress is also a stall. A hung process writes nothing. By default, this time
includes five readings, and it always includes at least two.
"""

COMPUTING_CPU_SECONDS: Final = 1.0
"""A server that has used at least this much CPU time is running. A server that is stopped, or that
waits endlessly, uses almost none. A server that competes for cores still gets its share. On two
cores at a load average of 42, it got ten seconds per minute.
"""

STOPPED_OR_BLOCKED: Final = frozenset({"T", "t", "D"})
"""Process states in /proc/PID/stat: stopped by a signal or debugger, or blocked in a driver."""

SPAN_SECONDS: Final = 20.0
"""CPU time and GPU utilisation are observed for this long before activity is judged. A minute
without progress contains a complete span, whatever the sampling interval.
"""

BUSY_CPU_RATIO: Final = 0.1
"""The core and workers are busy above this many CPU seconds per second. Our choice: a waiting
process uses almost no CPU time. A spinning process uses a whole core.
"""

BUSY_GPU_RATIO: Final = 0.1
"""A GPU is busy if its utilisation exceeds this. Our choice: the utilisation is 1 during an endless
kernel and 0 while idle.
"""

EngineLabels = tuple[str, str]
"""An engine's labels on the page: `model_name` and `engine`."""


class WorkCounters(NamedTuple):
    """The values that change while an engine works.

    A value is None if it is missing from the page. A step that only prefills changes no counter. In
    vLLM, only outputs create IterationStats (vllm/v1/engine/async_llm.py). However, the KV cache
    grows with each chunk. The number of waiting requests is omitted, because it also changes when
    clients send requests.
    """

    finished_total: float | None
    prompt_tokens_total: float | None
    generation_tokens_total: float | None
    steps_total: float | None
    kv_used_ratio: float | None

    @property
    def totals(self) -> tuple[float | None, ...]:
        """Return all values except the use of the KV cache."""
        return self[:-1]

    @property
    def done(self) -> tuple[float | None, ...]:
        """Return only the token and step counters.

        The other counters also change when a request is aborted. An aborted request counts as
        finished, and its cache is freed.
        """
        return self[1:4]


class EngineProgress(Struct, frozen=True, kw_only=True):
    """The progress of one engine; times are on the monotonic clock."""

    counters: WorkCounters
    has_work: bool
    moved_seconds: float
    """When the engine last made progress. While it has no work, this is the current time."""
    done_seconds: float
    """When the engine's token or step count last changed."""
    idle_since_seconds: float | None
    """When the engine became idle. It is None while the engine works, sleeps or has an unknown
    load.
    """
    kv_stranded_ratios: tuple[float, ...] = ()
    """The probe's most recent readings of stranded KV cache."""


class CpuUse(Struct, frozen=True):
    """When the API servers last used enough CPU time, and their total by then."""

    cpu_seconds: float
    monotonic_seconds: float


Hint = tuple[HangSign, ProcessName | None]
"""A sign of a hang, and the process that shows it. The process is None if no single process shows
the sign.
"""


class HintSpan(Struct, frozen=True):
    """When a hint was first and last present, without a gap, on the monotonic clock."""

    begin_seconds: float
    newest_seconds: float


class Activity(Enum):
    """Whether the core, the workers and the GPUs are busy."""

    BUSY = auto()
    """The core and the workers use CPU time, or a GPU computes."""
    IDLE = auto()
    """Both the processes and the GPUs are visible, and neither is busy."""
    PARTLY_IDLE = auto()
    """Only the processes or only the GPUs are visible, and they are not busy."""
    UNKNOWN = auto()
    """Neither the processes nor the GPUs are visible."""


class ActivityTrack(Struct, frozen=True, kw_only=True):
    """The newest complete observation span, and the span that is still being observed.

    None means unknown.
    """

    cpu_ratio: float | None = None
    """CPU seconds per second of core and workers in the newest complete span."""
    gpu_ratio: float | None = None
    """The highest utilisation of any of the GPUs in the newest complete span."""
    has_spun_idle: bool = False
    """Whether the core and the workers use CPU time even when they have no work. If they do, CPU
    time proves nothing. In some versions of vLLM, tensor-parallel workers spin while they wait for
    the core.
    """
    begin_seconds: float | None = None
    """When the current span began, on the monotonic clock."""
    begin_cpu_seconds: float | None = None
    peak_gpu_ratio: float | None = None
    is_without_work: bool = True
    """Whether the page has shown no work throughout the current span."""

    def judge(self) -> Activity:
        """Return whether core, workers and GPUs were busy in the newest complete span."""
        cpu_ratio = None if self.has_spun_idle else self.cpu_ratio
        is_cpu_busy = None if cpu_ratio is None else cpu_ratio >= BUSY_CPU_RATIO
        is_gpu_busy = None if self.gpu_ratio is None else self.gpu_ratio >= BUSY_GPU_RATIO
        # The engine is working if either the processes or the GPUs are busy. The engine is idle
        # only if both are known to be idle.
        if is_cpu_busy or is_gpu_busy:
            return Activity.BUSY
        if is_cpu_busy is None and is_gpu_busy is None:
            return Activity.UNKNOWN
        if is_cpu_busy is None or is_gpu_busy is None:
            return Activity.PARTLY_IDLE
        return Activity.IDLE


class Progress(Struct, frozen=True, kw_only=True):
    """All evidence on whether the engines of one page are working or hanging."""

    engines: dict[EngineLabels, EngineProgress] = field(default_factory=dict)
    """The progress of each engine, as shown by the newest page."""
    age_seconds: float | None = None
    """The longest time for which an engine with work has made no progress. The age is None without
    a page or work.
    """
    hints: dict[Hint, HintSpan] = field(default_factory=dict)
    """Signs of a hang that the page does not show."""
    cpu_use: CpuUse | None = None
    activity: ActivityTrack = field(default_factory=ActivityTrack)
    """The activity of the core, the workers and the GPUs."""
    waits_since_seconds: float | None = None
    """The time since which a request has been waiting in every sample. The time is None if no
    request is waiting.
    """

    @property
    def hang_signs(self) -> tuple[HangSign, ...]:
        """Return the signs of a hang that have been present for long enough."""
        return list_hang_signs(self.hints)


def update_progress(
    previous: Progress, snapshot: Snapshot, processes: tuple[EngineProcess, ...] | None
) -> Progress:
    """Return the progress, updated with one more sample.

    If there is no page, no work is visible. `processes` is None if it is unknown which processes
    belong to the engine.
    """
    now = snapshot.monotonic_seconds
    engines = previous.engines
    age_seconds = None
    if snapshot.page is not None:
        engines = _update_engines(engines, snapshot.page, now)
        # The longest time is used. A single hung rank blocks all requests that were sent to it.
        age_seconds = _find_age(engines, now, snapshot.unanswered_since_seconds)
    # `rest_seconds` is the time since any of the engines last produced tokens or ran steps.
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


def _is_without_work(snapshot: Snapshot, engines: Mapping[EngineLabels, EngineProgress]) -> bool:
    """Return whether the page shows that no engine has had work since the previous page.

    Returns False if there is no page or an engine sleeps. Also returns False if an engine is on the
    page for the first time.
    """
    if snapshot.page is None or not engines:
        return False
    now = snapshot.monotonic_seconds
    return all(
        engine.idle_since_seconds is not None and engine.done_seconds < now
        for engine in engines.values()
    )


def _update_engines(
    previous: Mapping[EngineLabels, EngineProgress], page: EnginePage, now: float
) -> dict[EngineLabels, EngineProgress]:
    """Return the progress of each engine on the page, updated from the previous page."""
    return {
        label_engine(engine): _update_engine(previous.get(label_engine(engine)), engine, now)
        for engine in list_named(page)
    }


def _update_engine(
    previous: EngineProgress | None, engine: EngineReading, now: float
) -> EngineProgress:
    """Return the progress of an engine.

    Time while the engine is idle or asleep is not time without progress.
    """
    counters = _read_counters(engine)
    is_asleep = engine.awake is False
    # If an engine was put to sleep with mode=keep, its requests stay on the page. These requests do
    # not count as work until the engine wakes up.
    has_work = bool(engine.running or engine.waiting) and not is_asleep
    is_idle = not has_work and not is_asleep and engine.running is not None
    # No progress is expected without work, so the time without progress begins when work arrives.
    moved_seconds = now
    done_seconds = now
    idle_since_seconds = now
    stranded_ratios: tuple[float, ...] = ()
    if previous is not None:
        # Any difference is progress, even a decrease. The KV cache in use shrinks when a request
        # ends.
        if previous.has_work and previous.counters == counters:
            moved_seconds = previous.moved_seconds
        if previous.counters.done == counters.done:
            done_seconds = previous.done_seconds
        if previous.idle_since_seconds is not None:
            idle_since_seconds = previous.idle_since_seconds
        stranded_ratios = previous.kv_stranded_ratios[1 - STRANDED_READINGS :]
    # The readings are used only if no reading between them is missing.
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
    """Return the values that change from sample to sample while the engine works."""
    return WorkCounters(
        finished_total=engine.finished_total,
        prompt_tokens_total=engine.prompt_tokens_total,
        generation_tokens_total=engine.generation_tokens_total,
        steps_total=engine.steps_total,
        kv_used_ratio=engine.kv_used_ratio,
    )


def _find_age(
    engines: Mapping[EngineLabels, EngineProgress],
    now: float,
    unanswered_since_seconds: float | None,
) -> float | None:
    """Return the longest time for which an engine with work has made no progress.

    Returns None if no work is visible.

    An unanswered request from the daemon also counts as work. The request was sent at
    `unanswered_since_seconds`. The gauges of a hung core would not show the request. For such a
    request, the time without progress begins when the request was sent. If any engine made progress
    later, the time without progress begins at that moment.
    """
    ages = [
        now - engine.moved_seconds
        for engine in engines.values()
        if engine.has_work and set(engine.counters) != {None}
    ]
    if unanswered_since_seconds is not None and engines:
        # If another rank is busy, the server does respond. The request may only be waiting for its
        # turn.
        newest_done_seconds = max(engine.done_seconds for engine in engines.values())
        ages.append(now - max(unanswered_since_seconds, newest_done_seconds))
    return max(ages, default=None)


def update_cpu_use(
    previous: CpuUse | None, processes: Collection[EngineProcess] | None, now: float
) -> CpuUse | None:
    """Return when the API servers last used enough CPU time.

    Returns None before the first known time. Other processes are not considered. Only the API
    servers can prevent the page from being served. While they wait for a hung GPU, the core and its
    workers may spin. In this state, the page is still served and shows no progress.
    """
    servers = [process for process in processes or () if process.role is Role.API_SERVER]
    # The times are summed. Any of several servers may receive the request for the page.
    cpu_seconds = sum_known(process.cpu_seconds for process in servers)
    if cpu_seconds is None:
        return previous
    if previous is None or cpu_seconds >= previous.cpu_seconds + COMPUTING_CPU_SECONDS:
        return CpuUse(cpu_seconds, now)
    # The sum falls when one of several servers exits. After a fall, counting continues from the
    # lower sum.
    return CpuUse(min(previous.cpu_seconds, cpu_seconds), previous.monotonic_seconds)


def sum_waiting_requests(processes: Collection[EngineProcess] | None) -> int | None:
    """Return how many requests are waiting on the engine's connections, or None if unknown."""
    counts = [
        process.waiting_requests
        for process in processes or ()
        if process.waiting_requests is not None
    ]
    return sum(counts) if counts else None


def update_waits_since(
    previous_seconds: float | None, processes: Collection[EngineProcess] | None, now: float
) -> float | None:
    """Return the time since which a request has been waiting in every sample, or None."""
    if not sum_waiting_requests(processes):
        return None
    return now if previous_seconds is None else previous_seconds


def update_hints(
    previous: Mapping[Hint, HintSpan],
    processes: Collection[EngineProcess] | None,
    now: float,
    *,
    rest_seconds: float,
    has_silent_core: bool,
) -> dict[Hint, HintSpan]:
    """Return the signs of a hang while the page shows no work, with their times.

    While /proc cannot be read, the signs from the last sample are returned. `rest_seconds` is the
    time since the last token. `has_silent_core` is the snapshot's value of that name. The signs
    are:

    - The main thread of a core or worker is stopped or blocked.
    - The probe in the core is silent, but the probe in another process writes.
    - A request that arrived after the engine last worked has not been answered. An earlier request
      proves nothing, because its client may never have finished sending it.
    """
    if processes is None:
        return dict(previous)
    # Times are kept per process. A hang is a single process that stays blocked, not several
    # processes blocked in turn.
    begins: dict[Hint, float] = {}
    for process in processes:
        if process.role in NECESSARY_ROLES and process.state in STOPPED_OR_BLOCKED:
            begins[HangSign.STUCK, (process.pid, process.started_at_seconds)] = now
    if has_silent_core:
        begins[HangSign.MUTE, None] = now
    for process in processes:
        wait_seconds = process.wait_seconds
        if wait_seconds is None:
            continue
        # A request that arrived more than STALLED_SECONDS before the last token proves nothing.
        if rest_seconds >= max(STALLED_SECONDS, wait_seconds - STALLED_SECONDS):
            begins[HangSign.UNANSWERED, None] = now - wait_seconds
    return {
        # If a hint is missing in one sample, the hint's time starts over.
        hint: HintSpan(previous[hint].begin_seconds if hint in previous else begin_seconds, now)
        for hint, begin_seconds in begins.items()
    }


def list_hang_signs(hints: Mapping[Hint, HintSpan]) -> tuple[HangSign, ...]:
    """Return the signs of a hang that have been present for long enough."""
    lasting_signs = {
        sign
        for (sign, _), span in hints.items()
        if span.newest_seconds - span.begin_seconds >= SIGN_SECONDS
    }
    return tuple(sign for sign in HangSign if sign in lasting_signs)


def update_activity(
    previous: ActivityTrack,
    snapshot: Snapshot,
    processes: Collection[EngineProcess] | None,
    *,
    is_without_work: bool,
) -> ActivityTrack:
    """Return the track with one more sample.

    `is_without_work` is whether the page shows no work.
    """
    now = snapshot.monotonic_seconds
    cpu_seconds = _sum_cpu_seconds(processes)
    gpu_ratio = _find_gpu_ratio(snapshot)
    if previous.begin_seconds is None:
        return _begin_span(previous, now, cpu_seconds, gpu_ratio, is_without_work=is_without_work)
    # If a sample's utilisation is unknown, so is the span's peak.
    peak_gpu_ratio = None
    if previous.peak_gpu_ratio is not None and gpu_ratio is not None:
        peak_gpu_ratio = max(previous.peak_gpu_ratio, gpu_ratio)
    track = ActivityTrack(
        cpu_ratio=previous.cpu_ratio,
        gpu_ratio=previous.gpu_ratio,
        has_spun_idle=previous.has_spun_idle,
        begin_seconds=previous.begin_seconds,
        begin_cpu_seconds=previous.begin_cpu_seconds,
        peak_gpu_ratio=peak_gpu_ratio,
        is_without_work=previous.is_without_work and is_without_work,
    )
    span_seconds = now - previous.begin_seconds
    if span_seconds < SPAN_SECONDS:
        return track
    cpu_ratio = None
    # The sum falls when a process exits. In that case, the CPU use in this span is unknown.
    if (
        cpu_seconds is not None
        and track.begin_cpu_seconds is not None
        and cpu_seconds >= track.begin_cpu_seconds
    ):
        cpu_ratio = (cpu_seconds - track.begin_cpu_seconds) / span_seconds
    has_spun_idle = track.has_spun_idle
    # If the core uses CPU time without having work, it polls while it is idle.
    if track.is_without_work and cpu_ratio is not None:
        has_spun_idle = cpu_ratio >= BUSY_CPU_RATIO
    whole_span = ActivityTrack(
        cpu_ratio=cpu_ratio, gpu_ratio=peak_gpu_ratio, has_spun_idle=has_spun_idle
    )
    return _begin_span(whole_span, now, cpu_seconds, gpu_ratio, is_without_work=is_without_work)


def _begin_span(
    whole_span: ActivityTrack,
    now: float,
    cpu_seconds: float | None,
    gpu_ratio: float | None,
    *,
    is_without_work: bool,
) -> ActivityTrack:
    """Return the track with a new span, and with the results of `whole_span`."""
    return ActivityTrack(
        cpu_ratio=whole_span.cpu_ratio,
        gpu_ratio=whole_span.gpu_ratio,
        has_spun_idle=whole_span.has_spun_idle,
        begin_seconds=now,
        begin_cpu_seconds=cpu_seconds,
        peak_gpu_ratio=gpu_ratio,
        is_without_work=is_without_work,
    )


def _sum_cpu_seconds(processes: Collection[EngineProcess] | None) -> float | None:
    """Return the CPU time of core and workers.

    Returns None if there are none or any time is unknown.
    """
    total_seconds = None
    for process in processes or ():
        if process.role not in NECESSARY_ROLES:
            continue
        if process.cpu_seconds is None:
            return None
        total_seconds = (total_seconds or 0.0) + process.cpu_seconds
    return total_seconds


def _find_gpu_ratio(snapshot: Snapshot) -> float | None:
    """Return the engine's utilisation of its busiest GPU.

    If a GPU's utilisation is unknown, the GPU may be busy. The result is None in that case, unless
    another GPU is busy.
    """
    ratios = [_find_own_ratio(gpu) for gpu in snapshot.owned_gpus]
    known_ratios = [ratio for ratio in ratios if ratio is not None]
    highest_ratio = max(known_ratios, default=None)
    if highest_ratio is not None and highest_ratio >= BUSY_GPU_RATIO:
        return highest_ratio
    return highest_ratio if len(known_ratios) == len(ratios) else None


def _find_own_ratio(gpu: Gpu) -> float | None:
    """Return the engine's utilisation of a GPU.

    Returns None if the utilisation is unknown. Also returns None if the GPU is busy and other
    processes may be the cause.
    """
    ratio = gpu.reading.utilization_ratio
    if ratio is None or ratio < BUSY_GPU_RATIO:
        return ratio
    is_shared = gpu.other_bytes is not None and gpu.other_bytes >= NEIGHBOUR_BYTES
    return None if is_shared else ratio


def find_stranded(
    engines: Mapping[EngineLabels, EngineProgress], now: float
) -> tuple[tuple[EngineLabels, float], ...]:
    """Return the share of each engine's KV cache that no request holds, if known.

    If an engine has been idle for a minute, all used KV cache is stranded. Before that, the share
    is the lowest of the probe's most recent readings. The probe also counts while the scheduler
    works.
    """
    stranded = []
    for labels, engine in engines.items():
        ratio = None
        if (
            engine.idle_since_seconds is not None
            and now - engine.idle_since_seconds >= IDLE_SECONDS
        ):
            ratio = engine.counters.kv_used_ratio
        # While the scheduler works, a reading may include blocks that are about to be freed.
        elif len(engine.kv_stranded_ratios) == STRANDED_READINGS:
            ratio = min(engine.kv_stranded_ratios)
        if ratio is not None:
            stranded.append((labels, ratio))
    return tuple(stranded)


def has_worked(page: EnginePage) -> bool | None:
    """Return whether any engine on the page has ever processed a request.

    Returns True for a page without engines. Returns None for engines with a name but without
    counters, as in Dynamo's own series.
    """
    if not page.engines:
        return True
    figures: list[float | None] = []
    for engine in list_named(page):
        figures += _read_counters(engine).totals
        figures.append(engine.running)
    # A page with names but no counters shows neither work nor idleness.
    if figures and set(figures) == {None}:
        return None
    return any(figures)
