"""What is known of an engine: what the rules are asked with."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from vllm_headroom.commands.advise.engine_facts import EngineFacts
from vllm_headroom.commands.advise.settings import EngineArgs
from vllm_headroom.model import Device, HostMemory, Leftover
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
