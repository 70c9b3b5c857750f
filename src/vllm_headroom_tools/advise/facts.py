"""The facts about an engine that the rules judge."""

from enum import StrEnum
from typing import Final

from msgspec import Struct

from vllm_headroom.model import Device, Ending, HostMemory, Leftover
from vllm_headroom.units import GIB, MIB
from vllm_headroom.vocabulary import LeakState
from vllm_headroom_tools.advise.settings import EngineArgs
from vllm_headroom_tools.history import Moment


class FullFacts(Struct, frozen=True, kw_only=True):
    """The time with a full KV cache: its length, the work done, and the medians of load and tokens per request.

    `queued_seconds` of it passed with WAITING_REQUESTS and more in the queue, `waiting` of them in the middle. From a
    page, `finished` and `preemptions` count since the engine's start; `running` and `tokens` are of now.
    """

    seconds: float | None
    finished: float
    preemptions: float
    running: float
    tokens: float | None
    queued_seconds: float = 0.0
    waiting: float | None = None


class CappedFacts(Struct, frozen=True, kw_only=True):
    """The time in which requests waited although the KV cache had room, because at most `running` may run."""

    seconds: float
    running: float
    kv_used_ratio: float


class PrefixFacts(Struct, frozen=True, kw_only=True):
    """Tokens looked up and found in the prefix cache in `seconds`; from a page, since the engine's start (None).

    `recent_ratio` is the hit ratio of the last five minutes, on a page; `blocked_ratio` the share of the time in which
    requests waited.
    """

    queries: float
    hits: float
    seconds: float | None
    blocked_ratio: float
    recent_ratio: float | None = None


class StrandedFacts(Struct, frozen=True, kw_only=True):
    """The share of the KV cache that an idle engine held: now, before the last run of rises, and their number."""

    ratio: float
    first_ratio: float
    rises: int


class EngineFacts(Struct, frozen=True, kw_only=True):
    """One engine (one data-parallel rank).

    `usual_tokens` and `high_tokens` are the median and the 99th percentile of the cache's tokens per running request
    while it was not full, `most_used_ratio` the highest use of the cache, `calm_running` the most requests that ran
    then without a preemption. `kv_known` and `preemptions_known` are whether the page has these at all.
    """

    model_name: str
    engine: str
    capacity_tokens: float | None = None
    capacity_bytes: float | None = None
    kv_known: bool = False
    preemptions_known: bool = False
    most_running: float | None = None
    finished: float | None = None
    usual_tokens: float | None = None
    high_tokens: float | None = None
    calm_running: float | None = None
    most_used_ratio: float | None = None
    full: FullFacts | None = None
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
    """The leak detector's verdict, with the newest moment of its alarm; `ended_seconds` is None while that lasts."""

    state: LeakState
    alarm: Moment | None = None
    ended_seconds: float | None = None


class Spell(Struct, frozen=True, kw_only=True):
    """A time with less than LOW_BYTES left, not counting the memory of others.

    `running` is the load when the least was left. `ended_engine` is whether the engine released its memory at the end.
    """

    kind: Shortage
    least_bytes: float
    began_seconds: float | None = None
    seconds: float | None = None
    running: float | None = None
    ended_engine: bool = False


class Extent(Struct, frozen=True):
    """The newest, lowest and highest value of an amount."""

    now: float
    least: float
    most: float


def measure_others(used_bytes: float, engine_bytes: float | None) -> float | None:
    """Return the memory of others on a GPU, 0 up to SOMEBODY_BYTES; None where the engine's share is unknown."""
    if engine_bytes is None:
        return None
    return float(used_bytes - engine_bytes) if used_bytes - engine_bytes > SOMEBODY_BYTES else 0.0


class GpuFacts(Device, frozen=True, kw_only=True):
    """One of the engine's GPUs.

    `usable_bytes` is CUDA's total. `others` is None where the engine's share is unknown, and 0 up to SOMEBODY_BYTES.
    `leftovers` are processes of an exited engine; `roomy_running` is the highest load with LOW_BYTES left.
    """

    leak: Leak
    usable_bytes: float | None = None
    least_room_bytes: float | None = None
    others: Extent | None = None
    spells: tuple[Spell, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    roomy_running: float | None = None


class HostFacts(Struct, frozen=True, kw_only=True):
    """One role of the engine's processes on the host."""

    process: str
    leak: Leak
    held_bytes: float | None = None


class Facts(Struct, frozen=True, kw_only=True):
    """Everything the rules judge; times in seconds since the epoch, None for a page.

    `since_seconds` is the newest change of settings: only later samples count. `age_seconds` is the age of a page's
    sample. `host` is the host memory with the highest use.
    """

    origin: Origin
    settings: EngineArgs
    samples: int = 1
    begin_seconds: float | None = None
    end_seconds: float | None = None
    since_seconds: float | None = None
    age_seconds: float | None = None
    gpus: tuple[GpuFacts, ...] = ()
    engines: tuple[EngineFacts, ...] = ()
    hosts: tuple[HostFacts, ...] = ()
    host: HostMemory | None = None
    ends: tuple[Ending, ...] = ()

    @property
    def failed_starts(self) -> tuple[Ending, ...]:
        """The starts that exited before the engine served."""
        return tuple(end for end in self.ends if not end.has_served)

    @property
    def span_seconds(self) -> float:
        """The length of the history; 0 for a page."""
        begin = self.begin_seconds if self.since_seconds is None else self.since_seconds
        return (
            0.0 if begin is None or self.end_seconds is None else max(0.0, self.end_seconds - begin)
        )

    @property
    def least_room_bytes(self) -> float | None:
        """The least room on any of the engine's GPUs; None where one is unknown."""
        known = [gpu.least_room_bytes for gpu in self.gpus if gpu.least_room_bytes is not None]
        return min(known) if known and len(known) == len(self.gpus) else None


PEAK_BYTES: Final = 256 * MIB
"""Less than this left at a peak is nearly nothing (alert HeadroomGpuMemoryPeak)."""

AIM_BYTES: Final = GIB
"""The room to aim for at peaks after a change (runbook HeadroomGpuMemoryLow, "Afterwards")."""

LASTING_SECONDS: Final = 600.0
"""What lasts for so long is no burst (`for: 10m` of HeadroomGpuMemoryLow and HeadroomKvCacheThrashing)."""

SOMEBODY_BYTES: Final = 200 * MIB
"""Up to this, memory without a visible process is the driver's (runbook HeadroomGpuMemoryLow)."""

FULL_RATIO: Final = 0.95
"""A KV cache is full above this (alert HeadroomKvCacheThrashing). Full alone queues, and harms nobody."""
