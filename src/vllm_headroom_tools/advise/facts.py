"""What is known of an engine: what the rules are asked with."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct

from vllm_headroom.model import Device, HostMemory, Leftover
from vllm_headroom.units import GIB, MIB
from vllm_headroom.vocabulary import LeakState
from vllm_headroom_tools.advise.settings import EngineArgs
from vllm_headroom_tools.history.course import Moment


class FullFacts(Struct, frozen=True, kw_only=True):
    """The time in which the KV cache was full: how long, what was done in it, and the middle of what ran.

    On a page: since the engine's start, for `finished` and `preemptions`; now, for `running` and `tokens`.
    """

    seconds: float | None
    finished: float
    preemptions: float
    running: float
    tokens: float | None


class CappedFacts(Struct, frozen=True, kw_only=True):
    """The time in which requests waited although the KV cache had room, because no more than `running` may run."""

    seconds: float
    running: float
    kv_used_ratio: float


class PrefixFacts(Struct, frozen=True, kw_only=True):
    """The prefix cache: tokens looked up and found, in `seconds`; on a page since the engine's start, seconds unknown.

    `recent_ratio` is hits over queries of the last five minutes, on a page. `blocked_ratio` is the share of the time in
    which requests waited.
    """

    queries: float
    hits: float
    seconds: float | None
    blocked_ratio: float
    recent_ratio: float | None = None


class StrandedFacts(Struct, frozen=True, kw_only=True):
    """What an idle engine's KV cache still held: lastly, at the first of the times in which it only rose, how often."""

    ratio: float
    first_ratio: float
    rises: int


class EngineFacts(Struct, frozen=True, kw_only=True):
    """One engine (one data-parallel rank).

    Tokens are those of a running request in the KV cache, averaged over the requests that ran at that moment: their
    middle and their 99th percentile while the cache was not full. `calm_running` is the most requests that ran then
    without a preemption. `kv_known` and `preemptions_known` tell whether the page says these at all.
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
    full: FullFacts | None = None
    capped: CappedFacts | None = None
    prefix: PrefixFacts | None = None
    stranded: StrandedFacts | None = None


class Origin(StrEnum):
    """Where the facts come from: a trace has a history, a page is a moment."""

    TRACE = "trace"
    PAGE = "page"


class Shortage(StrEnum):
    """How little memory was left: from the start on, after a slow rise, or for a moment."""

    LEVEL = "level"
    RISEN = "risen"
    PEAK = "peak"


class Leak(Struct, frozen=True, kw_only=True):
    """What the leak detector says of one series, a GPU or a role of processes.

    `alarm` is the newest moment of its alarm, None where there was none; `ended_seconds` is None where it did not end.
    """

    state: LeakState
    alarm: Moment | None = None
    ended_seconds: float | None = None


class Spell(Struct, frozen=True, kw_only=True):
    """A time in which less than LOW_BYTES were left, without what others took.

    `seconds` is how long it lasted, `running` how many requests ran when the least was left; None where not known.
    `ended_engine` is whether the engine let go of its memory at its end.
    """

    kind: Shortage
    least_bytes: float
    began_seconds: float | None = None
    seconds: float | None = None
    running: float | None = None
    ended_engine: bool = False


class Extent(Struct, frozen=True):
    """An amount over the time: at its end, at the least and at the most."""

    now: float
    least: float
    most: float

    def widened(self, now: float) -> Extent:
        """Return it with one more reading."""
        return Extent(now, min(now, self.least), max(now, self.most))


class GpuFacts(Device, frozen=True, kw_only=True):
    """One GPU of the engine's, in bytes.

    `usable_bytes` is what CUDA calls its total. What `others` hold is None where the engine's share is not known, 0 up
    to SOMEBODY_BYTES. `leftovers` serve no engine any more; `roomy_running` is the most that ran with LOW_BYTES left.
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


class Start(Struct, frozen=True, kw_only=True):
    """A start of the engine that ended before it served: what it held at the most, what was left at the least.

    `room_before_bytes` is what was left before it; None where not known.
    """

    most_held_bytes: float
    least_room_bytes: float | None
    most_others_bytes: float
    room_before_bytes: float | None


class Ending(Struct, frozen=True, kw_only=True):
    """An end of an engine that served: what ran and what was left of a GPU at the last sample, None where not known.

    `orphan_bytes` is what processes of its own went on to hold.
    """

    seconds: float
    running: float | None
    room_bytes: float | None
    orphan_bytes: float


class Facts(Struct, frozen=True, kw_only=True):
    """Everything the rules may know; times in seconds since the epoch, None for a page.

    `since_seconds` is when other settings came into force, so that only what came after counts; None where none did.
    `age_seconds` is the age of a page's sample. `host` is the host memory, with the most that was in use of it.
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
    failed_starts: tuple[Start, ...] = ()
    endings: tuple[Ending, ...] = ()

    @property
    def span_seconds(self) -> float:
        """How long the facts reach back; 0 for a page."""
        begin = self.begin_seconds if self.since_seconds is None else self.since_seconds
        return 0.0 if begin is None or self.end_seconds is None else max(0.0, self.end_seconds - begin)

    @property
    def least_room_bytes(self) -> float | None:
        """The least that was left on any of the engine's GPUs; None where it is not known of one."""
        known = [gpu.least_room_bytes for gpu in self.gpus if gpu.least_room_bytes is not None]
        return min(known) if known and len(known) == len(self.gpus) else None


PEAK_BYTES: Final = 256 * MIB
"""Less than this left at a peak is nearly nothing (alert HeadroomGpuMemoryPeak)."""

AIM_BYTES: Final = GIB
"""What should be left at peaks after a change (runbook HeadroomGpuMemoryLow, "Afterwards")."""

LOST_RATIO: Final = 0.01
LOST_RISES: Final = 3
"""What no request holds of the KV cache (alert HeadroomKvBlocksLeak)."""

HOST_LOW_RATIO: Final = 0.05
"""Ours: with less than a twentieth of the limit left, one request with a large video can be the last."""

LESS_CACHE_GB: Final = 1.0
"""Ours: a quarter of the default."""

LASTING_SECONDS: Final = 600.0
"""What lasts for so long is no burst (`for: 10m` of HeadroomGpuMemoryLow and HeadroomKvCacheThrashing)."""

APART_SECONDS: Final = 300.0
"""Two shortages with so much time between them are two (the five minutes over which HeadroomGpuMemoryLow looks)."""

SOMEBODY_BYTES: Final = 200 * MIB
"""What no visible process holds, up to here, is the driver's; beyond it is somebody (runbook HeadroomGpuMemoryLow)."""

FULL_RATIO: Final = 0.95
"""A KV cache is full above this (alert HeadroomKvCacheThrashing). Full alone queues, and harms nobody."""

HURTING_PREEMPTIONS: Final = 0.1
"""Preemptions for each finished request: 0.01 is nothing, above this it hurts (runbook HeadroomKvCacheThrashing)."""

LARGER_REQUESTS: Final = 2.0
"""Ours: a cache that requests of twice the usual size fill was blown out by them; below, there were too many."""

FEWEST_REQUESTS: Final = 4
"""Ours: where fewer usual requests than this fit at once, there is nothing to batch, and the model is too large."""

WAITING_REQUESTS: Final = 10
"""Fewer than this waiting is noise (alert HeadroomQueueBacklog)."""

ROOMY_RATIO: Final = 0.7
"""Ours: with more than three tenths of the KV cache free it is not the cache that makes requests wait."""

PAYING_RATIO: Final = 0.3
"""Below this share of cached tokens looking them up costs about what it saves (alert HeadroomPrefixCacheNotPaying)."""

PREFIX_SECONDS: Final = 6 * 3600.0
PREFIX_TOKENS_PER_SECOND: Final = 100.0
"""Six hours of at least this traffic judge a prefix cache; with less there is nothing to win (the same alert)."""

BLOCKED_RATIO: Final = 0.05
"""Ours: before vLLM 0.27 a waiting request is looked up anew in each step (vllm-project/vllm#43736); where requests
wait for more than this share of the time, hits over queries say nothing.
"""

USUAL_SECONDS: Final = 6 * 3600.0
"""Ours: an engine's highest peaks are believed to be its usual ones after so long; nothing is raised on less."""

HIGHEST_UTILIZATION: Final = 0.95
"""What vLLM's author calls safe ends here (vllm-project/vllm#1298)."""

SHORTEST_SECONDS: Final = 3600.0
"""A shorter trace cannot show health: the leak detector takes an hour to be sure."""

STALE_SECONDS: Final = 120.0
"""A page this old is not the present (alert HeadroomSampleStale)."""

CHANGED_RATIO: Final = 0.01
"""Ours: a KV cache that is so much larger or smaller was made by other settings; two equal starts differ by less."""

FAILED_STARTS: Final = 2
"""Ours: once may be a person who changed their mind."""
