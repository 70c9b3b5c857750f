"""What is known of an end once a trace has been read up to it."""

from __future__ import annotations

from msgspec import Struct

from vllm_headroom.derive.life.lives import SHRUNK_RATIO, TIGHT_BYTES
from vllm_headroom.derive.page_facts import together
from vllm_headroom.model import Device, EngineReading
from vllm_headroom.trace.course import Moment
from vllm_headroom.trace.incidents import What
from vllm_headroom.vocabulary import ExitReason, LeakState


class GpuAtEnd(Device, frozen=True, kw_only=True):
    """A GPU of the engine's before the end; None where it was not known.

    `first_…` is when this life began to serve, or else to be seen, `last_…` the most, or the least room, of the last
    minute and a half, peaks included. `grown_bytes` is how much more the engine held then, `jumped_bytes` how much of
    that came within the last minutes. `joined` is whether more
    processes were on it at the end than at first, `between` whether its least room was seen between samples, where it
    is not told who took it.
    """

    total_bytes: int | None
    usable_bytes: int | None
    first_room_bytes: int | None
    last_room_bytes: int | None
    last_engine_bytes: int | None
    grown_bytes: int | None
    jumped_bytes: int | None
    first_other_bytes: int | None
    last_other_bytes: int | None
    joined: bool = False
    between: bool = False
    leak: LeakState = LeakState.UNKNOWN
    leaked: Moment | None = None

    @property
    def is_full(self) -> bool:
        """Whether next to nothing was left of what had been, as the daemon tells it."""
        first, last = self.first_room_bytes, self.last_room_bytes
        return last is not None and last <= TIGHT_BYTES and (first is None or last <= SHRUNK_RATIO * first)

    @property
    def lost_bytes(self) -> int | None:
        """How much less room there was at the end."""
        return more(self.last_room_bytes, self.first_room_bytes)

    def share(self, n_bytes: int | None) -> float:
        """Return how much of the lost room an amount accounts for; 0 where that is not known."""
        return 0.0 if n_bytes is None or not self.lost_bytes else max(0.0, n_bytes / self.lost_bytes)

    @property
    def others_bytes(self) -> int | None:
        """How much more others held at the end."""
        return more(self.first_other_bytes, self.last_other_bytes)


def more(before: int | None, after: int | None) -> int | None:
    """Return how much more the second amount is."""
    return None if before is None or after is None else after - before


class Circumstances(Struct, frozen=True, kw_only=True):
    """An end, or a stall, and what went before it in that life.

    `began_seconds` is when that life began, which may be before anything was seen of it, `seen_seconds` for how long it
    was seen, and `unseen_seconds` how long before its end it was last seen. `served` is whether it ever did, `hung` for
    how long nothing had moved, `answered` whether its page still came. `broken` is whether a process without which it
    serves nobody went before the rest, `shut_seconds` for how long its server lived on without one and refused its page
    then. `idle_seconds` is for how long nothing had run or waited when the page was last
    seen; None where something did, or that is not known. `xids` and `ooms` are of the quarter of an hour before, `lost`
    is what was said then of GPUs that could not be read.
    """

    what: What
    seconds: float
    reason: ExitReason | None = None
    began_seconds: float | None = None
    seen_seconds: float = 0.0
    unseen_seconds: float | None = None
    served: bool = False
    hung_seconds: float | None = None
    answered: bool = False
    broken: bool = False
    shut_seconds: float | None = None
    engines: tuple[EngineReading, ...] = ()
    idle_seconds: float | None = None
    usual_running: float | None = None
    gpus: tuple[GpuAtEnd, ...] = ()
    xids: tuple[int, ...] = ()
    ooms: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def running(self) -> float | None:
        """The requests that ran when the page was last seen."""
        return together(engine.running for engine in self.engines)

    @property
    def worst(self) -> GpuAtEnd | None:
        """The GPU with the least room left."""
        known = [gpu for gpu in self.gpus if gpu.last_room_bytes is not None]
        return min(known, key=lambda gpu: gpu.last_room_bytes or 0, default=None)

    @property
    def full(self) -> GpuAtEnd | None:
        """A GPU that ran full; by the word of the daemon, which saw more, the one with the least room."""
        if self.reason is ExitReason.OUT_OF_MEMORY:
            return self.worst
        return next((gpu for gpu in self.gpus if gpu.is_full), None)
