"""What is known of an engine: what the rules are asked with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vllm_headroom.commands.advise.lives import Ending, Start
from vllm_headroom.commands.advise.settings import Settings
from vllm_headroom.model import HostMemory, Leftover
from vllm_headroom.trace.course import Moment
from vllm_headroom.vocabulary import LeakState


class Origin(StrEnum):
    """Where the facts come from: a trace has a history, a page is a moment."""

    TRACE = "trace"
    PAGE = "page"


class Shortage(StrEnum):
    """How little memory was left: from the start on, after a slow rise, or for a moment."""

    LEVEL = "level"
    RISEN = "risen"
    PEAK = "peak"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """What the leak detector says of one series, a GPU or a role of processes.

    `alarm` is the newest moment of its alarm, None where there was none; `ended_seconds` is None where it did not end.
    """

    state: LeakState
    alarm: Moment | None = None
    ended_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU of the engine's, in bytes.

    `usable_bytes` is what CUDA calls its total. What others hold is None where the engine's share is not known, 0 up to
    SOMEBODY_BYTES. `leftovers` serve no engine any more; `roomy_running` is the most that ran with LOW_BYTES left.
    """

    index: int
    uuid: str
    leak: Leak
    usable_bytes: float | None = None
    room_bytes: float | None = None
    least_room_bytes: float | None = None
    others_bytes: float | None = None
    least_others_bytes: float | None = None
    most_others_bytes: float | None = None
    spells: tuple[Spell, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    roomy_running: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FullFacts:
    """The time in which the KV cache was full: how long, what was done in it, and the middle of what ran.

    On a page: since the engine's start, for `finished` and `preemptions`; now, for `running` and `tokens`.
    """

    seconds: float | None
    finished: float
    preemptions: float
    running: float
    tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedFacts:
    """The time in which requests waited although the KV cache had room, because no more than `running` may run."""

    seconds: float
    running: float
    kv_used_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFacts:
    """The prefix cache: tokens looked up and found, in `seconds`; on a page since the engine's start, seconds unknown.

    `recent_ratio` is hits over queries of the last five minutes, on a page. `blocked_ratio` is the share of the time in
    which requests waited.
    """

    queries: float
    hits: float
    seconds: float | None
    blocked_ratio: float
    recent_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StrandedFacts:
    """What an idle engine's KV cache still held: lastly, at the first of the times in which it only rose, how often."""

    ratio: float
    first_ratio: float
    rises: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """One engine (one data-parallel rank).

    Tokens are those of a running request in the KV cache, averaged over the requests that ran at that moment: their
    middle and their 99th percentile while the cache was not full. `calm_running` is the most requests that ran then
    without a preemption. `kv_known` and `preemptions_known` tell whether the page says these at all.
    """

    model_name: str
    engine: str
    awake: bool | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """One role of the engine's processes on the host."""

    process: str
    leak: Leak
    held_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything the rules may know; times in seconds since the epoch, None for a page.

    `since_seconds` is when other settings came into force, so that only what came after counts; None where none did.
    `age_seconds` is the age of a page's sample. `host` is the host memory, with the most that was in use of it.
    """

    origin: Origin
    settings: Settings
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
