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

FULL_ROOM_BYTES: Final = 256 * 2**20
"""A GPU was full when the least free memory was not above this, a dozen of torch's segments of
20 MiB, nor above FULL_ROOM_RATIO."""

FULL_ROOM_RATIO: Final = 0.5
"""The share of the memory that was free when the engine began to serve. A GPU that is configured to
keep little free is not out of memory."""


class GpuAtEnd(Device, frozen=True, kw_only=True):
    """One of the engine's GPUs before the end; None is unknown.

    `first_…` is when the engine began to serve, or else when the record began. `last_…` is the
    highest use, or the least room, of the last minute and a half, peaks included.
    """

    total_bytes: int | None = None
    usable_bytes: int | None = None
    first_room_bytes: int | None = None
    last_room_bytes: int | None = None
    first_held_bytes: int | None = None
    earlier_held_bytes: int | None = None
    """The most that the engine held in the minutes before the last one and a half."""
    last_engine_bytes: int | None = None
    first_other_bytes: int | None = None
    last_other_bytes: int | None = None
    has_new_process: bool = False
    """Whether there were more processes at the end than at first."""
    is_peak_unattributed: bool = False
    """Whether the least room was between two samples, where nobody knows who held the memory."""
    newest_seconds: float = 0.0
    """When the newest sample was taken, since the epoch."""
    newest_used_bytes: int | None = None
    newest_held_bytes: int | None = None
    leak: LeakState = LeakState.UNKNOWN
    leak_bytes_per_request: float | None = None

    @property
    def is_full(self) -> bool:
        """Whether almost no room was left."""
        if self.last_room_bytes is None or self.last_room_bytes > FULL_ROOM_BYTES:
            return False
        if self.first_room_bytes is None:
            return True
        # A GPU that is configured to keep little free is not full because of that.
        return self.last_room_bytes <= FULL_ROOM_RATIO * self.first_room_bytes

    @property
    def growth_bytes(self) -> int | None:
        """The growth of the engine since it began to serve."""
        return _subtract(self.first_held_bytes, self.last_engine_bytes)

    @property
    def recent_growth_bytes(self) -> int | None:
        """The growth of the engine within the last minutes."""
        return _subtract(self.earlier_held_bytes, self.last_engine_bytes)

    @property
    def other_growth_bytes(self) -> int | None:
        """The growth of other processes."""
        return _subtract(self.first_other_bytes, self.last_other_bytes)

    def share_of_lost_room(self, growth_bytes: int | None) -> float:
        """Return the share of the lost room that a growth explains; 0 where unknown."""
        lost_bytes = _subtract(self.last_room_bytes, self.first_room_bytes)
        if growth_bytes is None or not lost_bytes:
            return 0.0
        return max(0.0, growth_bytes / lost_bytes)

    def raise_peak(self, used_bytes: int) -> "GpuAtEnd":
        """Return the GPU with a later, higher use than at the newest sample, of unknown holder."""
        if self.usable_bytes is None or self.newest_used_bytes is None:
            return self
        if used_bytes <= self.newest_used_bytes:
            return self
        # The peaks of the samples are known already: only a higher one counts.
        room_bytes = self.usable_bytes - used_bytes
        if self.last_room_bytes is not None and room_bytes >= self.last_room_bytes:
            return self
        engine_bytes = self.last_engine_bytes
        if self.newest_held_bytes is not None:
            # The engine may have held all of the rise.
            peak_bytes = self.newest_held_bytes + used_bytes - self.newest_used_bytes
            engine_bytes = max(peak_bytes, engine_bytes or peak_bytes)
        return replace(
            self,
            last_room_bytes=room_bytes,
            last_engine_bytes=engine_bytes,
            is_peak_unattributed=True,
        )


def _subtract(start_bytes: int | None, end_bytes: int | None) -> int | None:
    """Return the growth from a start to an end; None where one is unknown."""
    if start_bytes is None or end_bytes is None:
        return None
    return end_bytes - start_bytes


class Lost(Struct, frozen=True, order=True):
    """A necessary process that exited before the rest; its pid is None where unknown."""

    role: Role
    pid: int | None = None


REFUSING_SECONDS: Final = 15.0
"""A server whose core has died exits within seconds and refuses its page until then."""


class Ending(Struct, frozen=True, kw_only=True):
    """An exit or a stall, and what preceded it in that run of the engine."""

    kind: IncidentKind
    seconds: float
    """When it was seen, since the epoch."""
    reason: ExitReason | None = None
    """The reason that an exit is counted under; None for a stall."""
    began_seconds: float | None = None
    """When the run began, since the epoch, possibly before the record."""
    observed_seconds: float = 0.0
    """For how long the run was observed."""
    unobserved_seconds: float | None = None
    """The time between the last sample of the run and this one."""
    has_served: bool = False
    """Whether the run ever served."""
    hung_seconds: float | None = None
    """The time without progress; None where the engine did not hang."""
    is_page_answering: bool = False
    """Whether the page still answered."""
    lost_processes: tuple[Lost, ...] = ()
    """The necessary processes that exited before the rest."""
    refused_seconds: float | None = None
    """How long the server refused its page after its core had exited."""
    engines: tuple[EngineReading, ...] = ()
    """The engines of the last page."""
    idle_seconds: float | None = None
    """The idle time at the last page; None where it had work, or where that is unknown."""
    usual_running: float | None = None
    """The median of the running requests in the minutes before."""
    gpus: tuple[GpuAtEnd, ...] = ()
    orphan_bytes: int = 0
    """The GPU memory of the processes that are left over."""
    xids: tuple[int, ...] = ()
    """The driver's errors of the last 15 minutes; only the flight record has them."""
    ooms: tuple[str, ...] = ()
    """torch's OutOfMemoryErrors of the last 15 minutes; only the flight record has them."""
    unreadable: tuple[str, ...] = ()
    """The verdicts on GPUs that could not be read; only the flight record has them."""

    @property
    def is_over(self) -> bool:
        """Whether nobody is served again: the run has ended, or a necessary process has."""
        return self.kind is IncidentKind.ENDED or bool(self.lost_processes)

    @property
    def is_shutdown(self) -> bool:
        """Whether the server had closed its port and kept running: an end that was asked for."""
        if not self.has_served or self.refused_seconds is None:
            return False
        return self.refused_seconds >= REFUSING_SECONDS

    @property
    def running(self) -> float | None:
        """The running requests on the last page."""
        running = [engine.running for engine in self.engines if engine.running is not None]
        return sum(running) if running else None

    @property
    def requests(self) -> float | None:
        """The running and waiting requests on the last page; None where a count is unknown."""
        requests = 0.0
        for engine in self.engines:
            if engine.running is None or engine.waiting is None:
                return None
            requests += engine.running + engine.waiting
        return requests if self.engines else None

    @property
    def fullest_gpu(self) -> GpuAtEnd | None:
        """The GPU with the least room left."""
        gpus = [gpu for gpu in self.gpus if gpu.last_room_bytes is not None]
        return min(gpus, key=lambda gpu: gpu.last_room_bytes or 0, default=None)

    @property
    def full_gpu(self) -> GpuAtEnd | None:
        """The full GPU of an engine that served.

        Where it is known to be out of memory, the one with the least room.
        """
        if not self.is_over or not self.has_served:
            return None
        if self.reason is ExitReason.OUT_OF_MEMORY:
            return self.fullest_gpu
        return next((gpu for gpu in self.gpus if gpu.is_full), None)


class Diagnosis(Struct, frozen=True):
    """One cause that fits, in a sentence, with its evidence."""

    cause: EndCause
    sureness: Sureness
    sentence: str
    evidence: tuple[str, ...] = ()


class EngineStatus(Struct, frozen=True, kw_only=True):
    """The status of the engine at one tick."""

    state: EngineState
    is_in_service: bool | None = True
    """Whether this run has worked and still runs: anything else is no evidence of a leak.

    None where the page does not show work."""
    was_seen: bool = True
    """Whether any run was ever seen."""
    began_seconds: float | None = None
    """When the run began, since the epoch."""
    restarts: int = 0
    exits: tuple[tuple[ExitReason, int], ...] = ()
    exit_requests: float | None = None
    """The running and waiting requests on the last page before the last exit; None where that is
    unknown, or without an exit."""
    event: Ending | None = None
    """The exit or the stall since the last tick, None without one."""
    recent_exits: int = 0
    """The exits in the last 90 minutes."""
    progress_age_seconds: float | None = None
    """The time without progress; None without work."""
    stranded_ratios: tuple[tuple[tuple[str, str], float], ...] = ()
    """The share of the KV cache that no request holds, by the labels of the engine."""
    wake_bytes: tuple[tuple[str, int], ...] = ()
    """The bytes that a sleeping engine needs to wake, by the UUID of the GPU."""
    first_room_bytes: tuple[tuple[str, int], ...] = ()
    """The free memory when this run became ready, by the UUID of the GPU."""
    first_host_room_bytes: int | None = None
    """The free memory of the host when this run became ready."""
    hang_signs: tuple[HangSign, ...] = ()

    @property
    def exit_reason(self) -> ExitReason | None:
        """Why a run ended since the last tick, None if none did."""
        return None if self.event is None else self.event.reason
