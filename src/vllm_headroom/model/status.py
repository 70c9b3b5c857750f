"""The status of the engine, and the end of its run."""

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.model.engine import EngineReading, HangSign
from vllm_headroom.model.gpu import Device
from vllm_headroom.vocabulary import (
    EndCause,
    EngineState,
    ExitReason,
    IncidentKind,
    LeakState,
    Role,
    Sureness,
)

FULL_BYTES: Final = 256 * 2**20
SHRUNK_RATIO: Final = 0.5
"""A GPU was full when the least free memory was below both: this size, a dozen of torch's segments of 20 MiB, and this
share of what was free when the engine began to serve: one configured to leave little is not out of memory."""


class GpuAtEnd(Device, frozen=True, kw_only=True):
    """One of the engine's GPUs before the end; None is unknown.

    `first_…` is of the begin of serving, or else of the record; `last_…` the highest use, or the least room, of the
    last minute and a half, peaks included; `before_held_bytes` the most that the engine held in the minutes before
    that. `joined` is whether there were more processes at the end than at first, `between` whether the least room was
    between two samples, where its holder is unknown. `newest_…` is of the newest sample.
    """

    total_bytes: int | None = None
    usable_bytes: int | None = None
    first_room_bytes: int | None = None
    last_room_bytes: int | None = None
    first_held_bytes: int | None = None
    before_held_bytes: int | None = None
    last_engine_bytes: int | None = None
    first_other_bytes: int | None = None
    last_other_bytes: int | None = None
    joined: bool = False
    between: bool = False
    newest_seconds: float = 0.0
    newest_used_bytes: int | None = None
    newest_held_bytes: int | None = None
    leak: LeakState = LeakState.UNKNOWN
    leak_bytes_per_request: float | None = None

    @property
    def is_full(self) -> bool:
        """Whether almost no room was left."""
        room, first = self.last_room_bytes, self.first_room_bytes
        return (
            room is not None
            and room <= FULL_BYTES
            and (first is None or room <= SHRUNK_RATIO * first)
        )

    @property
    def grown_bytes(self) -> int | None:
        """The growth of the engine since it began to serve."""
        return _subtract(self.first_held_bytes, self.last_engine_bytes)

    @property
    def jumped_bytes(self) -> int | None:
        """The growth of the engine within the last minutes."""
        return _subtract(self.before_held_bytes, self.last_engine_bytes)

    @property
    def others_bytes(self) -> int | None:
        """The growth of others."""
        return _subtract(self.first_other_bytes, self.last_other_bytes)

    def share(self, n_bytes: int | None) -> float:
        """Return the share of the lost room that an amount explains; 0 where unknown."""
        lost = _subtract(self.last_room_bytes, self.first_room_bytes)
        return 0.0 if n_bytes is None or not lost else max(0.0, n_bytes / lost)

    def raise_peak(self, used_bytes: int) -> "GpuAtEnd":
        """Return the GPU with a higher use than at the newest sample, some time after it: its holder is unknown."""
        if (
            self.usable_bytes is None
            or self.newest_used_bytes is None
            or used_bytes <= self.newest_used_bytes
        ):
            return self
        room, above = self.usable_bytes - used_bytes, used_bytes - self.newest_used_bytes
        if self.last_room_bytes is not None and room >= self.last_room_bytes:
            return self
        held = None if self.newest_held_bytes is None else self.newest_held_bytes + above
        most = max(
            (each for each in (held, self.last_engine_bytes) if each is not None), default=None
        )
        return replace(self, last_room_bytes=room, last_engine_bytes=most, between=True)


def _subtract(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


class Lost(Struct, frozen=True, order=True):
    """A necessary process that exited before the rest; its pid is None where unknown."""

    role: Role
    pid: int | None = None


class Ending(Struct, frozen=True, kw_only=True):
    """An exit or a stall, and what preceded it in that run of the engine.

    The run began at `began_seconds`, possibly before the record; it was observed for `seen_seconds`, last
    `unseen_seconds` before this sample. `served` is whether it ever served, `hung_seconds` the time without progress,
    `answered` whether its page still answered. `first` are the necessary processes that exited before the rest,
    `shut_seconds` how long the server then refused its page. `idle_seconds` is the idle time at the last page; None
    where it had work, or unknown. `orphan_bytes` is what processes left over then held. `xids` and `ooms` are of the
    last 15 minutes, `unreadable` the verdicts on GPUs that could not be read: they are known to the flight record only.
    """

    what: IncidentKind
    seconds: float
    reason: ExitReason | None = None
    began_seconds: float | None = None
    seen_seconds: float = 0.0
    unseen_seconds: float | None = None
    served: bool = False
    hung_seconds: float | None = None
    answered: bool = False
    first: tuple[Lost, ...] = ()
    shut_seconds: float | None = None
    engines: tuple[EngineReading, ...] = ()
    idle_seconds: float | None = None
    usual_running: float | None = None
    gpus: tuple[GpuAtEnd, ...] = ()
    orphan_bytes: int = 0
    xids: tuple[int, ...] = ()
    ooms: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether nobody is served again: the run has ended, or a necessary process has."""
        return self.what is IncidentKind.ENDED or bool(self.first)

    @property
    def running(self) -> float | None:
        """The running requests on the last page."""
        known = [engine.running for engine in self.engines if engine.running is not None]
        return sum(known) if known else None

    @property
    def worst(self) -> GpuAtEnd | None:
        """The GPU with the least room left."""
        known = [gpu for gpu in self.gpus if gpu.last_room_bytes is not None]
        return min(known, key=lambda gpu: gpu.last_room_bytes or 0, default=None)

    @property
    def full(self) -> GpuAtEnd | None:
        """The full GPU of an engine that served; the one with the least room where it is known to be out of memory."""
        if not (self.is_over and self.served):
            return None
        if self.reason is ExitReason.OUT_OF_MEMORY:
            return self.worst
        return next((gpu for gpu in self.gpus if gpu.is_full), None)


class Diagnosis(Struct, frozen=True):
    """One cause that fits, in a sentence, with its evidence."""

    cause: EndCause
    sureness: Sureness
    sentence: str
    evidence: tuple[str, ...] = ()


class EngineStatus(Struct, frozen=True, kw_only=True):
    """The status of the engine at one tick.

    `in_service` is whether this run has worked and still runs: anything else is no evidence of a leak. It is None where
    the page does not show work. `was_seen` is whether any run was ever seen, `began_seconds` is seconds since the
    epoch. `event` is the exit or the stall since the last tick, None without one; `recent_ends` counts exits in the
    last 90 minutes. `progress_age_seconds` is None without work. `stranded` pairs the labels of an engine idle for a
    minute with its KV cache still in use, `to_wake` a GPU's UUID with what a sleeping engine needs there to wake,
    `first_rooms` with its free memory when this run became ready; `first_host_room_bytes` is the host's free memory
    then.
    """

    state: EngineState
    in_service: bool | None = True
    was_seen: bool = True
    began_seconds: float | None = None
    restarts: int = 0
    exits: tuple[tuple[ExitReason, int], ...] = ()
    event: Ending | None = None
    recent_ends: int = 0
    progress_age_seconds: float | None = None
    stranded: tuple[tuple[tuple[str, str], float], ...] = ()
    to_wake: tuple[tuple[str, int], ...] = ()
    first_rooms: tuple[tuple[str, int], ...] = ()
    first_host_room_bytes: int | None = None
    hang_signs: tuple[HangSign, ...] = ()

    @property
    def ended(self) -> ExitReason | None:
        """Why a run ended since the last tick, None if none did."""
        return None if self.event is None else self.event.reason
