"""The facts about an engine that the rules judge."""

from enum import StrEnum
from typing import Final

from msgspec import Struct

from vllm_headroom.model import ANY_LOG_COMMAND, BudgetExcess, Device, Ending, HostMemory, Leftover
from vllm_headroom.units import GIB, MIB
from vllm_headroom.vocabulary import LeakState, Work
from vllm_headroom_tools.advise.settings import EngineArgs
from vllm_headroom_tools.full_cache import ThrashFacts
from vllm_headroom_tools.history import LeakVerdict, Moment


class FullFacts(Struct, frozen=True, kw_only=True):
    """The period during which an engine's KV cache was full."""

    # How long the cache was full during a trace. The field is None for a page, which only shows
    # current figures.
    seconds: float | None
    # The numbers of finished requests and of preemptions while the cache was full. For a page, both
    # numbers cover the time since the engine's start.
    finished: float
    preemptions: float
    # The medians of two numbers: running requests, and cached tokens per running request.
    running: float
    tokens: float | None
    # How long at least WAITING_REQUESTS requests waited while the cache was full. The second field
    # is the median number of waiting requests during that time.
    queued_seconds: float = 0.0
    waiting: float | None = None


class CappedFacts(Struct, frozen=True, kw_only=True):
    """The period during which requests waited even though the KV cache had room.

    These requests waited because of a limit on running requests.
    """

    seconds: float
    # The limit on running requests. The limit is the largest number of requests that ran at the
    # same time.
    running: float
    # The 90th percentile of cache usage during this period.
    kv_used_ratio: float


class PrefixFacts(Struct, frozen=True, kw_only=True):
    """The prefix cache's hit statistics."""

    # The number of tokens looked up, and how many of these tokens were cached.
    queries: float
    hits: float
    # The length of the history. The field is None for a page, whose counters begin at the engine's
    # start.
    seconds: float | None
    # The fraction of the time in which requests were waiting.
    blocked_ratio: float
    # The hit ratio over the last five minutes, or None for a trace.
    recent_ratio: float | None = None


class StrandedFacts(Struct, frozen=True, kw_only=True):
    """The share of the KV cache that stays in use while the engine is idle."""

    # The latest share and the first share. Between the first and the latest, the share rose `rises`
    # times.
    ratio: float
    first_ratio: float
    rises: int


class EngineFacts(Struct, frozen=True, kw_only=True):
    """The facts about one engine (one data-parallel rank); unknown facts are None."""

    model_name: str
    engine: str
    capacity_tokens: float | None = None
    capacity_bytes: float | None = None
    # Whether the engine's page contains these figures at all.
    has_kv_usage: bool = False
    has_preemptions: bool = False
    highest_running: float | None = None
    finished: float | None = None
    # Cached tokens per running request while the cache was not full. The fields are the median and
    # the 99th percentile.
    usual_tokens: float | None = None
    high_tokens: float | None = None
    # The highest number of running requests without a preemption and without a full cache.
    calm_running: float | None = None
    highest_kv_used_ratio: float | None = None
    full: FullFacts | None = None
    thrash: ThrashFacts | None = None
    capped: CappedFacts | None = None
    prefix: PrefixFacts | None = None
    stranded: StrandedFacts | None = None


class FactsSource(StrEnum):
    """The source of the facts.

    A trace has a history, a page the current values, and a log one start.
    """

    TRACE = "trace"
    PAGE = "page"
    LOG = "log"


class Shortage(StrEnum):
    """The kind of memory shortage.

    It has lasted since startup, lasts after a slow rise, or is brief.
    """

    LEVEL = "level"
    RISEN = "risen"
    PEAK = "peak"


class Leak(Struct, frozen=True, kw_only=True):
    """The leak detector's verdict on one series."""

    # The current state, or the state at the end of the trace.
    state: LeakState
    # The verdict on the whole trace and its reason, as reported by `replay` and `check`.
    verdict: LeakVerdict = LeakVerdict.CANNOT_TELL
    reason: str = ""
    # The alarm's latest figures, or None if there was no alarm.
    alarm: Moment | None = None
    # When the alarm ended. None if the alarm is still active or if there was no alarm.
    ended_seconds: float | None = None


class Spell(Struct, frozen=True, kw_only=True):
    """A period with less than LOW_BYTES free on a GPU.

    Memory of other processes counts as free.
    """

    kind: Shortage
    lowest_room_bytes: float
    # When the spell began, and for how long memory was short during the spell. Both values are None
    # for a page.
    began_seconds: float | None = None
    seconds: float | None = None
    # The number of running requests when the room was lowest.
    running: float | None = None
    # Whether the spell ended because the engine's exit freed its memory.
    has_engine_exited: bool = False


class Extent(Struct, frozen=True):
    """The latest, lowest and highest values of an amount of memory."""

    newest_bytes: float
    lowest_bytes: float
    highest_bytes: float


UNATTRIBUTED_BYTES: Final = 200 * MIB
"""Up to this amount, memory without a visible process is attributed to the driver. See runbook
HeadroomGpuMemoryLow.
"""


def measure_others(used_bytes: float, engine_bytes: float | None) -> float | None:
    """Return the bytes that other processes hold on a GPU.

    Returns None if the engine's bytes are unknown. A difference of at most UNATTRIBUTED_BYTES is
    attributed to the driver, and the result is 0.
    """
    if engine_bytes is None:
        return None
    others_bytes = used_bytes - engine_bytes
    return float(others_bytes) if others_bytes > UNATTRIBUTED_BYTES else 0.0


class PeakFacts(Struct, frozen=True, kw_only=True):
    """The highest memory peak in the last minute for one kind of work."""

    work: Work
    transient_bytes: float
    # By how many bytes the next peak of this kind may exceed this one.
    spread_bytes: float

    def missing_bytes(self, room_bytes: float | None) -> float:
        """Return by how much the peak exceeds the room.

        The result is 0 if the peak fits or the room is unknown.
        """
        if room_bytes is None:
            return 0.0
        return max(0.0, self.transient_bytes + self.spread_bytes - room_bytes)


class GpuFacts(Device, frozen=True, kw_only=True):
    """The facts about one of the engine's GPUs; unknown facts are None."""

    leak: Leak
    # Whether growth on the GPU is known to come from the engine. If the source of the growth is
    # unknown, another process may be growing.
    is_holder_known: bool = True
    # The total that CUDA reports, which excludes the driver's reserve.
    usable_bytes: float | None = None
    # The least free memory, which is the amount left at the highest peak.
    least_room_bytes: float | None = None
    # The memory of other processes from `measure_others`, or None if it was never known.
    others_memory: Extent | None = None
    spells: tuple[Spell, ...] = ()
    # The engine's excess over its budget, in the latest sample taken while serving.
    excess: BudgetExcess | None = None
    # Processes that outlived their engine.
    leftovers: tuple[Leftover, ...] = ()
    # The highest number of running requests while at least LOW_BYTES were free.
    roomy_running: float | None = None
    # The probe's measurements of steps. The other fields are the largest requests that fit,
    # according to these measurements.
    peaks: tuple[PeakFacts, ...] = ()
    peak_room_bytes: float | None = None
    safe_prompt_tokens: float | None = None
    safe_logprobs_tokens: float | None = None
    safe_image_pixels: float | None = None


class HostFacts(Struct, frozen=True, kw_only=True):
    """The host memory of all engine processes with the same role."""

    process: str
    leak: Leak
    held_bytes: float | None = None


class Facts(Struct, frozen=True, kw_only=True):
    """All facts that the rules judge.

    Times are in seconds since the epoch, or None for a page.
    """

    origin: FactsSource
    settings: EngineArgs
    samples: int = 1
    begin_seconds: float | None = None
    end_seconds: float | None = None
    # When the engine's settings last changed; earlier samples are ignored. The field is None if the
    # settings have not changed.
    since_seconds: float | None = None
    # The age of a page's sample, or None for a trace.
    age_seconds: float | None = None
    gpus: tuple[GpuFacts, ...] = ()
    engines: tuple[EngineFacts, ...] = ()
    hosts: tuple[HostFacts, ...] = ()
    # The host memory reading with the highest usage, or None without readings.
    host: HostMemory | None = None
    # The engine's exits.
    ends: tuple[Ending, ...] = ()
    # The command that shows the engine's log up to its last exit.
    log_command: str = ANY_LOG_COMMAND

    @property
    def failed_starts(self) -> tuple[Ending, ...]:
        """Return the starts in which the engine exited before it began to serve."""
        return tuple(end for end in self.ends if not end.has_served)

    @property
    def span_seconds(self) -> float:
        """Return the length of the history since the settings last changed.

        The length is 0 for a page.
        """
        begin_seconds = self.since_seconds
        if begin_seconds is None:
            begin_seconds = self.begin_seconds
        if begin_seconds is None or self.end_seconds is None:
            return 0.0
        return max(0.0, self.end_seconds - begin_seconds)

    @property
    def least_room_bytes(self) -> float | None:
        """Return the smallest amount of room on any of the engine's GPUs.

        Returns None if there are no GPUs, or if any GPU's room is unknown.
        """
        rooms_bytes = []
        for gpu in self.gpus:
            if gpu.least_room_bytes is None:
                return None
            rooms_bytes.append(gpu.least_room_bytes)
        return min(rooms_bytes, default=None)

    @property
    def usable_bytes(self) -> float | None:
        """Return the usable memory of the largest GPU, or None if no size is known."""
        known_bytes = [gpu.usable_bytes for gpu in self.gpus if gpu.usable_bytes]
        return max(known_bytes, default=None)


def list_leaks(facts: Facts) -> list[tuple[str, Leak]]:
    """Return the detector's verdict on each GPU and host role, with its name."""
    leaks = [(gpu.display_name, gpu.leak) for gpu in facts.gpus]
    leaks += [(host.process, host.leak) for host in facts.hosts]
    return leaks


PEAK_BYTES: Final = 256 * MIB
"""If a peak leaves less room than this, memory is short (alert HeadroomGpuMemoryPeak)."""

AIM_BYTES: Final = GIB
"""The memory that should be free at peaks after a change. See "Afterwards" in runbook
HeadroomGpuMemoryLow.
"""
