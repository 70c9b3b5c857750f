"""The status of the engine, and how its run ended."""

from math import floor
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.model.engine import EngineReading, HangSign
from vllm_headroom.model.gpu import Device
from vllm_headroom.model.start import LogEnding
from vllm_headroom.vocabulary import (
    EndCause,
    EngineState,
    ExitReason,
    IncidentKind,
    LeakState,
    Role,
    Sureness,
)

ROUNDING_TOLERANCE: Final = 1e-9
"""This is added before rounding down, and subtracted before rounding up. In floating point, 0.29 *
100 is slightly less than 29.
"""

TIGHT_SHARE: Final = 0.02
"""A GPU's memory is tight if less than this share of it is free."""

BURST_MARGIN: Final = 1.5
"""Memory is also tight below this factor times the largest peak, as in HeadroomGpuMemoryTight."""


class BudgetExcess(Struct, frozen=True, kw_only=True):
    """The amount by which the engine exceeds its budget on one GPU."""

    budget_bytes: int
    excess_bytes: int
    """The amount by which the engine exceeds its budget at rest."""
    first_excess_bytes: int
    """The amount by which the engine exceeded its budget during its first minutes of work."""
    total_bytes: int
    """The size of the GPU."""
    seconds: float
    """How long the engine has exceeded the budget."""
    is_from_start: bool
    """Whether the engine has exceeded the budget ever since it was first observed working."""
    needed_bytes: int
    """The largest of three peaks above the memory at rest: the observed peak, the profile run's
    peak, and the usual peak.
    """

    @property
    def ratio(self) -> float:
        """Return the excess as a share of the budget."""
        return self.excess_bytes / self.budget_bytes

    @property
    def tight_bytes(self) -> float:
        """Return the amount of free memory below which memory is tight for this engine."""
        return max(TIGHT_SHARE * self.total_bytes, BURST_MARGIN * self.needed_bytes)

    def lower_utilization(self, utilization_ratio: float) -> float:
        """Return a lower gpu_memory_utilization that compensates for the excess, rounded down."""
        hundredths = 100 * (utilization_ratio - self.excess_bytes / self.total_bytes)
        return floor(hundredths + ROUNDING_TOLERANCE) / 100


class StraightGrowth(Struct, frozen=True, kw_only=True):
    """Linear growth of the engine's memory, under a steady load, until the run ended."""

    grown_bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Return the growth rate."""
        return self.grown_bytes / self.seconds


class GpuAtEnd(Device, frozen=True, kw_only=True):
    """The state of a GPU before a run ended.

    A field is None if unknown. `room` is free memory. The fields `first_…` are from the time when
    the engine started to serve. If that was not observed, they are from the beginning of the
    record. The fields `last_…` are the highest use and least room in the last 90 seconds. Peaks
    between samples are included.
    """

    total_bytes: int | None = None
    usable_bytes: int | None = None
    first_room_bytes: int | None = None
    last_room_bytes: int | None = None
    first_held_bytes: int | None = None
    earlier_held_bytes: int | None = None
    """The most memory that the engine held in the minutes before the last 90 seconds."""
    last_engine_bytes: int | None = None
    first_other_bytes: int | None = None
    last_other_bytes: int | None = None
    has_new_process: bool = False
    """Whether there were more processes when the fields `last_…` were measured than for `first_…`.
    """
    is_peak_unattributed: bool = False
    """Whether the least room was measured between two samples. Between samples, it is unknown which
    process held the memory.
    """
    newest_seconds: float = 0.0
    """When the newest sample was taken, in seconds since the epoch."""
    newest_used_bytes: int | None = None
    newest_held_bytes: int | None = None
    leak: LeakState = LeakState.UNKNOWN
    leak_bytes_per_request: float | None = None
    straight_growth: StraightGrowth | None = None
    excess: BudgetExcess | None = None
    """The engine's excess over its budget, or None if unknown or without an excess."""

    @property
    def growth_bytes(self) -> int | None:
        """Return the growth of the engine's memory while serving, or None if unknown."""
        return _subtract(self.first_held_bytes, self.last_engine_bytes)

    @property
    def recent_growth_bytes(self) -> int | None:
        """Return the engine's growth in the last few minutes, or None if unknown."""
        return _subtract(self.earlier_held_bytes, self.last_engine_bytes)

    @property
    def other_growth_bytes(self) -> int | None:
        """Return the growth of other processes' memory, or None if unknown."""
        return _subtract(self.first_other_bytes, self.last_other_bytes)

    def share_of_lost_room(self, growth_bytes: int | None) -> float:
        """Return what share of the lost room is explained by this growth.

        The lost room is `first_room_bytes` minus `last_room_bytes`. The result is 0 if the growth
        or the lost room is unknown, or if no room was lost. The result is above 1 if the growth
        exceeds the lost room.
        """
        lost_bytes = _subtract(self.last_room_bytes, self.first_room_bytes)
        if growth_bytes is None or not lost_bytes:
            return 0.0
        return max(0.0, growth_bytes / lost_bytes)

    def raise_peak(self, used_bytes: int) -> "GpuAtEnd":
        """Return the GPU, with its use raised to a peak measured between samples.

        It is unknown which process caused the peak. The GPU is returned unchanged if its latest use
        was at least as high, or if a higher peak is already known.
        """
        if self.usable_bytes is None or self.newest_used_bytes is None:
            return self
        if used_bytes <= self.newest_used_bytes:
            return self
        # The samples include peaks too, so only a higher peak is used.
        room_bytes = self.usable_bytes - used_bytes
        if self.last_room_bytes is not None and room_bytes >= self.last_room_bytes:
            return self
        engine_bytes = self.last_engine_bytes
        if self.newest_held_bytes is not None:
            # The engine may have caused the entire rise in used memory.
            peak_bytes = self.newest_held_bytes + used_bytes - self.newest_used_bytes
            engine_bytes = max(peak_bytes, engine_bytes or peak_bytes)
        return replace(
            self,
            last_room_bytes=room_bytes,
            last_engine_bytes=engine_bytes,
            is_peak_unattributed=True,
        )


def _subtract(start_bytes: int | None, end_bytes: int | None) -> int | None:
    """Return the growth from start to end, or None if either is unknown."""
    if start_bytes is None or end_bytes is None:
        return None
    return end_bytes - start_bytes


class Lost(Struct, frozen=True, order=True):
    """A process that exited before the others, although the engine needs it to serve."""

    role: Role
    pid: int | None = None


class Ending(Struct, frozen=True, kw_only=True):
    """An exit or a stall, and what happened before in that run."""

    kind: IncidentKind
    seconds: float
    """When the exit or stall was observed, in seconds since the epoch."""
    reason: ExitReason | None = None
    """The reason under which the exit is counted, or None for a stall."""
    began_seconds: float | None = None
    """When the run began, in seconds since the epoch, or None if unknown. The run may have begun
    before the record.
    """
    observed_seconds: float = 0.0
    """How long the run was observed."""
    unobserved_seconds: float | None = None
    """The time between the run's last sample and the sample that showed its end."""
    has_served: bool = False
    """Whether the run has ever served."""
    hung_seconds: float | None = None
    """The time without progress, or None if the engine did not hang."""
    is_page_answering: bool = False
    """Whether the server still returned the page at the time of the exit or stall."""
    lost_processes: tuple[Lost, ...] = ()
    """The necessary processes that exited before the others."""
    refused_seconds: float | None = None
    """How long the server refused connections after its core had exited."""
    engines: tuple[EngineReading, ...] = ()
    """The engines on the last page."""
    idle_seconds: float | None = None
    """How long the engine had been idle when the last page was read. The value is None if the
    engine had work or if this is unknown.
    """
    usual_running: float | None = None
    """The median number of running requests in the minutes before the exit or stall."""
    gpus: tuple[GpuAtEnd, ...] = ()
    orphan_bytes: int = 0
    """The GPU memory held by leftover processes."""
    xids: tuple[int, ...] = ()
    """The driver's XID errors in the last 15 minutes. Only the flight record has them."""
    ooms: tuple[str, ...] = ()
    """torch's OutOfMemoryErrors in the last 15 minutes. Only the flight record has them."""
    failed_step: str | None = None
    """The step in which torch raised an OutOfMemoryError just before the end. It is None if
    unknown.
    """
    highest_peak: str | None = None
    """The highest peak of any step in the last minute of service. It is None if unknown."""
    is_probed: bool = False
    """Whether a probe was running in the engine and would have recorded an OutOfMemoryError. Only
    the flight record has this.
    """
    log: LogEnding | None = None
    """What the log reports about the exit or stall. It is None without a report or without a log.
    """
    unreadable: tuple[str, ...] = ()
    """The verdicts on GPUs that could not be read. Only the flight record has them."""

    @property
    def is_over(self) -> bool:
        """Return whether the run has ended, or cannot serve because a necessary process exited."""
        return self.kind is IncidentKind.ENDED or bool(self.lost_processes)

    @property
    def running(self) -> float | None:
        """Return the number of running requests on the last page, or None if unknown."""
        running = [engine.running for engine in self.engines if engine.running is not None]
        return sum(running) if running else None

    @property
    def requests(self) -> float | None:
        """Return the last page's running and waiting requests, or None if unknown."""
        requests = 0.0
        for engine in self.engines:
            if engine.running is None or engine.waiting is None:
                return None
            requests += engine.running + engine.waiting
        return requests if self.engines else None

    @property
    def fullest_gpu(self) -> GpuAtEnd | None:
        """Return the GPU with the least room, or None if every room is unknown."""
        gpus = [gpu for gpu in self.gpus if gpu.last_room_bytes is not None]
        return min(gpus, key=lambda gpu: gpu.last_room_bytes or 0, default=None)


class Diagnosis(Struct, frozen=True):
    """A possible cause of an exit or stall, stated as a sentence, with its evidence."""

    cause: EndCause
    sureness: Sureness
    sentence: str
    evidence: tuple[str, ...] = ()


class EngineStatus(Struct, frozen=True, kw_only=True):
    """The status of the engine at one tick."""

    state: EngineState
    is_in_service: bool | None = True
    """Whether this run has done work and is still running. The value is None if the page does not
    show whether the engine works. Evidence of leaks is collected only in service.
    """
    was_seen: bool = True
    """Whether a run has ever been observed."""
    began_seconds: float | None = None
    """When the run began, in seconds since the epoch."""
    restarts: int = 0
    exits: tuple[tuple[ExitReason, int], ...] = ()
    """How many runs have exited for each reason."""
    exit_requests: float | None = None
    """The running and waiting requests on the last page before the last exit. The number is None if
    unknown.
    """
    event: Ending | None = None
    """The exit or stall since the last tick, or None if there was none."""
    log: LogEnding | None = None
    """What the log reports about the last exit. It is None if unknown or while the engine is
    serving.
    """
    recent_exits: int = 0
    """How many runs have exited in the last 90 minutes."""
    progress_age_seconds: float | None = None
    """The time since the last progress, or None while the engine has no work."""
    stranded_ratios: tuple[tuple[tuple[str, str], float], ...] = ()
    """The share of the KV cache in use without a request, by model and engine."""
    wake_bytes: tuple[tuple[str, int], ...] = ()
    """The bytes that a sleeping engine needs to wake up, keyed by GPU UUID."""
    first_room_bytes: tuple[tuple[str, int], ...] = ()
    """The free memory when this run became ready, keyed by GPU UUID."""
    first_host_room_bytes: int | None = None
    """The host's free memory when this run became ready."""
    excesses: tuple[tuple[str, BudgetExcess], ...] = ()
    """The engine's excess on each GPU where it exceeds its budget, keyed by GPU UUID."""
    hang_signs: tuple[HangSign, ...] = ()
    are_gauges_doubted: bool = False
    """Whether the page shows work without progress, but no other evidence shows any work."""

    @property
    def exit_reason(self) -> ExitReason | None:
        """Return the reason for an exit since the last tick, or None without an exit."""
        return None if self.event is None else self.event.reason
