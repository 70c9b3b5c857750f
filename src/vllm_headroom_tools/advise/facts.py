"""The facts about an engine that the rules judge."""

from enum import StrEnum
from typing import Final

from msgspec import Struct

from vllm_headroom.model import BudgetExcess, Device, Ending, HostMemory, Leftover
from vllm_headroom.units import GIB, MIB
from vllm_headroom.vocabulary import LeakState
from vllm_headroom_tools.advise.settings import EngineArgs
from vllm_headroom_tools.history import LeakVerdict, Moment


class FullFacts(Struct, frozen=True, kw_only=True):
    """The time with a full KV cache. From a page, the counts are since the engine's start."""

    # None on a page, where the other figures are of now.
    seconds: float | None
    # Requests that finished, and preemptions, in that time.
    finished: float
    preemptions: float
    # Medians of the requests that ran, and of the cache's tokens for each of them.
    running: float
    tokens: float | None
    # The part of the time in which many requests waited, and the median of how many.
    queued_seconds: float = 0.0
    waiting: float | None = None


class ThrashFacts(Struct, frozen=True, kw_only=True):
    """The times in a row at which a full KV cache sent most running requests back to the queue."""

    times: int
    # From the first of them to the last.
    seconds: float
    # Requests that went back, and requests that finished meanwhile.
    returned: float
    finished: float
    # The fewest that ran before one of them, and the most tokens of the cache for each.
    running: float
    tokens: float | None


class CappedFacts(Struct, frozen=True, kw_only=True):
    """The time in which requests waited although the KV cache had room: only `running` may run."""

    seconds: float
    running: float
    kv_used_ratio: float


class PrefixFacts(Struct, frozen=True, kw_only=True):
    """What the prefix cache saved."""

    # Tokens that were looked up, and that were there.
    queries: float
    hits: float
    # The length of the history; None on a page, which counts since the engine's start.
    seconds: float | None
    # The share of the time in which requests waited.
    blocked_ratio: float
    # The hit ratio of the last five minutes, on a page.
    recent_ratio: float | None = None


class StrandedFacts(Struct, frozen=True, kw_only=True):
    """The share of the KV cache that stays in use while the engine is idle."""

    # Of now, and before it rose `rises` times in a row.
    ratio: float
    first_ratio: float
    rises: int


class EngineFacts(Struct, frozen=True, kw_only=True):
    """One engine (one data-parallel rank)."""

    model_name: str
    engine: str
    capacity_tokens: float | None = None
    capacity_bytes: float | None = None
    # Whether the engine's page has these figures at all.
    has_kv_usage: bool = False
    has_preemptions: bool = False
    highest_running: float | None = None
    finished: float | None = None
    # Median and 99th percentile of the cache's tokens per running request while it was not full.
    usual_tokens: float | None = None
    high_tokens: float | None = None
    # The most requests that ran without a preemption while the cache was not full.
    calm_running: float | None = None
    highest_kv_used_ratio: float | None = None
    full: FullFacts | None = None
    thrash: ThrashFacts | None = None
    capped: CappedFacts | None = None
    prefix: PrefixFacts | None = None
    stranded: StrandedFacts | None = None


class Origin(StrEnum):
    """The source of the facts: a trace has a history, a page only the present."""

    TRACE = "trace"
    PAGE = "page"


class Shortage(StrEnum):
    """The kind of a shortage: from the start on, after a slow rise, or for a moment."""

    LEVEL = "level"
    RISEN = "risen"
    PEAK = "peak"


class Leak(Struct, frozen=True, kw_only=True):
    """The leak detector's verdict on a series."""

    # Of now, or at the end of the trace.
    state: LeakState
    # Of the whole trace, with the reason: the same as of `replay` and `check`.
    verdict: LeakVerdict = LeakVerdict.CANNOT_TELL
    reason: str = ""
    # The newest figures of its alarm; None where it raised none.
    alarm: Moment | None = None
    # When the alarm ended; None while it lasts.
    ended_seconds: float | None = None


class Spell(Struct, frozen=True, kw_only=True):
    """A time with less than LOW_BYTES of a GPU left, not counting the memory of others."""

    kind: Shortage
    lowest_room_bytes: float
    # None on a page.
    began_seconds: float | None = None
    seconds: float | None = None
    # The requests that ran when the room was lowest.
    running: float | None = None
    # The engine exited at the end of it, and so released its memory.
    has_engine_exited: bool = False


class Extent(Struct, frozen=True):
    """The newest, lowest and highest value of an amount of memory."""

    newest_bytes: float
    lowest_bytes: float
    highest_bytes: float


UNATTRIBUTED_BYTES: Final = 200 * MIB
"""Up to this, memory without a visible process is the driver's (runbook HeadroomGpuMemoryLow)."""


def measure_others(used_bytes: float, engine_bytes: float | None) -> float | None:
    """Return the memory of others on a GPU; None where the engine's share is unknown.

    Up to UNATTRIBUTED_BYTES it is nobody's, and the result is 0.
    """
    if engine_bytes is None:
        return None
    others_bytes = used_bytes - engine_bytes
    return float(others_bytes) if others_bytes > UNATTRIBUTED_BYTES else 0.0


class GpuFacts(Device, frozen=True, kw_only=True):
    """One of the engine's GPUs."""

    leak: Leak
    # CUDA's total.
    usable_bytes: float | None = None
    least_room_bytes: float | None = None
    # The memory of others, as `measure_others` returns it; None where it was never known.
    others_memory: Extent | None = None
    spells: tuple[Spell, ...] = ()
    # By how much the engine was over its budget when it last served.
    excess: BudgetExcess | None = None
    # Processes that an exited engine left over.
    leftovers: tuple[Leftover, ...] = ()
    # The most requests that ran while LOW_BYTES or more were left.
    roomy_running: float | None = None


class HostFacts(Struct, frozen=True, kw_only=True):
    """One role of the engine's processes on the host."""

    process: str
    leak: Leak
    held_bytes: float | None = None


class Facts(Struct, frozen=True, kw_only=True):
    """Everything that the rules judge; times in seconds since the epoch, None for a page."""

    origin: Origin
    settings: EngineArgs
    samples: int = 1
    begin_seconds: float | None = None
    end_seconds: float | None = None
    # The newest change of the engine's settings: only later samples count.
    since_seconds: float | None = None
    # The age of a page's sample.
    age_seconds: float | None = None
    gpus: tuple[GpuFacts, ...] = ()
    engines: tuple[EngineFacts, ...] = ()
    hosts: tuple[HostFacts, ...] = ()
    # The host memory with the highest use.
    host: HostMemory | None = None
    ends: tuple[Ending, ...] = ()

    @property
    def failed_starts(self) -> tuple[Ending, ...]:
        """The starts that exited before the engine served."""
        return tuple(end for end in self.ends if not end.has_served)

    @property
    def span_seconds(self) -> float:
        """The length of the history; 0 for a page."""
        begin_seconds = self.since_seconds
        if begin_seconds is None:
            begin_seconds = self.begin_seconds
        if begin_seconds is None or self.end_seconds is None:
            return 0.0
        return max(0.0, self.end_seconds - begin_seconds)

    @property
    def least_room_bytes(self) -> float | None:
        """The least room on any of the engine's GPUs; None where one is unknown."""
        rooms_bytes = []
        for gpu in self.gpus:
            if gpu.least_room_bytes is None:
                return None
            rooms_bytes.append(gpu.least_room_bytes)
        return min(rooms_bytes, default=None)

    @property
    def usable_bytes(self) -> float | None:
        """The usable memory of the largest GPU; None where none is known."""
        known_bytes = [gpu.usable_bytes for gpu in self.gpus if gpu.usable_bytes]
        return max(known_bytes, default=None)


def list_leaks(facts: Facts) -> list[tuple[str, Leak]]:
    """Return the leak detector's verdict on each GPU and each role, with its name."""
    leaks = [(gpu.display_name, gpu.leak) for gpu in facts.gpus]
    leaks += [(host.process, host.leak) for host in facts.hosts]
    return leaks


PEAK_BYTES: Final = 256 * MIB
"""Less than this left at a peak is nearly nothing (alert HeadroomGpuMemoryPeak)."""

AIM_BYTES: Final = GIB
"""The room to aim for at peaks after a change (runbook HeadroomGpuMemoryLow, "Afterwards")."""

LASTING_SECONDS: Final = 600.0
"""What lasts for so long is no burst (`for: 10m` of HeadroomGpuMemoryLow and
HeadroomKvCacheThrashing)."""

FULL_RATIO: Final = 0.95
"""A KV cache is full above this (alert HeadroomKvCacheThrashing). Full alone queues, and harms
nobody."""
